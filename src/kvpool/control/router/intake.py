"""Taking a request's body in: what is short is held whole and read, what is long passes as a stream.

Large bodies take turns, one piece in each round of the event loop: however many come at once, a small request waits for
one piece of them, not for a piece of each.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel

from kvpool.control.reading.prompts import INLINE_BYTES
from kvpool.control.router.body import Body, HeldBody, StreamedBody
from kvpool.control.router.budget import STREAM_BYTES, Share
from kvpool.control.router.errors import Refusal
from kvpool.control.router.exchange import Exchange
from kvpool.control.router.settings import RouterSettings

__all__ = ["Intake"]


class Intake:
    """Reads bodies. Belongs to one event loop.

    Args:
        settings: Limits and deadlines.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._parse_max = settings.parse_bytes_max
        self._most = settings.body_bytes_max
        self._timeout_s = settings.body_timeout_s
        self._turns = anyio.Lock()

    async def take(self, exchange: Exchange, parsed: bool, share: Share) -> Body:
        """A request's body, held if it is short.

        Args:
            exchange: The request.
            parsed: Whether its body is of interest, so that more is held of it.
            share: Of the budget; what is held is taken from it.

        Raises:
            Refusal: 413, it is too long; 408, it does not come; 503, there is no room for it.
            ClientGone: The client left.
        """
        length = exchange.content_length
        if length is not None and length > self._most:
            raise self._too_long()
        held_max = self._parse_max if parsed else INLINE_BYTES
        if length is not None and length > held_max:
            await share.wait_for(STREAM_BYTES, self._timeout_s)
            return self._streamed(exchange, b"", length)
        large = length is not None and length > INLINE_BYTES
        if large and length:
            await share.wait_for(length, self._timeout_s)
        data = bytearray()
        try:
            with anyio.fail_after(self._timeout_s):
                while not exchange.body_is_whole:
                    if len(data) > INLINE_BYTES:
                        await self._turn()
                    piece = await exchange.next_of_body()
                    if not large:
                        share.take(len(piece))
                    data += piece
                    if len(data) > held_max and not exchange.body_is_whole:
                        return self._streamed(exchange, data, length)
        except TimeoutError as error:
            raise self._late() from error
        if len(data) > self._most:
            raise self._too_long()
        return HeldBody(data, self._turn)

    # ---- inside

    def _streamed(self, exchange: Exchange, head: bytes | bytearray, length: int | None) -> StreamedBody:
        had = len(head)

        async def rest() -> AsyncIterator[bytes]:
            size, waited_s = had, 0.0
            while not exchange.body_is_whole:
                await self._turn()
                began = time.monotonic()
                try:  # how long the instance takes to take it does not count
                    with anyio.fail_after(self._timeout_s - waited_s):
                        piece = await exchange.next_of_body()
                except TimeoutError as error:
                    raise self._late() from error
                waited_s = min(self._timeout_s, waited_s + time.monotonic() - began)
                size += len(piece)
                if size > self._most:
                    raise self._too_long()
                if piece:
                    yield piece

        return StreamedBody(head, length, rest)

    async def _turn(self) -> None:
        async with self._turns:
            await anyio.lowlevel.checkpoint()

    def _too_long(self) -> Refusal:
        return Refusal(413, f"the body has more than {self._most} bytes", "body_too_large")

    def _late(self) -> Refusal:
        return Refusal(408, f"the body did not come within {self._timeout_s:g} s", "body_timeout")
