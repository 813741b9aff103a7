"""The handles of swaps and copies in the background.

C++ defines the classes. This adds what coroutines need, when the package is imported.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kvpool._core import BlockCopy, SwapIn, SwapOut
from kvpool.waiting.coroutines import until_done

__all__ = ["BlockCopy", "SwapIn", "SwapOut"]


def _await_in(self: SwapIn) -> Generator[Any, None, SwapIn]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the swap."""
    return _brought(self).__await__()


def _await_out(self: SwapOut) -> Generator[Any, None, SwapOut]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the swap."""
    return _moved(self).__await__()


def _await_copy(self: BlockCopy) -> Generator[Any, None, BlockCopy]:
    """Waits in a coroutine; raises what wait() raises. Cancelling the task ends the waiting, not the copy."""
    return _copied(self).__await__()


async def _copied(copy: BlockCopy) -> BlockCopy:
    await until_done(copy)
    return copy.wait()


async def _brought(swap: SwapIn) -> SwapIn:
    await until_done(swap)
    return swap.wait()


async def _moved(swap: SwapOut) -> SwapOut:
    await until_done(swap)
    return swap.wait()


BlockCopy.__await__ = _await_copy  # type: ignore[method-assign]
SwapIn.__await__ = _await_in  # type: ignore[method-assign]
SwapOut.__await__ = _await_out  # type: ignore[method-assign]
