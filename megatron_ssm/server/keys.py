"""API keys: who may use the server."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_ssm.engine.text import read_text

from .errors import ApiError


class Keys:
    """The API keys that clients may send. Without keys, everybody may use the server.

    Only digests are kept. A client's key is compared with all digests in constant time, so that the time of a reply tells
    nothing about the keys. A key that an HTTP header cannot carry raises a ValueError that does not show the key.
    """

    def __init__(self, keys: Iterable[str] = ()):
        self._digests: list[bytes] = []
        for number, key in enumerate(keys, 1):
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise ValueError(f"API key {number} must have printable ASCII characters only, and no spaces")
            self._digests.append(_digest(key))

    @classmethod
    def read(cls, path: str | Path) -> "Keys":
        """Read the keys in a file, one on each line; empty lines and lines that begin with # are skipped.

        ValueError if the file has no key or a key that is not valid, or is not UTF-8.
        """
        lines = (line.strip() for line in read_text(path).splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{path} has no API keys")
        return cls(keys)

    def owner(self, headers: Mapping[str, str]) -> str:
        """The number of the key in these headers, from 1; "" if there are no keys. ApiError 401 without a valid key."""
        if not self._digests:
            return ""
        given, found = _digest(key_in(headers)), ""
        for number, digest in enumerate(self._digests, 1):
            if hmac.compare_digest(given, digest):  # no early exit: every key is compared
                found = str(number)
        if not found:
            raise ApiError(
                401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return found


def key_in(headers: Mapping[str, str]) -> str:
    """Return the key in Authorization or, if that has none, in X-Api-Key or api-key; "" without any."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return (scheme.lower() == "bearer" and key.strip()) or headers.get("x-api-key") or headers.get("api-key") or ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
