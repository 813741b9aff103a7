"""SIGKILL and SIGSTOP of either side, at a random moment of attention over a sequence that lies in both.

Bugs these tests are there to find: a result from blocks that were reused, or of which a part was missing; a creditor
whose death costs more than the tokens that it had; a view that keeps blocks when the borrower is gone, or lets them go
while it can still read them; a caller who waits for a peer that is gone or stopped.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from attending import attend, attend_for_ever, fill, half_lent
from crew import far_nursery, near_nursery, survivor_of
from test_kill import LEASE, TOLD_SECONDS, moment, nursery_of, until_released
from test_stop import take_all
from victims import LEASE as SHORT_LEASE
from victims import Victim, eventually, repeats, seed_of

import kvpool

__all__ = ["far_nursery", "near_nursery"]

ROUTES = ["shm", "sock-unix", "sock-tcp"]  # what is attended to there, or read from here, does not depend on the others
KILLS = repeats(4, long=100)
STOPS = repeats(2, long=20)
LENT = 12  # blocks: with as many here, a part of the 48 that each pool has
TOKENS = 16 * LENT
MINE = 5.0  # the survivor's value


@pytest.mark.parametrize("route", ROUTES)
def test_a_creditor_that_is_killed_at_any_moment_costs_the_tokens_that_it_had(
    route, near_nursery, far_nursery, request
):
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with survivor_of(route, nursery, lease_s=LEASE) as survivor:
        pool = survivor.pool
        for _ in range(KILLS):
            with nursery.victim() as victim:
                survivor.greet(victim)
                seq = half_lent(pool, "victim", LENT, MINE)
                lost, wrong = kill_while_attending(pool, seq, victim, dice)
            assert wrong == []
            assert lost.lost == [(0, [(0, TOKENS)])]  # of the only sequence of the batch
            assert list(seq.lost) == [(0, TOKENS)]
            again = pool.alloc(LENT)
            fill(pool, again, MINE)
            seq.replace(0, again)
            assert attend(pool, seq, MINE, dice) == []
            addrs = seq.addrs
            seq.close()
            pool.free(addrs)
            until_released(pool)


def kill_while_attending(
    pool: kvpool.Pool, seq: kvpool.KVSequence, victim: Victim, dice: random.Random
) -> tuple[kvpool.PeerLost, list[str]]:
    """With what the attention ended, and what was wrong with the results before."""
    ended: list[kvpool.PeerLost] = []
    wrong: list[str] = []
    done: list[int] = []
    seed = dice.random()

    def engine() -> None:
        try:
            attend_for_ever(pool, seq, MINE, seed, wrong, done)
        except kvpool.PeerLost as error:
            ended.append(error)

    thread = threading.Thread(target=engine)
    thread.start()
    eventually(lambda: done)
    time.sleep(moment(dice))
    victim.kill()
    thread.join(TOLD_SECONDS)
    assert not thread.is_alive(), "attention waits for a creditor that is gone"
    return ended[0], wrong


def wrong_of(victim: Victim) -> list[str]:
    """What it has told of wrong results, or of an error that ended it."""
    return [text for _, text, _ in victim.told() if text != "back"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_borrower_that_is_killed_at_any_moment_leaves_no_view(route, near_nursery, far_nursery, request):
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with survivor_of(route, nursery, lease_s=LEASE) as survivor:
        pool = survivor.pool
        for life in range(KILLS):
            with nursery.victim() as victim:
                survivor.greet(victim)
                where = dice.choice(["auto", "there", *(["here"] if route == "shm" else [])])
                victim("from attending import *")
                victim.send(
                    "attend_and_come_back(pool, address, tell, blocks, 1, where)",
                    address=survivor.address, blocks=LENT, where=where,
                )  # fmt: skip
                if life:
                    time.sleep(5 * moment(dice))
                else:
                    eventually(lambda: pool.stats().hbm.lent == LENT)
                victim.kill()
                assert wrong_of(victim) == []
            until_released(pool)
            assert pool.audit().hbm.free == pool.stats().hbm.capacity


@pytest.mark.parametrize("route", ROUTES)
def test_blocks_that_a_stopped_borrower_may_still_read_are_not_reused(route, near_nursery, far_nursery, request):
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with survivor_of(route, nursery) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        where = "here" if route == "shm" else "there"
        victim("from attending import *")
        victim.send(
            "attend_and_come_back(pool, address, tell, blocks, 1, where)",
            address=survivor.address, blocks=LENT, where=where,
        )  # fmt: skip
        assert victim.answer() == "back"
        for _ in range(STOPS):
            time.sleep(0.05 * dice.random())
            victim.stop()
            time.sleep(SHORT_LEASE * 1.5)
            eventually(lambda: pool.peers.list() == [])
            eventually(lambda: pool.stats().hbm.lent == 0)
            own = take_all(pool)
            fill(pool, own, 1e9)  # what the borrower would see
            assert len(own) <= 48 - (LENT if route == "shm" else 0)
            assert wrong_of(victim) == []
            victim.wake()
            if route != "shm":  # where nothing but what it lets go of is free for it
                pool.free(own)
            assert victim.answer() == "back"
            if route == "shm":
                pool.free(own)
        victim.kill()
        eventually(lambda: pool.stats().hbm.free == 48)
        assert wrong_of(victim) == []


@pytest.mark.parametrize("route", ROUTES)
def test_blocks_that_a_stopped_peer_views_are_not_reused_although_they_were_freed(
    route, near_nursery, far_nursery, request
):
    """They were not lent to it: a cached prefix, say. The view alone keeps them."""
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with survivor_of(route, nursery) as survivor:
        pool = survivor.pool
        for _ in range(STOPS):
            with nursery.victim() as victim:
                survivor.greet(victim)
                shown = pool.alloc(LENT)
                fill(pool, shown, MINE)
                victim("from attending import *")
                where = "here" if route == "shm" else "there"
                victim.send(
                    "attend_to_shown(pool, tell, shown, value, 1, where)",
                    shown=shown.tolist(), value=MINE, where=where,
                )  # fmt: skip
                assert victim.answer() == "attends"
                time.sleep(0.05 * dice.random())
                victim.stop()
                pool.free(shown)
                assert pool.stats().hbm.free <= 48 - LENT
                time.sleep(SHORT_LEASE * 1.5)
                eventually(lambda: pool.peers.list() == [])
                if route != "shm":  # it cannot read them any more
                    eventually(lambda: pool.stats().hbm.free == 48)
                own = take_all(pool)
                fill(pool, own, 1e9)
                assert len(own) == 48 - (LENT if route == "shm" else 0)
                victim.wake()
                assert victim.answer() in ("PeerLost", "StaleAddress")
            pool.free(own)  # the victim is gone, which proves that it reads no more
            eventually(lambda: pool.stats().hbm.free == 48)
