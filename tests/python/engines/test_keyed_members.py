"""Which members an engine asks for keys, and what it makes of their answers, with pools in place of engines."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kit import small_layout, small_pool
from transfer.kit import NEAR, Child, address_of, eventually, local_settings, stop_process

import kvpool
from kvpool.engines import keyed_members
from kvpool.engines.keyed_members import ASKED_MAX, KeyedMembers
from kvpool.engines.remembered import Remembered
from kvpool.engines.vllm.tier_members import Elsewhere, TierMembers
from kvpool.transfer.key_fetch import FetchControl

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(8)]
SETTINGS = local_settings(NEAR)


class Membership:
    """Members by name alone."""

    name = "here"

    def __init__(self, *others: str) -> None:
        self.names = list(others)

    def others(self) -> list[str]:
        return self.names

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members have time to answer, also on a busy machine."""
    monkeypatch.setattr(keyed_members, "ASK_SECONDS", 2.0)


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    with small_pool(name="here", **SETTINGS) as pool:
        pool.peers.listen(address_of(NEAR))
        yield pool


@pytest.fixture
def owner(pool: kvpool.Pool) -> Iterator[kvpool.KeyedCache]:
    """Of the peer "there", which has the first three keys."""
    with small_pool(name="there", **SETTINGS) as there:
        cache = kvpool.KeyedCache(there, 8, name="kv")
        cache.put(KEYS[:3], np.ones((3, small_layout().block_bytes), np.uint8))
        pool.peers.connect(there.peers.listen(address_of(NEAR)))
        yield cache


def made(
    pool: kvpool.Pool, *others: str, ending: str = "", clock: Callable[[], float] = time.monotonic
) -> KeyedMembers:
    cache = kvpool.KeyedCache(pool, 8, name="kv")
    membership: Any = Membership(*others)
    return KeyedMembers(pool, cache, membership, ending, 5.0, clock)


def test_few_members_are_asked_and_only_those_of_the_same_part(pool: kvpool.Pool) -> None:
    names = [f"m{at}-{part}" for at in range(20) for part in ("kv", "state")]
    asked = made(pool, *names, ending="-kv").asked()
    assert len(asked) == len(set(asked)) == ASKED_MAX
    assert all(name.endswith("-kv") for name in asked)


def test_for_a_while_the_same_members_are_asked_and_then_others(pool: kvpool.Pool) -> None:
    now = 1000.0
    names = [f"m{at}" for at in range(40)]
    members = made(pool, *names, clock=lambda: now)
    asked = members.asked()
    assert all(members.asked() == asked for _ in range(10))
    members._avoid(asked[0], kvpool.PeerLost("gone"))
    assert set(asked[1:]) < set(members.asked())
    seen: set[str] = set()
    for _ in range(200):
        now += 10
        seen.update(members.asked())
    assert seen == set(names)  # each one has its turn


