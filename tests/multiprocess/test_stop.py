"""SIGSTOP is not SIGKILL: a paused process wakes up and goes on, even with a write that it had begun.

Bugs these tests are there to find: blocks that are used again while somebody may still write to them (1, 5; leave out
the quarantine, and the stamps break); a caller that waits for a peer that does not answer (2); a pair that does not
find together again (4); one stopped peer that slows all others (12).
"""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from crew import far_nursery, near_nursery, reading, survivor_of, unix_address
from transfer.kit import SECRET
from victims import (
    LEASE,
    LONG,
    Nursery,
    Victim,
    await_no_peers,
    big_pool,
    blocks_at_peers,
    call,
    check,
    eventually,
    seed_of,
    stamp,
)  # fmt: skip

import kvpool

__all__ = ["far_nursery", "near_nursery"]

STOPS = {"shm": 3, "cma": 3, "sock-unix": 2, "sock-tcp": 2}  # ten; KVPOOL_LONG: 200
OVERSHOOT_SECONDS = 10.0  # promised: 0.05
FAR_SECONDS = 120.0  # the lease and the deadlines of stuck calls: anything that ends earlier does not wait for them


@pytest.mark.parametrize("route", STOPS)
def test_late_writes_of_a_stopped_sender_reach_no_block_that_is_reused(route, near_nursery, far_nursery, request):
    dice = random.Random(seed_of(request))
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with survivor_of(route, nursery) as survivor, reading(survivor.pool) as reader, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        victim.send("send_and_come_back(pool, where, tell, 1, 1)", where=survivor.address)
        assert victim.answer() == "back"
        for run in range(STOPS[route] * (20 if LONG else 1)):
            eventually(lambda seen=reader.items: reader.items > seen)
            time.sleep(0.02 * dice.random())
            victim.stop()
            lent = pool.stats().hbm.lent  # none, if it was just coming back
            time.sleep(LEASE * dice.choice([0.5, 1.5, 2.0]) * (0.8 + 0.4 * dice.random()))
            eventually(lambda: pool.stats().hbm.active == 0)  # the reader has checked the earlier items
            lost = pool.peers.list() == []
            if lost:  # its blocks follow a moment after it has gone
                eventually(lambda: pool.stats().hbm.lent == pool.stats().hbm.reserved == 0)
            own = take_all(pool)
            stamp(pool, own, 0xABCD00 + run)
            stats = pool.audit().hbm
            if lost or pool.peers.list():  # or it has gone just now
                assert stats.free == 0
                assert stats.lent == (0 if lost else lent)
            victim.told()
            victim.wake()
            if lost:
                assert victim.answer() == "back"
            else:
                time.sleep(0.05)  # for its pending writes; their end cannot be waited for
            assert check(pool, own, 0xABCD00 + run) == [], f"stop {run}: a late write"
            if (
                lost
            ):  # over a socket only this process writes; otherwise lent and perhaps reserved blocks are quarantined
                assert (stats.quarantined == 0) if route.startswith("sock") else (stats.quarantined >= lent)
            pool.free(own)
            eventually(lambda: pool.stats().hbm.quarantined == 0)
        assert reader.wrong == []
        victim.stop()
        eventually(lambda: pool.peers.list() == [])
        victim.kill()  # the other proof that it writes no more


def take_all(pool: kvpool.Pool) -> list[int]:
    """Every block that this pool would give to anybody."""
    taken: list[int] = []
    while True:
        try:
            taken += pool.alloc(1).tolist()
        except kvpool.OutOfBlocks:
            return taken


@pytest.mark.parametrize("route", ["shm", "cma", "sock-unix", "sock-tcp"])
def test_no_caller_waits_for_a_stopped_receiver_beyond_the_deadline(route, near_nursery, far_nursery):
    """The lease is longer than the deadlines: the peer is not lost, it only does not answer."""
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with survivor_of(route, nursery, lease_s=FAR_SECONDS) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        theirs = victim("mine = pool.alloc(4)\nstamp(pool, mine, 5)\nmine.tolist()")
        addrs = pool.alloc(24)
        stamp(pool, addrs, 7)
        victim.stop()
        late = []
        for start in (
            lambda: pool.transfer("victim", addrs, timeout=0.3),
            lambda: pool.transfer("victim", addrs, private=b"x", priority="decode", timeout=0.3),
            lambda: pool.fetch("victim", theirs, timeout=0.3),
            lambda: pool.alloc(2, instance="victim", timeout=0.3),
        ):
            begin = time.monotonic()
            with pytest.raises(kvpool.DeadlineExceeded):
                start().wait(60)
            late.append(time.monotonic() - begin - 0.3)
        assert min(late) > -0.01
        assert max(late) < OVERSHOOT_SECONDS
        assert [peer.name for peer in pool.peers.list()] == ["victim"]
        own = take_all(pool)  # without the fetch's destinations, unless this process fills them
        stamp(pool, own, 9)
        victim.wake()
        eventually(lambda: blocks_at_peers(pool) == 0)
        assert check(pool, own, 9) == []
        assert check(pool, addrs, 7) == []
        sent = pool.transfer("victim", addrs, private=(7).to_bytes(4, "little")).wait().addrs.tolist()
        assert victim("check(pool, sent, 7)", sent=sent) == []
        victim("eventually(lambda: pool.audit().hbm.lent == 0)")  # blocks that it lent too late are returned
        pool.free(addrs)
        pool.free(own)


