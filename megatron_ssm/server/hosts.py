"""Checks the hosts that requests name, against web pages whose owners point the page's host name to this server.

A browser lets a page read replies of the page's own host. The owner of that host's name can point the name to 127.0.0.1
after the browser has loaded the page (DNS rebinding). The page's requests then name its host in the header Host. A page may
also send requests to another host without seeing the replies. Such requests name the page's host in the header Origin.
"""

import ipaddress
import re
from collections.abc import Iterable

from .errors import ApiError

PROBES = ("/health", "/ready", "/ping")  # orchestrators request these by the server's address; replies are no secret
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:/\[\]\s*]+)(:[0-9]*)?", re.IGNORECASE)
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^:/\[\]\s*]+)(:[0-9]+)?|null", re.IGNORECASE)


class Hosts:
    """The hosts that requests may name, with any port.

    A server that is bound to loopback answers requests to localhost, to loopback addresses and to `others`. A server that is
    bound to another address does the same if there are `others`; without any, it answers requests to every host.

    Args:
        bound: The host of the server's address.
        others: Further hosts that requests may name.
        origins: The origins (scheme, host, port) of pages of other hosts that may use the server and read replies (CORS).
            Pages that servers on this machine serve may, too, if `bound` is loopback.

    Raises:
        ValueError: One of `others` is not a host name or an address, or one of `origins` is not an origin.
    """

    def __init__(self, bound: str, others: Iterable[str] = (), origins: Iterable[str] = ()):
        self._others = {_checked(host) for host in others}
        self._origins = {_checked_origin(origin) for origin in origins}
        self._is_local = is_loopback(bound)
        self._are_any_allowed = not self._others and not self._is_local

    def check(self, host: str | None, origin: str | None = None) -> None:
        """ApiError 403 if the header Host, or the header Origin, names a host that is not allowed.

        A request without Host is not from a browser, and one without Origin is not from the script of another page. A page
        without a host, such as a file or a frame in a sandbox, has the origin "null".
        """
        if self._are_any_allowed:
            return
        rule = "which is neither localhost nor an --allowed-host"
        if host is not None and not self._allows(host):
            raise ApiError(403, f"the header Host names {host[:100]!r}, {rule}")
        if origin is not None and not self.shares_with(origin) and not self._allows(origin.partition("://")[2]):
            raise ApiError(403, f"the header Origin names {origin[:100]!r}, {rule}")

    def shares_with(self, origin: str | None) -> bool:
        """Return True if pages of this origin may read replies, although the origin is another host."""
        scheme, _, host = (origin or "").lower().partition("://")
        found = HOST.fullmatch(host) if self._is_local and scheme in ("http", "https") else None
        is_local = found is not None and is_loopback(_plain(found[1]))
        return origin is not None and (is_local or origin.lower() in self._origins)

    def _allows(self, host: str) -> bool:
        """Return True if requests may name this host, with any port."""
        found = HOST.fullmatch(host)
        plain = _plain(found[1]) if found else ""
        return is_loopback(plain) or plain in self._others


def is_loopback(host: str) -> bool:
    """Return True for localhost and for addresses that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(host: str) -> str:
    found = HOST.fullmatch(host)
    if found is None or found[2]:
        raise ValueError(f"--allowed-host {host} must be a host name or an address, without a port")
    return _plain(host)


def _checked_origin(origin: str) -> str:
    if ORIGIN.fullmatch(origin) is None:
        raise ValueError(
            f"--allowed-origin {origin} must be an origin, such as https://chat.example or http://localhost:3000"
        )
    return origin.lower()


def _plain(host: str) -> str:
    """The normalized name of a host: without brackets, in lower case, without a dot at its end."""
    return host.strip("[]").lower().removesuffix(".")
