r"""Where a stream of server-sent events may be cut.

A dying instance leaves an incomplete event. A client that got it would fail on broken JSON instead of reading the error
that follows. So the router passes on complete events only. Engines write whole events, so this causes no delay.

    data: {"a": 1}\n\n data: {"b            passed on | kept until its end comes
"""

from __future__ import annotations

from re import compile as compiled
from typing import Final

__all__ = ["EventCutter"]

_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_TAIL_MAX: Final = 1 << 20
_LONGEST: Final = max(map(len, _ENDS))
_DONE: Final = compiled(rb"(?:^|\n|\r)data: ?\[DONE\]")


class EventCutter:
    """Keeps the incomplete event at the end of the received data.

    Attributes:
        done: `data: [DONE]` has passed: the answer is complete, whatever happens to the connection.
    """

    def __init__(self) -> None:
        self._tail = bytearray()
        self._inside = False  # the last piece passed on ended inside an event
        self.done = False

    def feed(self, piece: bytes) -> bytes:
        """Takes received data; returns the data to pass on, which may be empty.

        An event of more than 1 MiB is passed on in parts: memory is bounded.
        """
        known = max(0, len(self._tail) - _LONGEST + 1)  # before it no mark ends in the new piece
        self._tail += piece
        end = max((at + len(mark) for mark in _ENDS if (at := self._tail.rfind(mark, known)) >= 0), default=0)
        inside = len(self._tail) - end > _TAIL_MAX
        return self._pass(len(self._tail) if inside else end, inside)

    def rest(self) -> bytes:
        """The rest after a successful end of the stream."""
        return self._pass(len(self._tail), inside=False)

    def _pass(self, end: int, inside: bool) -> bytes:
        if not end:
            return b""
        whole = bytes(self._tail[:end])
        del self._tail[:end]
        start = 1 if self._inside and whole.startswith(b"data") else 0  # this one stands in the middle of a line
        self.done = self.done or _DONE.search(whole, start) is not None
        self._inside = inside
        return whole
