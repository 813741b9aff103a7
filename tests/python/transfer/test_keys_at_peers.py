"""Keys over peers: what peers have stored under keys, held there, and fetched into the keyed cache of this pool."""

from __future__ import annotations

import _thread
import asyncio
import hashlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attach_kit import two, url
from kit import ctrl_c_works, refused
from transfer.kit import (
    NEAR,
    NEAR_ROUTES,
    Child,
    address_of,
    eventually,
    local_settings,
    pair_of,
    small_layout,
    small_pool,
)

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, OutOfBlocks, PeerLost, StateError
from kvpool.transfer import key_fetch

__all__ = ["url"]

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(20)]
ROW = small_layout().block_bytes
BRIEF = local_settings("sock-unix") | {"lease_s": 1.0}
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


def test_what_is_missing_here_is_fetched_and_stored(near: Two) -> None:
    near.cache.put(KEYS[2:4], rows(2, 3))
    with near.peers.fetch_keys(near.to, near.cache, KEYS[:7]) as here:
        assert here.found.tolist() == [True] * 6 + [False]
        assert near.cache.evict(8) == 0  # pinned here
    assert values_of(near.cache, KEYS[:6]) == [10, 11, 2, 3, 14, 15]
    assert near.cache.stats()["saved_blocks"] == 6
    near.there(LET_GO)  # nothing is held there
    with near.peers.fetch_keys(near.to, near.cache, KEYS[:6]) as here:  # all are here: nobody is asked
        assert here.first == 6


def test_each_key_comes_from_one_of_the_peers_that_have_it() -> None:
    with pair_of(NEAR) as pair, small_pool(name="third", **local_settings(NEAR)) as third:
        both = Two(pair)
        other = kvpool.KeyedCache(third, 8, name="kv")
        other.put(KEYS[2:4], rows(32, 33))
        to_third = pair.a.peers.connect(third.peers.listen(address_of(NEAR)))
        with both.peers.fetch_keys([to_third, both.to], both.cache, [*KEYS[:6], KEYS[0]]) as here:
            assert here.found.all()
        assert values_of(both.cache, KEYS[:6]) == [10, 11, 32, 13, 14, 15]
        eventually(lambda: other.evict(8) == 2)


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


def test_many_keys_are_asked_for_in_parts(both: Two) -> None:
    """A look-up at a peer takes the thread of the link: it has a limit."""
    many = [bytes(28) + at.to_bytes(4, "big") for at in range(8192)]
    with pytest.raises(ArgumentError, match="8193 keys"):
        both.peers.match_keys(both.to, both.cache, [*many, KEYS[0]])
    with both.peers.fetch_keys(both.to, both.cache, [*KEYS[:2], *many, *KEYS[3:5]], timeout=60) as here:
        assert np.flatnonzero(here.found).tolist() == [0, 1, 8194, 8195]


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


def test_a_fetch_evicts_nothing_of_what_it_is_for(both: Two) -> None:
    both.cache.put(KEYS[8:12], rows(8, 9, 10, 11))  # the beginning of the prompt, used least recently
    both.cache.put(KEYS[12:16], rows(12, 13, 14, 15))
    with both.peers.fetch_keys(both.to, both.cache, [*KEYS[8:12], *KEYS[3:6]]) as here:
        assert here.first == 7


def test_a_cache_without_room_fetches_what_it_can_and_leaves_no_block_behind() -> None:
    with pair_of(NEAR) as pair:
        both = Two(pair, blocks=3)
        with pytest.raises(OutOfBlocks):
            both.peers.fetch_keys(both.to, both.cache, KEYS[:6])
        assert values_of(both.cache, [KEYS[0], KEYS[1], KEYS[3]]) == [10, 11, 13]  # the beginning, all that has room
        assert pair.a.stats().dram.active == len(both.cache) == 3
        with both.peers.fetch_keys(both.to, both.cache, KEYS[3:6]) as here:
            assert here.first == 3
            with pytest.raises(OutOfBlocks):
                both.peers.fetch_keys(both.to, both.cache, KEYS[:1])  # all that is stored is pinned
        with both.peers.fetch_keys(both.to, both.cache, KEYS[:1]) as here:  # the end of the chain makes room
            assert here.first == 1
        assert both.cache.exists(KEYS[3:6]).tolist() == [True, True, False]
        both.there(LET_GO)


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


def test_a_peer_that_dies_in_the_middle_costs_only_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said what it has, and dies when it is to send it; the other one's blocks come."""
    victim = Child()
    with pair_of(NEAR) as pair:
        both = Two(pair)
        address = victim(
            f"pool = small_pool(name='victim', **settings)\n{CACHE}\n{PUT}\npool.peers.listen(address)",
            settings=local_settings(NEAR), address=address_of(NEAR), keys=KEYS[6:8], values=[6, 7],
        )  # fmt: skip
        to_victim = pair.a.peers.connect(address)
        begin, asked = pair.a.fetch, []

        def fetch(peer: str, *arguments: Any, **more: Any) -> kvpool.Transfer:
            asked.append(peer)
            if peer == to_victim:
                victim.kill()
            return begin(peer, *arguments, **more)

        monkeypatch.setattr(pair.a, "fetch", fetch)
        with both.peers.fetch_keys([to_victim, both.to], both.cache, KEYS[:8], timeout=60) as here:
            assert here.found.tolist() == [True, True, False, True, True, True, False, False]
        assert asked == [both.to, to_victim]
        eventually(lambda: pair.a.audit().dram.active == len(both.cache) == 5)
        assert values_of(both.cache, KEYS[3:6]) == [13, 14, 15]
        both.there(LET_GO)
    victim.close()


