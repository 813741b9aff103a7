"""Which paths go through.

What a client asks for is put behind an instance's address, and `/v1/../metrics` would leave `/v1` there. A path that
a server may read as another one is refused: no client asks for it by accident.
"""

from __future__ import annotations

from re import fullmatch
from typing import Final
from urllib.parse import unquote_to_bytes

from kvpool.control.router.errors import Refusal

__all__ = ["check_path"]

_BYTES_MAX: Final = 16 << 10  # with the query
_DOTS: Final = (b".", b"..")


def check_path(target: bytes) -> None:
    """Looks at a path with its query, as it came.

    Raises:
        Refusal: 400. It is too long; it has a byte that no URL has, or a `#`; or, when its `%` are resolved, its path
            has a backslash, or a segment of one or two dots (also with parameters behind them: `..;x`).
    """
    if len(target) > _BYTES_MAX:
        raise Refusal(400, f"the path has more than {_BYTES_MAX} bytes", "invalid_path")
    if not fullmatch(rb"[\x21\x22\x24-\x7e]*", target):
        raise Refusal(400, "the path has a byte that no URL has", "invalid_path")
    path = unquote_to_bytes(target.partition(b"?")[0])
    if b"\\" in path or any(segment.partition(b";")[0] in _DOTS for segment in path.split(b"/")):
        raise Refusal(400, "the path has a backslash, or a segment of dots", "invalid_path")
