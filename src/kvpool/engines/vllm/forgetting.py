"""What a reset does to a cache that peers read at the same time."""

from __future__ import annotations

from kvpool.pool import Pool
from kvpool.types import DRAM

__all__ = ["forget_all"]


def forget_all(pool: Pool) -> None:
    """Nothing that is cached in DRAM now is found any more. What somebody has pinned is free when its pins end.

    A peer may pin what it asks for at any time, so eviction alone would leave some of it in the index.
    """
    while pool.evict(1 << 20, DRAM):
        pass
    with pool.subscribe(include_cached=True) as cached:
        for event in cached.drain():
            with pool.match(event.tokens, event.namespace) as hit:  # the pin keeps others from using the blocks again
                pool.forget(hit.addrs)
