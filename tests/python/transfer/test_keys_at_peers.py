"""Matches of keys at peers: what peers have stored under keys, and hold there."""

from __future__ import annotations

import asyncio
import signal

import numpy as np
import pytest
from kit import refused
from transfer.keys_kit import BRIEF, CACHE, KEYS, LET_GO, Two, both, near, rows
from transfer.kit import (
    NEAR,
    Child,
    address_of,
    eventually,
    pair_of,
    small_pool,
)

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, ClosedError, PeerLost, StateError

__all__ = ["both", "near"]


def test_a_peer_holds_what_it_has_of_the_keys_until_the_match_is_closed(near: Two) -> None:
    with near.peers.match_keys(near.to, near.cache, KEYS[:6]) as found:
        assert (found.first, len(found.addrs), found.closed, found.peer) == (2, 2, False, near.to)
        assert found.found.tolist() == [True, True, False, False, False, False]
        assert near.evict() == 3
    assert found.closed
    near.there(LET_GO)


def test_every_key_is_found_in_any_form_that_keys_have(both: Two) -> None:
    array = np.frombuffer(b"".join(KEYS[:6]), np.uint8).reshape(-1, 32)
    for keys in (KEYS[:6], [key.hex() for key in KEYS[:6]], array):
        with both.peers.match_keys(both.to, both.cache, keys, every=True) as found:
            assert found.found.tolist() == [True, True, False, True, True, True]
            assert (found.first, len(found.addrs)) == (2, 5)
    many = both.peers.match_keys([both.to, both.to], both.cache, KEYS[1:2])
    assert [one.first for one in many] == [1, 1]
    assert isinstance(asyncio.run(_awaited(both)), kvpool.PeerKeyMatch)


async def _awaited(both: Two) -> kvpool.PeerMatch:
    with both.peers.match_keys(both.to, both.cache, KEYS[:1], wait=False) as match:
        return await match


def test_a_peer_without_such_a_cache_or_with_keys_of_another_length_says_so() -> None:
    with pair_of(NEAR) as pair:
        mine = kvpool.KeyedCache(pair.a, 4, name="kv")
        with pytest.raises(StateError, match="no keyed cache kv"):
            pair.a.peers.match_keys(pair.to_b, mine, KEYS[:1])
        pair.b("short = kvpool.KeyedCache(pool, 4, 16, name='kv')")
        with pytest.raises(ArgumentError, match="have 16 bytes, not 32"):
            pair.a.peers.match_keys(pair.to_b, mine, KEYS[:1])
        with pair.a.peers.fetch_keys(pair.to_b, mine, KEYS[:1]) as here:  # for a fetch it is one that has nothing
            assert not here.found.any()
        with pytest.raises(StateError, match="already"):
            pair.b("kvpool.KeyedCache(pool, 4, name='kv')")
        pair.b("short.close()\n" + CACHE)
        with pair.a.peers.match_keys(pair.to_b, mine, KEYS[:1]) as found:
            assert found.first == 0


def test_wrong_arguments_ask_nobody(both: Two) -> None:
    with kvpool.KeyedCache(both.pair.a, 1) as nameless, small_pool() as alone:
        foreign = kvpool.KeyedCache(alone, 1, name="kv")
        assert (nameless.name, foreign.name) == (None, "kv")
        match, fetch = both.peers.match_keys, both.peers.fetch_keys
        for error, call in [
            (ArgumentError, lambda: match(both.to, nameless, KEYS[:1])),
            (ArgumentError, lambda: match(both.to, foreign, KEYS[:1])),
            (ArgumentError, lambda: match(both.to, both.cache, [b"short"])),
            (ArgumentError, lambda: match(both.to, both.cache, np.zeros((40_000, 32), np.uint8))),
            (ArgumentTypeError, lambda: match(both.to, None, KEYS[:1])),
            (ArgumentTypeError, lambda: match(3, both.cache, KEYS[:1])),
            (ArgumentTypeError, lambda: match(both.to, both.cache, KEYS[:1], every=2)),
            (ArgumentTypeError, lambda: fetch(both.to, None, KEYS[:1])),
            (ArgumentTypeError, lambda: fetch(both.to, both.cache, KEYS[:1], timeout="soon")),
            (ArgumentError, lambda: fetch(both.to, both.cache, KEYS[:1], timeout=-1)),
            (ArgumentError, lambda: fetch(both.to, foreign, KEYS[:1])),
            (StateError, lambda: alone.peers.match_keys("b", foreign, KEYS[:1])),
            (PeerLost, lambda: match("nobody", both.cache, KEYS[:1])),
        ]:
            refused(both.pair.a, error, call)
        for name in ("", "n" * 256):
            refused(both.pair.a, ArgumentError, lambda name=name: kvpool.KeyedCache(both.pair.a, 1, name=name))
        foreign.close()
    assert both.there("pool.stats().dram.active") == 5
    assert both.evict() == 5


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_peer_that_is_gone_holds_no_keys(how: str) -> None:
    child = Child()
    with small_pool(name="owner", **BRIEF) as pool, kvpool.KeyedCache(pool, 8, name="kv") as cache:
        child(
            f"pool = small_pool(name='asker', **settings)\npeer = pool.peers.connect(address)\n{CACHE}",
            settings=BRIEF, address=pool.peers.listen(address_of("sock-unix")),
        )  # fmt: skip
        cache.put(KEYS[:3], rows(1, 2, 3))
        assert child("found = pool.peers.match_keys(peer, cache, keys, hold=600)\nfound.first", keys=KEYS[:3]) == 3
        assert cache.evict(3) == 0
        child.kill() if how == "killed" else child.kill(signal.SIGSTOP)
        eventually(lambda: cache.evict(3) == 3)
        if how == "stopped":
            child.kill(signal.SIGCONT)
    child.close()


def test_a_hold_of_keys_ends_at_its_deadline() -> None:
    with pair_of("sock-unix") as pair:
        both = Two(pair)
        found = both.peers.match_keys(both.to, both.cache, KEYS[:2], hold=0.05)
        both.there(LET_GO)
        assert found.closed
        with pytest.raises(ClosedError), found:
            pass
