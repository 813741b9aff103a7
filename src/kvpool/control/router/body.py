"""A request's body for an instance: held whole, so that it can be sent again, or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, Protocol

__all__ = ["Body", "HeldBody", "StreamedBody"]

_PIECE: Final = 64 << 10


class Body(Protocol):
    """The body that is sent to an instance."""

    @property
    def length(self) -> int | None:
        """Its bytes, for Content-Length; None if the client did not say."""

    @property
    def may_be_sent(self) -> bool:
        """Whether all of it can still be sent."""

    def release(self) -> None:
        """Frees its memory, although others may refer to it until the answer ends."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """From its beginning."""


class HeldBody:
    """A complete body.

    Args:
        data: Its bytes.
        turn: Awaited before each piece of a large body, so that bodies take turns.
    """

    def __init__(self, data: bytes | bytearray, turn: Callable[[], Awaitable[None]]) -> None:
        self.data = data
        self._turn = turn

    def with_data(self, data: bytes) -> HeldBody:
        """Other bytes in place of these."""
        return HeldBody(data, self._turn)

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
        """As Body.__aiter__: in pieces, because data that waits to be sent is copied."""
        data = self.data
        if len(data) <= _PIECE:
            yield bytes(data)
            return
        for start in range(0, len(data), _PIECE):
            await self._turn()
            yield bytes(data[start : start + _PIECE])


class StreamedBody:
    """A body that is held piece by piece. It can be sent once.

    Args:
        head: The part that was read already.
        length: Of the whole body; None if the client did not say.
        rest: Makes an iterator over the other pieces.
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
