"""How a model leaves a space: nothing of it is in use any more, and what is kept of its cache is in DRAM."""

from __future__ import annotations

import time
from typing import Final

from kvpool.errors import ClosedError, DeadlineExceeded
from kvpool.space.model import Model
from kvpool.types import HBM

__all__ = ["drained", "keep_in_dram"]

_POLL_S: Final = 0.002


def drained(name: str, model: Model, deadline: float) -> None:
    """Waits until nothing of the model is in use, or its pool is closed. It gets no more blocks and pins meanwhile.

    Raises:
        DeadlineExceeded: Something is still in use at this time of the monotonic clock.
    """
    while not model.pool.closed:
        try:
            stats = model.pool.stats()
        except ClosedError:
            return
        tiers = (stats.hbm, stats.dram)
        active = sum(tier.active for tier in tiers)
        pinned = sum(tier.pinned for tier in tiers)
        of_peers = sum(tier.reserved + tier.lent + tier.quarantined for tier in tiers)
        if not active + pinned + of_peers:
            return
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                f"{name!r} still has {active} active and {pinned} pinned blocks, and {of_peers} that peers or swaps use"
            )
        time.sleep(_POLL_S)


def keep_in_dram(model: Model) -> bool:
    """Moves what was used last to DRAM, as much as has room there, and drops the rest of HBM's cache.

    Returns:
        Whether the pool is still there. It may have been closed, with its cache.
    """
    try:
        _keep_warmest(model)
    except ClosedError:
        return False
    return not model.pool.closed


def _keep_warmest(model: Model) -> None:
    pool = model.pool
    stats = pool.stats()
    limit = model.rules["dram"].limit
    below_limit = stats.dram.capacity if limit is None else limit // model.block_units - stats.dram.historical
    room = max(0, min(stats.dram.free, below_limit)) + stats.dram.evictable
    # Swapping out begins with the coldest, and those are not the ones to keep.
    pool.evict(max(0, stats.hbm.evictable - room), HBM)
    if stats.hbm.capacity and stats.dram.capacity:
        pool.swap_out(stats.hbm.evictable)
    pool.evict(stats.hbm.capacity, HBM)
