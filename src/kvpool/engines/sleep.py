"""What the sleep modes of engines have in common: the engine unmaps memory for a while that pools have adopted."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import StateError, Unsupported
from kvpool.pool import Pool

__all__ = ["Sleeper", "Sleepers", "check_routes", "resume_adopted", "suspend_adopted"]

_LOOK_AGAIN_SECONDS: Final = 0.005


class Sleeper(Protocol):
    """A pool over an engine's memory, or what has one."""

    def suspend(self) -> bool:
        """The memory is unmapped next. Whether it was awake before. If it raises, nothing is changed."""

    def resume(self) -> None:
        """The memory is mapped again. Idempotent."""


class Sleepers:
    """The pools of this process that follow an engine's sleep. Not thread-safe. It refers to them weakly.

    They are one set for the process because the allocators of engines are.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, sleeper: Sleeper) -> None:
        """From now on it is suspended before the engine unmaps its memory, and resumed when that is mapped again."""
        self._all.add(sleeper)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Suspends all for good if the body, which unmaps the memory, ends well.

        Otherwise those sleep that slept before. The body does not run if one of them raises.
        """
        suspended = []
        try:
            for sleeper in list(self._all):
                if sleeper.suspend():
                    suspended.append(sleeper)
            yield
        except BaseException:
            for sleeper in suspended:
                sleeper.resume()
            raise

    def resume(self) -> None:
        """The memory is mapped again: all are awake."""
        for sleeper in list(self._all):
            sleeper.resume()


def check_routes(routes: Collection[str], mode: str, engine: str) -> None:
    """Checks that nothing writes to memory when it is unmapped.

    Args:
        routes: Of the pool.
        mode: What the user calls the sleep mode, for the error.
        engine: Likewise.

    Raises:
        Unsupported: The route ucx does.
    """
    if "ucx" in routes:
        raise Unsupported(
            f"{mode} does not work with the route ucx: network adapters keep writing to memory that {engine} has "
            f"unmapped. Leave ucx out of KVPOOL_ROUTES, or {mode} off"
        )


def suspend_adopted(pool: Pool, addrs: npt.NDArray[np.uint64], timeout: float) -> bool:
    """Suspends a pool all of whose HBM was adopted at once. Idempotent. REQUIRES: no copy of this process is under way.

    Args:
        pool: With ``engine_allocates=True``.
        addrs: uint64 [block], of all blocks by their numbers. New ones are written to it if the pool cannot be
            suspended.
        timeout: Seconds to wait for peers that read blocks, and again for those that write to some.

    Returns:
        Whether the pool is suspended by this call: False if it was before, or is closed.

    Raises:
        Busy, StateError, Unsupported: As `Pool.suspend`. Then all blocks are adopted as before.
    """
    if pool.closed or pool.suspended:
        return False
    _free(pool, addrs, time.monotonic() + timeout)
    try:
        pool.suspend(keep=False, timeout=timeout)
    except BaseException:
        _adopt(pool, addrs)
        raise
    return True


def resume_adopted(pool: Pool, addrs: npt.NDArray[np.uint64]) -> None:
    """The memory is there again, with any content: adopts all blocks, whose new addresses it writes to the array.

    Idempotent: nothing happens if the pool is awake or closed.
    """
    if not pool.closed and pool.suspended:
        pool.resume()
        _adopt(pool, addrs)


def _free(pool: Pool, addrs: npt.NDArray[np.uint64], until: float) -> None:
    """Waits for peers that read some of the blocks."""
    while True:
        try:
            return pool.free(addrs)
        except StateError as error:  # those of its kind that pass: a closed or suspended pool stays so
            if type(error) is not StateError or time.monotonic() > until:
                raise
        time.sleep(_LOOK_AGAIN_SECONDS)


def _adopt(pool: Pool, addrs: npt.NDArray[np.uint64]) -> None:
    addrs[:] = pool.adopt(np.arange(len(addrs)))  # in place: others have this array, too
