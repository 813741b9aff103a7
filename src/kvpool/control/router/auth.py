"""Authentication: a key that clients send as a bearer token (RFC 6750)."""

from __future__ import annotations

from collections.abc import Iterable
from hmac import compare_digest
from typing import Final

__all__ = ["CHALLENGE", "KeyCheck"]

CHALLENGE: Final = (b"www-authenticate", b"Bearer")


class KeyCheck:
    """Checks the key of requests. Thread-safe.

    Args:
        key: ASCII; None admits all requests.
    """

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode("ascii")

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Checks a request's headers, names in lower case. Refuses several Authorization headers.

        Compares in constant time.
        """
        if self._key is None:
            return True
        named = [value for name, value in headers if name == b"authorization"]
        if len(named) != 1:
            return False
        scheme, _, token = named[0].strip().partition(b" ")
        return scheme.lower() == b"bearer" and compare_digest(token.strip(), self._key)
