"""Who may ask: a key that clients name as a bearer token (RFC 6750)."""

from __future__ import annotations

from collections.abc import Iterable
from hmac import compare_digest
from typing import Final

__all__ = ["CHALLENGE", "KeyCheck"]

CHALLENGE: Final = (b"www-authenticate", b"Bearer")


class KeyCheck:
    """Whether requests bring the key. Thread-safe.

    Args:
        key: ASCII; None lets everybody in.
    """

    def __init__(self, key: str | None) -> None:
        self._key = None if key is None else key.encode("ascii")

    def admits(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Looks at a request's headers, names in lower case. One with several Authorization headers is not let in.

        How long the comparison takes says nothing of how much of a wrong key is right.
        """
        if self._key is None:
            return True
        named = [value for name, value in headers if name == b"authorization"]
        if len(named) != 1:
            return False
        scheme, _, token = named[0].strip().partition(b" ")
        return scheme.lower() == b"bearer" and compare_digest(token.strip(), self._key)
