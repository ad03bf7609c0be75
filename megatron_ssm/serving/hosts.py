"""Checks the hosts that requests name, so that no web page can reach the server by a name that its owner points here.

A browser lets a page read what the page's own host sends. Whoever owns a name can point it to 127.0.0.1 after the browser
has loaded the page (DNS rebinding). Such requests name the page's host in the header Host. A page may also send requests to
another host, and not see the replies. They name the page's host in the header Origin.
"""

import ipaddress
import re
from collections.abc import Iterable

from megatron_ssm.api.errors import ApiError

HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:/\[\]\s*]+)(:[0-9]*)?", re.IGNORECASE)


ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^:/\[\]\s*]+)(:[0-9]+)?|null", re.IGNORECASE)


class Hosts:
    """The hosts that requests may name, with any port. bound: the host of the server's address. others: further ones.

    origins: those of pages from elsewhere that may use the server and read its replies (CORS), with scheme and port.

    A server that is bound to loopback answers to localhost and to the addresses of loopback; others count for every server
    if there are any. ValueError for one that is no host name or address.
    """

    def __init__(self, bound: str, others: Iterable[str] = (), origins: Iterable[str] = ()):
        self._others = {_checked(host) for host in others}
        self._origins = {_checked_origin(origin) for origin in origins}
        self._are_any_allowed = not self._others and not is_loopback(bound)

    def check(self, host: str | None, origin: str | None = None) -> None:
        """ApiError 403 if the header Host, or the header Origin, names another host.

        A request without Host is not from a browser, and one without Origin is not from the script of another page. The
        origin "null" is that of a page without a host, such as a file or a frame in a sandbox.
        """
        if self._are_any_allowed:
            return
        rule = "which is neither localhost nor an --allowed-host"
        if host is not None and not self._allows(host):
            raise ApiError(403, f"the header Host names {host[:100]!r}, {rule}")
        if origin is not None and not self.shares_with(origin) and not self._allows(origin.partition("://")[2]):
            raise ApiError(403, f"the header Origin names {origin[:100]!r}, {rule}")

    def shares_with(self, origin: str | None) -> bool:
        """Return True if pages of this origin may read replies although they are from elsewhere."""
        return origin is not None and origin.lower() in self._origins

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
    """A host in one way of writing it: without brackets, in lower case, without a dot at its end."""
    return host.strip("[]").lower().removesuffix(".")
