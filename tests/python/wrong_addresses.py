"""A pool, and addresses that its verbs must refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

from kit import prompt, small_pool, store

import kvpool


def changed(addr: int, **parts: int) -> int:
    """The address with some of its parts replaced."""
    place = kvpool.decode_address(addr)._replace(**parts)
    return place.instance << 50 | place.medium << 47 | place.generation << 24 | place.block


@contextlib.contextmanager
def pool_with_wrong_addresses() -> Iterator[SimpleNamespace]:
    """A pool with three active blocks of the caller, a cached prompt of two, and addresses that are not valid."""
    with small_pool() as pool:
        cached = store(pool, prompt(2))
        mine = pool.alloc(3).tolist()
        freed = pool.alloc(1).tolist()
        pool.free(freed)
        yield SimpleNamespace(
            pool=pool,
            mine=mine,
            cached=cached.tolist(),
            freed=freed[0],
            foreign=changed(mine[0], instance=5),
            future=changed(mine[0], generation=77),
            never=changed(mine[0], block=7),  # free
            beyond=changed(mine[0], block=1000),
            no_medium=changed(mine[0], medium=0),
            disk=changed(mine[0], medium=3),
            spare=changed(mine[0], medium=4),
        )
