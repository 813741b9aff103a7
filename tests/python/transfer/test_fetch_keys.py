"""Keys over peers: what peers have stored under keys is fetched into the keyed cache of this pool."""

from __future__ import annotations

import _thread
import signal
import threading
from typing import Any

import numpy as np
import pytest
from attach_kit import two, url
from kit import ctrl_c_works
from transfer.keys_kit import CACHE, KEYS, LET_GO, PUT, Two, both, near, rows, values_of
from transfer.kit import (
    NEAR,
    Child,
    address_of,
    eventually,
    local_settings,
    pair_of,
    small_pool,
)

import kvpool
from kvpool import ArgumentError, DeadlineExceeded, OutOfBlocks
from kvpool.transfer import key_fetch

__all__ = ["both", "near", "url"]


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


def test_many_keys_are_asked_for_in_parts(both: Two) -> None:
    """A look-up at a peer takes the thread of the link: it has a limit."""
    many = [bytes(28) + at.to_bytes(4, "big") for at in range(8192)]
    with pytest.raises(ArgumentError, match="8193 keys"):
        both.peers.match_keys(both.to, both.cache, [*many, KEYS[0]])
    with both.peers.fetch_keys(both.to, both.cache, [*KEYS[:2], *many, *KEYS[3:5]], timeout=60) as here:
        assert np.flatnonzero(here.found).tolist() == [0, 1, 8194, 8195]


PATIENCE_S = 60.0  # for what would hang otherwise
MANY = [bytes(28) + at.to_bytes(4, "big") for at in range(3 * key_fetch.KEYS_MAX)]


def asked_of(monkeypatch: pytest.MonkeyPatch, pool: Any) -> list[tuple[str, float, float]]:
    """The peer, the hold and the timeout of each question that the pool asks from now on."""
    asked: list[tuple[str, float, float]] = []
    ask = pool._match_keys_at

    def noted(peer: str, cache: Any, keys: Any, every: bool, hold: float, timeout: float) -> Any:
        asked.append((peer, hold, timeout))
        return ask(peer, cache, keys, every, hold, timeout)

    monkeypatch.setattr(pool, "_match_keys_at", noted)
    return asked


def test_all_parts_of_a_fetch_have_one_timeout(both: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of(monkeypatch, both.pair.a)
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    def bring(*arguments: Any) -> None:
        now[0] += 70

    monkeypatch.setattr(key_fetch, "time", Clock)
    monkeypatch.setattr(key_fetch, "_bring", bring)
    both.peers.fetch_keys(both.to, both.cache, MANY, timeout=100, ask_timeout=60).close()
    assert asked == [(both.to, 100, 60), (both.to, 30, 30)]  # and not for the third part


def test_a_peer_that_does_not_answer_for_one_part_is_not_asked_for_the_next(
    both: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of(monkeypatch, both.pair.a)
    both.peers.fetch_keys(["nobody", both.to], both.cache, MANY, timeout=60).close()
    assert [peer for peer, *_ in asked] == ["nobody"] + [both.to] * 3


@pytest.mark.parametrize("ask_timeout", [0.05, 60.0])
def test_a_peer_is_blamed_only_if_it_had_the_time_for_an_answer(
    ask_timeout: float, both: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped after the first part, and the second one has 50 s left, or what the test says is too little."""
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    class Late:
        """A question that nobody answers."""

        def __init__(self, peer: str) -> None:
            self.peer = peer

        def exception(self) -> Exception:
            return DeadlineExceeded("no answer")

        def close(self) -> None:
            pass

    def bring(*arguments: Any) -> None:
        now[0] += 50
        monkeypatch.setattr(both.pair.a, "_match_keys_at", lambda peer, *_: Late(peer))

    monkeypatch.setattr(key_fetch, "time", Clock)
    monkeypatch.setattr(key_fetch, "_bring", lambda *more: bring() if now[0] == 1000.0 else None)
    failed: list[str] = []
    control = key_fetch.FetchControl(lambda peer, error: failed.append(peer))
    key_fetch.fetch_keys(both.pair.a, both.cache, [both.to], MANY, 100.0, ask_timeout, control).close()
    assert failed == ([both.to] if ask_timeout < 50 else [])


@pytest.mark.parametrize("left", [1.0, 70.0])
def test_a_peer_whose_blocks_come_too_late_is_blamed_only_if_it_had_time(
    left: float, both: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    def fetch(*_: Any, **__: Any) -> Any:
        raise DeadlineExceeded("too late")

    answers = key_fetch._answers

    def answered(*arguments: Any) -> Any:
        now[0] = 1100.0 - left
        return answers(*arguments)

    monkeypatch.setattr(key_fetch, "time", Clock)
    monkeypatch.setattr(key_fetch, "_answers", answered)
    monkeypatch.setattr(both.pair.a, "fetch", fetch)
    failed: list[str] = []
    control = key_fetch.FetchControl(lambda peer, error: failed.append(peer))
    key_fetch.fetch_keys(both.pair.a, both.cache, [both.to], KEYS[:2], 100.0, 60.0, control).close()
    assert failed == ([both.to] if left > 60 else [])


def test_a_fetch_that_is_cancelled_asks_nobody_any_more(both: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is stopped, and has an hour to answer: the fetch ends because the question is closed."""
    asked = asked_of(monkeypatch, both.pair.a)
    failed: list[str] = []
    control = key_fetch.FetchControl(lambda peer, error: failed.append(peer))
    asking, child = control.asking, both.pair.child

    def cancelled(questions: list[kvpool.PeerKeyMatch]) -> None:
        asking(questions)
        threading.Thread(target=control.cancel).start()

    monkeypatch.setattr(control, "asking", cancelled)
    pool, ended = both.pair.a, threading.Event()

    def fetch() -> None:
        key_fetch.fetch_keys(pool, both.cache, [both.to], MANY, 3600.0, 3600.0, control).close()
        ended.set()

    child.kill(signal.SIGSTOP)
    threading.Thread(target=fetch, daemon=True).start()
    in_time = ended.wait(PATIENCE_S)
    child.kill(signal.SIGCONT)
    assert in_time, "the fetch still waits for the answer"
    assert (len(asked), failed) == (1, [])  # it is not the peer's fault
    both.there(LET_GO)


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
        waits: list[bool] = []

        def has_begun(_: object, transfer: kvpool.Transfer) -> None:
            begun.append(transfer)
            if len(begun) == len(children):
                _thread.interrupt_main()

        def fetch(peer: str, *arguments: Any, **more: Any) -> kvpool.Transfer:
            children[peer].kill(signal.SIGSTOP)
            return begin(peer, *arguments, **more)

        def interrupt_again_then_continue() -> None:
            waits.append(ending.wait(PATIENCE_S))
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
        assert waits == [True], "the fetch did not wait for its transfers"
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
