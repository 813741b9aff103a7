"""How a coroutine waits for what a thread of C++ does."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

__all__ = ["Waitable", "until_done"]


class Waitable(Protocol):
    """A handle of something that is under way."""

    def done(self) -> bool:
        """Whether it has ended."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when it has."""


async def until_done(handle: Waitable) -> None:
    """Returns when it has ended, one way or another. Cancelling the task ends the waiting alone."""
    if handle.done():
        return
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    # A descriptor of its own: a loop knows one reader for each, and several tasks may await one handle.
    descriptor = os.dup(handle.fileno())
    loop.add_reader(descriptor, _resolve, future)
    try:
        await future
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
