"""SIGKILL of either side, at a random moment of a transfer.

Bugs these tests are there to find: what a dead sender had reserved or borrowed is never released (3); a pair that does
not find together again (4); a peer that comes back at the same address under the same name crashes or stalls the one
that stayed (7); a caller who is not told until a timeout (2).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from crew import ROUTES, Survivor, far_nursery, near_nursery, reading, survivor_of
from victims import Nursery, Victim, blocks_at_peers, eventually, repeats, seed_of, send_for_ever

import kvpool

__all__ = ["far_nursery", "near_nursery"]

KILLS = repeats(6, long=200)  # a role and route: 30 and 1,000 a role in all
LEASE = 60.0  # whatever is noticed here is not noticed by it
TOLD_SECONDS = 10.0  # promised: 0.1, for a connection that is reset
RELEASED_SECONDS = 30.0  # promised: 5


def nursery_of(route: str, near: Nursery, far: Nursery) -> Nursery:
    return far if route == "sock-tcp" else near


def moment(dice: random.Random) -> float:
    """Mostly within the first transfers, sometimes at the very beginning."""
    return dice.choice([0.0, 0.001, 0.01, 0.05]) * dice.random()


def until_released(pool: kvpool.Pool) -> None:
    eventually(lambda: pool.peers.list() == [], TOLD_SECONDS)
    eventually(lambda: blocks_at_peers(pool) == 0, RELEASED_SECONDS)


@pytest.mark.parametrize("route", ROUTES)
def test_a_sender_that_is_killed_at_any_moment_leaves_no_wrong_byte_and_leaks_no_block(
    route, near_nursery, far_nursery, request
):
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with survivor_of(route, nursery, lease_s=LEASE) as survivor, reading(survivor.pool) as reader:
        for life in range(1, KILLS + 1):
            with nursery.victim() as victim:
                survivor.greet(victim)
                victim.send("send_for_ever(pool, 'survivor', seed, first)", seed=dice.random(), first=life % 200 << 16)
                if life == 1:
                    eventually(lambda: reader.items > 0)
                time.sleep(moment(dice))
                victim.kill()
                assert not victim.told(), "it failed before it was killed"
            until_released(survivor.pool)
            assert reader.wrong == []


@pytest.mark.parametrize("route", ROUTES)
def test_the_death_of_a_receiver_at_any_moment_is_noticed_at_once_and_frees_everything(
    route, near_nursery, far_nursery, request
):
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    done: list[int] = []
    with survivor_of(route, nursery, lease_s=LEASE) as survivor:
        for life in range(1, KILLS + 1):
            with nursery.victim() as victim:
                survivor.greet(victim)
                victim.send("receive_for_ever(pool, tell)")
                told = kill_while_sending(survivor, victim, dice, life, done)
                assert victim.told() == []
            assert told < TOLD_SECONDS
            until_released(survivor.pool)
            assert survivor.pool.stats().hbm.active == 0


def kill_while_sending(survivor: Survivor, victim: Victim, dice: random.Random, life: int, done: list[int]) -> float:
    """Seconds from the end of the victim until the sender had been told."""
    ended: list[float] = []

    def send() -> None:
        with contextlib.suppress(kvpool.PeerLost):
            send_for_ever(survivor.pool, "victim", dice.random(), life % 200 << 16, done)
        ended.append(time.monotonic())

    thread = threading.Thread(target=send)
    thread.start()
    if life == 1:
        eventually(lambda: done)
    time.sleep(moment(dice))
    assert thread.is_alive()
    victim.kill()
    killed = time.monotonic()
    thread.join(60)
    assert not thread.is_alive(), "the sender waits for a peer that is gone"
    return ended[0] - killed


@pytest.mark.parametrize("route", ["shm", "sock-unix", "sock-tcp"])
def test_a_peer_that_dies_harms_no_other(route, near_nursery, far_nursery, request):
    """Two peers at once: while one dies again and again, the other one's transfers all succeed."""
    dice = random.Random(seed_of(request))
    nursery = nursery_of(route, near_nursery, far_nursery)
    with (
        survivor_of(route, nursery, lease_s=LEASE) as survivor,
        reading(survivor.pool) as reader,
        nursery.victim() as steady,
    ):
        survivor.greet(steady, "steady")
        steady.send("send_for_ever(pool, 'survivor', 1, 250 << 16)")
        for life in range(1, 5):
            with nursery.victim() as victim:
                survivor.greet(victim)
                victim.send("send_for_ever(pool, 'survivor', seed, first)", seed=dice.random(), first=life << 16)
                time.sleep(moment(dice))
                victim.kill()
            eventually(lambda: [peer.name for peer in survivor.pool.peers.list()] == ["steady"], TOLD_SECONDS)
            seen = reader.items
            eventually(lambda seen=seen: reader.items > seen + 10)
        assert steady.told() == []
        assert reader.wrong == []
        steady.kill()