def test_a_silent_peer_costs_the_time_for_answers_and_is_a_miss() -> None:
    victim = Child()
    with small_pool(name="asker", **local_settings("sock-unix")) as pool:
        cache = kvpool.KeyedCache(pool, 4, name="kv")
        address = victim(
            f"pool = small_pool(name='silent', **settings)\n{CACHE}\n{PUT}\npool.peers.listen(address)",
            settings=local_settings("sock-unix"), address=address_of("sock-unix"), keys=KEYS[:2], values=[6, 7],
        )  # fmt: skip
        silent = pool.peers.connect(address)
        victim.kill(signal.SIGSTOP)
        with pool.peers.fetch_keys(silent, cache, KEYS[:2], timeout=60, ask_timeout=0.1) as here:
            assert not here.found.any()
        with pytest.raises(DeadlineExceeded):
            pool.peers.match_keys(silent, cache, KEYS[:2], timeout=0.05)
        victim.kill(signal.SIGCONT)
        victim(LET_GO)  # the late answers are let go of
        assert pool.audit().dram.active == 0
    victim.close()


def test_ctrl_c_leaves_neither_blocks_nor_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, while two peers have begun to send and are stopped."""
    route = "sock-unix"
    other = Child()
    with pair_of(route) as pair:
        both = Two(pair)
        victim = pair.child
        assert victim is not None
        address = other(
            f"pool = small_pool(name='other', **settings)\n{CACHE}\n{PUT}\npool.peers.listen(address)",
            settings=local_settings(route), address=address_of(route), keys=KEYS[6:8], values=[6, 7],
        )  # fmt: skip
        children = {both.to: victim, pair.a.peers.connect(address): other}
        begin, ending = pair.a.fetch, end_of_fetch(monkeypatch)
        begun: list[kvpool.Transfer] = []

        def has_begun(_: object, transfer: kvpool.Transfer) -> None:
            begun.append(transfer)
            if len(begun) == len(children):
                _thread.interrupt_main()

        def fetch(peer: str, *arguments: Any, **more: Any) -> kvpool.Transfer:
            children[peer].kill(signal.SIGSTOP)
            return begin(peer, *arguments, **more)

        def interrupt_again_then_continue() -> None:
            ending.wait()
            _thread.interrupt_main()
            for child in children.values():
                child.kill(signal.SIGCONT)

        monkeypatch.setattr(pair.a, "fetch", fetch)
        monkeypatch.setattr(key_fetch.FetchControl, "begun", has_begun)
        thread = threading.Thread(target=interrupt_again_then_continue)
        thread.start()
        with ctrl_c_works(), pytest.raises(KeyboardInterrupt) as raised:
            both.peers.fetch_keys(list(children), both.cache, KEYS[:8], timeout=120)
        thread.join()
        del raised
        assert [transfer.done() for transfer in begun] == [True, True]
        assert pair.a.audit().dram.active == len(both.cache) == 0
        for child in children.values():
            child(LET_GO)
    other.close()


def end_of_fetch(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a fetch waits for the end of its transfers."""
    waits, await_end = threading.Event(), key_fetch._await_end

    def awaited(transfer: kvpool.Transfer) -> None:
        waits.set()
        await_end(transfer)

    monkeypatch.setattr(key_fetch, "_await_end", awaited)
    return waits


def test_members_of_a_cluster_are_connected_when_they_are_asked(url: str) -> None:
    with two(url) as (a, b):
        caches = [kvpool.KeyedCache(pool, 4, name="kv") for pool in (a, b)]
        caches[1].put(KEYS[:2], rows(1, 2))
        with a.peers.fetch_keys("b", caches[0], KEYS[:3]) as here:
            assert here.found.tolist() == [True, True, False]
        assert values_of(caches[0], KEYS[:2]) == [1, 2]
        for cache in caches:
            cache.close()


def test_threads_that_store_fetch_and_evict_at_both_ends_see_whole_blocks_each_under_its_own_key() -> None:
    with pair_of("loopback") as pair:
        pools = [pair.a, pair.b("pool")]
        caches = [kvpool.KeyedCache(pool, 6, name="kv") for pool in pools]
        names = [pair.to_b, pair.to_a]
        wrong: list[object] = []

        def work(side: int, seed: int) -> None:
            dice = np.random.default_rng(seed)
            pool, cache = pools[side], caches[side]
            for _ in range(150):
                first = int(dice.integers(0, 12))
                some = list(range(first, first + int(dice.integers(1, 5))))
                keys = [KEYS[at] for at in some]
                try:
                    if dice.integers(0, 3) == 0:
                        cache.put(keys, rows(*some))
                    else:
                        pool.peers.fetch_keys(names[side], cache, keys, timeout=60).close()
                    got = values_of(cache, keys)
                    if got != some[: len(got)]:
                        wrong.append((some, got))
                    cache.evict(int(dice.integers(0, 3)))
                except OutOfBlocks:  # all that is stored is being read
                    continue
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(side, 2 * at + side)) for side in (0, 1) for at in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for pool, cache in zip(pools, caches, strict=True):
            cache.audit()
            eventually(lambda cache=cache: cache.stats()["evictable"] == len(cache))  # nobody holds a block
            assert pool.audit().dram.active == len(cache)
            cache.close()
