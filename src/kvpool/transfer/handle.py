"""The handle of a transfer.

C++ defines the class, because every transfer makes one, which must cost next to nothing. This adds what coroutines and
readers of statistics need, when the package is imported.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvpool._core import Transfer
from kvpool.types import TransferStats
from kvpool.waiting.coroutines import until_done

__all__ = ["Transfer", "TransferStats"]


def _stats(self: Transfer) -> TransferStats:
    """Its cost, once it has ended, successfully or not.

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