@pytest.mark.parametrize("route", ["shm", "sock-unix"])
def test_a_receiver_that_sleeps_longer_than_its_lease_is_lost_and_reconnected(route, near_nursery):
    options = {"routes": (route.partition("-")[0],), "secret": SECRET}
    with near_nursery.victim() as victim, big_pool(**options, name="a") as pool:
        made = "pool = big_pool(**options, name='b')\npool.peers.listen(where)"
        where = victim(made, options=options, where=unix_address())
        addrs = pool.alloc(24)
        for round_ in range(3):
            assert call(pool, where) == "b"
            stamp(pool, addrs, round_)
            handles = [pool.transfer("b", addrs, timeout=60) for _ in range(3)]
            victim.stop()
            begin = time.monotonic()
            ends = [handle.exception(60) for handle in handles]
            assert time.monotonic() - begin < 30  # not the deadline
            assert all(end is None or isinstance(end, (kvpool.PeerLost, kvpool.OutOfBlocks)) for end in ends), ends
            eventually(lambda: pool.peers.list() == [])
            assert check(pool, addrs, round_) == []
            assert pool.audit().hbm.active == len(addrs)
            victim.wake()
            victim("dropped(pool)")
        call(pool, where)
        victim("eventually(lambda: dropped(pool))")
        pool.transfer("b", addrs).wait()
        victim("item = pool.inbox.receive(60)\nitem.close()\neventually(lambda: blocks_at_peers(pool) == 0)")
        pool.peers.disconnect("b")
        await_no_peers(pool)


def test_a_stopped_peer_slows_no_other(near_nursery, far_nursery):
    """A call that waited for it would wait until it is lost; bench/faults shows how much slower the others are."""
    with survivor_of("sock-tcp", far_nursery, lease_s=FAR_SECONDS) as survivor, far_nursery.victim() as slow:
        survivor.greet(slow, "slow")
        with far_nursery.victim() as quick:
            survivor.greet(quick, "quick")
            quick.send("receive_for_ever(pool, tell)")
            pool = survivor.pool
            addrs = pool.alloc(24)
            stamp(pool, addrs, 1)
            slow.stop()
            stuck = [pool.transfer("slow", addrs, timeout=FAR_SECONDS) for _ in range(8)]
            send_many(pool, addrs[:2])
            assert not any(one.done() for one in stuck)
            for one in stuck:
                one.cancel()
            slow.kill()
            for one in stuck:
                assert isinstance(one.exception(60), (kvpool.PeerLost, kvpool.Cancelled))
            assert quick.told() == []
            pool.free(addrs)


def test_writes_that_wait_for_a_stopped_peer_delay_no_others(near_nursery, far_nursery):
    """Borrowers write its lent blocks without asking it first: its sockets are full, and the writers wait."""
    with (
        survivor_of("sock-tcp", far_nursery, lease_s=FAR_SECONDS, blocks=256) as survivor,
        far_nursery.victim() as slow,
    ):
        survivor.greet(slow, "slow")
        with far_nursery.victim() as quick:
            survivor.greet(quick, "quick")
            quick.send("receive_for_ever(pool, tell)")
            pool = survivor.pool
            addrs = pool.alloc(64)  # 8 MiB: with three of them, more than sockets hold
            stamp(pool, addrs, 1)
            lent = [pool.alloc(64, instance="slow") for _ in range(3)]
            slow.stop()
            stuck = [pool.transfer("slow", addrs, to=to, timeout=FAR_SECONDS) for to in lent]
            send_many(pool, addrs[:2])
            assert not any(one.done() for one in stuck)
            slow.kill()
            for one in stuck:
                assert isinstance(one.exception(60), kvpool.PeerLost)
            assert quick.told() == []
            pool.free(addrs)


def send_many(pool: kvpool.Pool, addrs: object) -> None:
    """Small transfers to a peer that is well, one after the other."""
    for _ in range(200):
        with contextlib.suppress(kvpool.OutOfBlocks):  # its application has not had time
            pool.transfer("quick", addrs, private=(1).to_bytes(4, "little")).wait(FAR_SECONDS / 4)


def test_victims_are_really_stopped(near_nursery: Nursery):
    """The other tests would pass without it."""
    with near_nursery.victim() as victim:
        assert victim("1 + 1") == 2
        victim.stop()
        victim.send("2 + 2")
        with pytest.raises(AssertionError, match="no answer"):
            Victim.answer(victim, 0.2)
        victim.wake()
        assert victim.answer() == 4