def test_a_load_asks_the_member_at_which_a_look_up_found_the_blocks_even_out_of_its_turn(
    pool: kvpool.Pool, owner: kvpool.KeyedCache
) -> None:
    now = 1000.0
    names = [f"m{at}" for at in range(40)]
    members = made(pool, *names, "there", clock=lambda: now)
    while "there" not in members.asked():
        now += 10
    assert members.find(KEYS[:3]).all()
    now = 1000.0 + 10 * ((now - 1000.0) // 10) + 9.9  # its turn ends
    members._avoided = Remembered(lambda: now)
    assert "there" in members.asked()
    assert members.find(KEYS[:3]).all()
    while "there" in members.asked():
        now += 0.2
    assert "there" in members._to_load_from()
    with members.bring(KEYS[:3]) as here:
        assert here.first == 3
    now += 10.0
    while "there" in members.asked():
        now += 10
    assert "there" not in members._to_load_from()


def test_a_member_that_fails_is_left_out_for_a_while(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    members = made(pool, "nobody", "there")
    assert members.find(KEYS[:4]).tolist() == [True] * 3 + [False]
    assert members.asked() == ["there"]  # nobody has no address
    owner.close()
    assert not members.find(KEYS[:4]).any()
    assert members.asked() == []  # no such cache any more
    assert not members.bring(KEYS[:4]).found.any()


def test_what_is_found_is_not_held_and_comes_when_it_is_brought(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    members = made(pool, "there")
    assert members.find(KEYS[:3]).all()
    with members.bring(KEYS[:4]) as here:
        assert here.first == 3


def test_a_member_that_does_not_answer_is_a_miss_and_is_left_out(
    pool: kvpool.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child()
    address = child(
        "pool = small_pool(name='silent', **settings)\ncache = kvpool.KeyedCache(pool, 4, name='kv')\n"
        "cache.put(keys, bytes(2 * cache.block_bytes))\npool.peers.listen(address)",
        settings=SETTINGS, address=address_of(NEAR), keys=KEYS[:2],
    )  # fmt: skip
    pool.peers.connect(address)
    members = made(pool, "silent")
    assert members.find(KEYS[:3]).tolist() == [True, True, False]
    stop_process(child.process.pid)
    monkeypatch.setattr(keyed_members, "ASK_SECONDS", 0.05)
    assert not members.find(KEYS[:3]).any()
    assert members.asked() == []
    child.kill(signal.SIGCONT)
    child("wait_for(lambda: (cache.evict(4), len(cache))[1] == 0)")  # the late answer holds nothing
    child.close()


def ended(tier: TierMembers, key: bytes) -> Elsewhere:
    """What is known of a key when it is no longer asked for."""
    while True:
        known = tier.look_up(key)
        if known is not Elsewhere.ASKED:
            return known
        tier.step_ended()


def test_a_tier_puts_look_ups_off_until_the_members_have_answered(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    tier = TierMembers(made(pool, "there"))
    assert [tier.look_up(key) for key in KEYS[:4]] == [Elsewhere.ASKED] * 4
    tier.step_ended()
    assert [ended(tier, key) for key in KEYS[:4]] == [Elsewhere.FOUND] * 3 + [Elsewhere.MISSING]
    assert owner.evict(8) == 0  # held for the load
    tier.close()


def test_a_key_whose_load_has_failed_is_missing_for_a_while(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    """Else vLLM would look it up, and load it, for ever."""
    tier = TierMembers(made(pool, "there"))
    assert ended(tier, KEYS[0]) is Elsewhere.FOUND
    tier.loading(KEYS[:1])
    tier.failed(KEYS[:1])
    assert tier.look_up(KEYS[0]) is Elsewhere.MISSING
    tier.close()


def test_members_let_go_of_what_was_loaded(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    tier = TierMembers(made(pool, "there"))
    assert [tier.look_up(key) for key in KEYS[:2]] == [Elsewhere.ASKED] * 2  # in one message
    assert [ended(tier, key) for key in KEYS[:2]] == [Elsewhere.FOUND] * 2
    for at in range(2):
        tier.step_ended()
        assert owner.evict(8) == (1 if at == 0 else 0)  # nobody has asked for the third
        tier.loading(KEYS[at : at + 1])
        tier.ended(KEYS[at : at + 1])
    tier.step_ended()
    eventually(lambda: owner.evict(8) == 2)
    tier.close()


def test_answers_are_read_once_a_step(pool: kvpool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may look a hundred thousand blocks up."""
    tier = TierMembers(made(pool, "nobody"))
    heard, hear = [], tier._hear

    def counted(now: float) -> None:
        heard.append(now)
        hear(now)

    monkeypatch.setattr(tier, "_hear", counted)
    for key in KEYS:
        assert tier.look_up(key) is Elsewhere.ASKED
    assert len(heard) == 1
    tier.close()


def test_a_fetch_that_fails_leaves_the_member_out(pool: kvpool.Pool, owner: kvpool.KeyedCache) -> None:
    members = made(pool, "there")
    with_error = kvpool.DeadlineExceeded("it was too slow")
    begin = pool.fetch

    def fetch(*arguments: Any, **more: Any) -> Any:
        raise with_error

    pool.fetch = fetch  # type: ignore[method-assign]
    with members.bring(KEYS[:3]) as here:
        assert here.first == 0
    assert members.asked() == []
    pool.fetch = begin  # type: ignore[method-assign]


def test_an_engine_that_ends_waits_for_no_member(pool: kvpool.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch from a stopped member is cancelled, and the next one does not begin. That is not the member's fault."""
    child = Child()
    address = child(
        "pool = small_pool(name='stopped', **settings)\ncache = kvpool.KeyedCache(pool, 4, name='kv')\n"
        "cache.put(keys, bytes(2 * cache.block_bytes))\npool.peers.listen(address)",
        settings=SETTINGS, address=address_of(NEAR), keys=KEYS[:2],
    )  # fmt: skip
    pool.peers.connect(address)
    members = made(pool, "stopped")
    assert members.find(KEYS[:2]).all()
    begin, begun, goes_on = pool.fetch, threading.Event(), threading.Event()
    note = FetchControl.begun

    def fetch(*arguments: Any, **more: Any) -> Any:
        child.kill(signal.SIGSTOP)
        return begin(*arguments, **more)

    def noted(control: FetchControl, transfer: kvpool.Transfer) -> None:
        note(control, transfer)
        begun.set()

    def hurried() -> None:
        with members.hurry():
            child.kill(signal.SIGCONT)  # what was not cancelled comes now
            goes_on.wait(60)

    pool.fetch = fetch  # type: ignore[method-assign]
    monkeypatch.setattr(FetchControl, "begun", noted)
    thread = threading.Thread(target=lambda: begun.wait(60) and hurried(), daemon=True)
    thread.start()
    cancelled: list[kvpool.Error] = []
    members._avoid = lambda name, error: cancelled.append(error)  # type: ignore[method-assign]
    members._fetch_seconds = 120.0
    with members.bring(KEYS[:2]) as here:
        assert here.first == 0
    assert not cancelled
    assert members.asked() == ["stopped"]
    begun.clear()
    members.bring(KEYS[:2]).close()
    assert not begun.is_set()
    goes_on.set()
    thread.join()
    child.close()


def test_a_question_that_cannot_be_asked_is_a_miss(pool: kvpool.Pool) -> None:
    tier = TierMembers(made(pool, "there"))
    assert tier.look_up(KEYS[0]) is Elsewhere.ASKED
    pool.close()
    with pytest.raises(kvpool.ClosedError):
        tier.step_ended()
    assert tier.look_up(KEYS[0]) is Elsewhere.MISSING


def test_without_members_nothing_is_put_off(pool: kvpool.Pool) -> None:
    assert TierMembers(made(pool)).look_up(KEYS[0]) is Elsewhere.MISSING
