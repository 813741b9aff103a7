"""Lets a coroutine wait for an operation of a C++ thread."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

__all__ = ["Waitable", "until_done"]


class Waitable(Protocol):
    """A handle of an operation in progress."""

    def done(self) -> bool:
        """Whether it has ended."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when it has ended."""


async def until_done(handle: Waitable) -> None:
    """Returns when the operation has ended, with or without success. Cancelling the task only ends the wait."""
    if handle.done():
        return
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    # A duplicate: a loop allows one reader for each descriptor, and several tasks may await one handle.
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
