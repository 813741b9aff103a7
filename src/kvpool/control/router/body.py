"""A request's body on its way to an instance: held whole, so that it can be sent again, or passed on as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

__all__ = ["Body", "HeldBody", "StreamedBody"]

_PIECE: Final = 64 << 10


class Body(Protocol):
    """What is sent to an instance."""

    @property
    def length(self) -> int | None:
        """Bytes of it, for Content-Length; None where the client did not say."""

    @property
    def may_be_sent(self) -> bool:
        """Whether all of it is still there to be sent."""

    def release(self) -> None:
        """Lets go of what is held of it: others may refer to it for as long as its answer takes."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """From its beginning."""


class HeldBody:
    """All of a body.

    Args:
        data: It.
        turn: Is awaited before each piece of a large one, so that others have theirs.
    """

    def __init__(self, data: bytes | bytearray, turn: Callable[[], Awaitable[None]]) -> None:
        self.data = data
        self._turn = turn

    @property
    def length(self) -> int | None:
        """As Body.length."""
        return len(self.data)

    @property
    def may_be_sent(self) -> bool:
        """As Body.may_be_sent."""
        return True

    def release(self) -> None:
        """As Body.release."""
        self.data = b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """As Body.__aiter__: in pieces, for what waits to be sent is copied."""
        data = self.data
        if len(data) <= _PIECE:
            yield bytes(data)
            return
        for start in range(0, len(data), _PIECE):
            await self._turn()
            yield bytes(data[start : start + _PIECE])


class StreamedBody:
    """A body of which only a piece is here at a time. It can be sent once.

    Args:
        head: What was read of it already.
        length: Of all of it; None where the client did not say.
        rest: Makes what gives the other pieces.
    """

    def __init__(self, head: bytes | bytearray, length: int | None, rest: Callable[[], AsyncIterator[bytes]]) -> None:
        self._head: bytes | bytearray = head
        self._length = length
        self._rest = rest
        self._begun = False

    @property
    def length(self) -> int | None:
        """As Body.length."""
        return self._length

    @property
    def may_be_sent(self) -> bool:
        """As Body.may_be_sent."""
        return not self._begun

    def release(self) -> None:
        """As Body.release."""
        self._head, self._begun = b"", True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """As Body.__aiter__; raises what reading from the client raises."""
        if self._begun:
            raise RuntimeError("a streamed body is sent once")
        self._begun = True
        head, self._head = self._head, b""
        for start in range(0, len(head), _PIECE):
            yield bytes(head[start : start + _PIECE])
        del head
        async for piece in self._rest():
            yield piece
