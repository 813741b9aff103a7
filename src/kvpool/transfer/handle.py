"""The handle of a transfer.

The class itself is C++'s: one is made for every transfer, and that must cost next to nothing. What a coroutine and a
reader of statistics need is written here, and becomes part of it when the package is imported.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvpool._core import Transfer
from kvpool.types import TransferStats
from kvpool.waiting.coroutines import until_done

__all__ = ["Transfer", "TransferStats"]


def _stats(self: Transfer) -> TransferStats:
    """What it cost, once it has ended, well or not.

    Raises:
        StateError: It is under way.
    """
    return TransferStats(**self._stats())


def _await(self: Transfer) -> Generator[Any, None, Transfer]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the transfer."""
    return _finished(self).__await__()


async def _finished(transfer: Transfer) -> Transfer:
    await until_done(transfer)
    return transfer.wait()


Transfer.stats = property(_stats)  # type: ignore[method-assign,assignment]
Transfer.__await__ = _await  # type: ignore[method-assign]
