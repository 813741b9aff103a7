"""Two pools with keyed caches of one name, for the tests of keys over peers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transfer.kit import NEAR, NEAR_ROUTES, local_settings, pair_of, small_layout

import kvpool

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(20)]
ROW = small_layout().block_bytes
BRIEF = local_settings("sock-unix") | {"lease_s": 3.0}
CACHE = "cache = kvpool.KeyedCache(pool, 8, name='kv')"
PUT = "cache.put(keys, np.repeat(np.array(values, np.uint8)[:, None], cache.block_bytes, axis=1))"
LET_GO = "wait_for(lambda: (cache.evict(100), len(cache))[1] == 0)"  # nothing of it is held


def rows(*values: int) -> np.ndarray:
    return np.repeat(np.array(values, np.uint8)[:, None], ROW, axis=1)


def values_of(cache: kvpool.KeyedCache, keys: list[bytes]) -> list[int]:
    into = np.zeros((len(keys), ROW), np.uint8)
    loaded = cache.get(keys, into)
    assert (into == into[:, :1]).all()
    return into[:loaded, 0].tolist()


class Two:
    """Two pools with a cache of one name; that of `there` has the first six keys but the third."""

    def __init__(self, pair: Any, blocks: int = 8) -> None:
        self.pair = pair
        self.peers = pair.a.peers
        self.to = pair.to_b
        self.cache = kvpool.KeyedCache(pair.a, blocks, name="kv")
        self.there = pair.b
        pair.b(CACHE)
        pair.b(PUT, keys=[key for key in KEYS[:6] if key != KEYS[2]], values=[10, 11, 13, 14, 15])

    def evict(self) -> int:
        return int(self.there("cache.evict(100)"))


@pytest.fixture(params=NEAR_ROUTES)
def near(request: pytest.FixtureRequest) -> Iterator[Two]:
    with pair_of(request.param) as pair:
        yield Two(pair)


@pytest.fixture
def both() -> Iterator[Two]:
    with pair_of(NEAR) as pair:
        made = Two(pair)
        yield made
        made.cache.audit() if not made.cache.closed else None
