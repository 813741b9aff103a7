"""Members that are killed, stopped and stalled, and one that leaves, while blocks move between them by name.

Bugs these tests are there to find: what a dead member had is never released (3); a pair that stays apart after one
failure (4); a member that was paused, wakes up and writes (5); one that is restarted under its name crashes or stalls
the others (7); a caller who waits for one that is gone (2).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from attached import CLUSTER_LEASE, LINK_LEASE, eventually, home_of, send_by_name
from cluster.kit import LocalPlace
from crew import near_nursery
from victims import blocks_at_peers, check, repeats, seed_of, send_for_ever, stamp, things

import kvpool

__all__ = ["near_nursery"]

KILLS = repeats(6, long=300)  # a role
STOPS = repeats(2, long=60)
MET_AGAIN_SECONDS = 60.0  # generous: a restarted member is reconnected at once


@pytest.fixture
def place():
    one = LocalPlace()
    yield one
    one.close()


def moment(dice: random.Random) -> float:
    return dice.choice([0.0, 0.001, 0.01, 0.05]) * dice.random()


def test_a_member_asks_for_the_proof_that_a_lost_peer_writes_no_more(place, near_nursery):
    """The peer lives, has nothing to send, and does not connect by itself: the owner of the blocks does."""
    with home_of(place, LINK_LEASE) as home, home.member(near_nursery) as victim:
        victim("attachment._reconnector.connect = lambda *_: None")
        victim("lent = pool.alloc(8, instance='survivor')")
        victim.stop()
        home.events.wait("victim", "lost")
        eventually(lambda: home.pool.stats().hbm.quarantined == 8)
        victim.wake()
        home.events.wait("victim", "lost", "joined")
        eventually(lambda: home.pool.stats().hbm.quarantined == 0)
        victim.kill()


def test_a_member_that_is_killed_while_it_sends_leaves_nothing(place, near_nursery, request):
    dice = random.Random(seed_of(request))
    with home_of(place, LINK_LEASE) as home:
        instances = set()
        for life in range(1, KILLS + 1):
            with home.member(near_nursery) as victim:
                instances.add(victim("attachment.instance"))
                victim.send("send_for_ever(pool, 'survivor', seed, first)", seed=dice.random(), first=life % 200 << 16)
                if life == 1:
                    eventually(lambda: home.reader.items > 0)
                time.sleep(moment(dice))
                victim.kill()
                assert not victim.told()
            home.check_undisturbed()
        assert len(instances) == KILLS


def test_a_member_that_is_killed_while_it_receives_is_reconnected_by_its_name(place, near_nursery, request):
    dice = random.Random(seed_of(request))
    with home_of(place, LINK_LEASE) as home:
        done: list[int] = []
        for life in range(1, KILLS + 1):
            with home.member(near_nursery) as victim:
                assert send_by_name(home.pool, "victim") < MET_AGAIN_SECONDS
                ended = threading.Event()

                def send(life: int = life, ended: threading.Event = ended) -> None:
                    with contextlib.suppress(kvpool.PeerLost):
                        send_for_ever(home.pool, "victim", dice.random(), life % 200 << 16, done)
                    ended.set()

                thread = threading.Thread(target=send)
                thread.start()
                if life == 1:
                    eventually(lambda: done)
                time.sleep(moment(dice))
                victim.kill()
                assert ended.wait(60), "the sender waits for a member that is gone"
                thread.join()
                assert victim.told() == []
            home.check_undisturbed()
            assert home.pool.stats().hbm.active == 0


def test_restarting_members_leaks_no_descriptor_and_no_thread(place, near_nursery):
    with home_of(place, LINK_LEASE) as home:
        counts = []
        rounds = 10
        for _ in range(rounds):
            with home.member(near_nursery):
                send_by_name(home.pool, "victim")
            home.check_undisturbed()
            counts.append(things())
        # A worker that had nothing to do starts late, and the allocator maps what it likes: less than one a round.
        for what in ("descriptors", "threads", "mappings"):
            eventually(lambda what=what: things()[what] - counts[1][what] < rounds - 2)


def test_a_member_that_was_stopped_beyond_its_lease_wakes_up_harmless_and_works_again(place, near_nursery, request):
    dice = random.Random(seed_of(request))
    with home_of(place, LINK_LEASE) as home, home.member(near_nursery) as victim:
        pool = home.pool
        victim("""
def work():
    addrs = pool.alloc(24)
    stamp(pool, addrs, 1)
    while True:
        try:
            lent = pool.alloc(8, instance='survivor')
            while True:
                with contextlib.suppress(kvpool.Busy, kvpool.OutOfBlocks):
                    pool.transfer('survivor', addrs, private=(1).to_bytes(4, 'little'), timeout=60).wait()
                    pool.transfer('survivor', addrs[:8], to=lent, timeout=60).wait()
        except (kvpool.PeerLost, kvpool.Fenced, kvpool.NotOwner, kvpool.OutOfBlocks, kvpool.Busy):
            time.sleep(0.005)
worker = threading.Thread(target=work, daemon=True)
worker.start()
""")
        for run in range(STOPS):
            seen = home.reader.items
            eventually(lambda seen=seen: home.reader.items > seen + 2)
            time.sleep(0.02 * dice.random())
            victim.stop()
            home.events.wait("victim", *["lost"] * (run + 1))
            eventually(lambda: pool.peers.list() == [])
            eventually(lambda: pool.stats().hbm.lent == pool.stats().hbm.reserved == 0)  # a moment after it has gone
            eventually(lambda: pool.stats().hbm.active == 0)  # the reader has done with what came before
            own = take_all(pool)
            stamp(pool, own, 0xABCD00 + run)
            stats = pool.audit().hbm
            assert stats.lent == stats.reserved == stats.free == 0
            assert stats.quarantined >= 8  # the blocks that it could write to, until it is proved gone
            victim.wake()
            home.events.wait("victim", *["lost", "joined"] * (run + 1))

            eventually(lambda: pool.stats().hbm.quarantined == 0)
            assert check(pool, own, 0xABCD00 + run) == [], "a late write"
            pool.free(own)
            seen = home.reader.items
            eventually(lambda seen=seen: home.reader.items > seen + 2)
        eventually(lambda: victim("list(words)") == ["lost", "regained"] * STOPS)
        assert home.reader.wrong == []
        victim.kill()


def take_all(pool: kvpool.Pool) -> list[int]:
    """Every block that this pool would give to anybody."""
    taken: list[int] = []
    while True:
        try:
            taken += pool.alloc(1).tolist()
        except kvpool.OutOfBlocks:
            return taken


def test_a_member_whose_interpreter_stands_still_is_not_lost_and_answers(place, near_nursery):
    with home_of(place, LINK_LEASE) as home, home.member(near_nursery) as victim:
        send_by_name(home.pool, "victim")
        victim.send(f"import ctypes\nctypes.PyDLL(None).usleep({int(3e6 * CLUSTER_LEASE)})")
        until = time.monotonic() + 2.5 * CLUSTER_LEASE
        addrs = home.pool.alloc(1)
        stamp(home.pool, addrs, 0)  # the block may have been another's: its receiver checks every word
        sent = 0
        while time.monotonic() < until:
            with contextlib.suppress(kvpool.OutOfBlocks):  # its application takes nothing meanwhile
                home.pool.transfer("victim", addrs).wait()
            sent += 1
            time.sleep(0.01)
        home.pool.free(addrs)
        victim.answer(60)
        assert sent > 3
        assert "lost" not in home.events.of("victim")
        assert victim("words") == []
        victim.kill()


def test_a_member_that_drains_while_others_send_fails_no_transfer(place, near_nursery):
    with home_of(place, LINK_LEASE) as home, home.member(near_nursery, "steady"), home.member(near_nursery) as leaver:
        for one in ("steady", "victim"):
            send_by_name(home.pool, one)
        failed: list[kvpool.Error] = []
        served: dict[str, int] = {}
        over = threading.Event()

        def send() -> None:
            addrs = home.pool.alloc(1)
            stamp(home.pool, addrs, 5)
            while not over.is_set():
                for one in home.cluster.members():
                    if one.name == "survivor" or one.state != "up":
                        continue
                    try:
                        home.pool.transfer(one.name, addrs, private=(5).to_bytes(4, "little"), timeout=20).wait()
                        served[one.name] = served.get(one.name, 0) + 1
                    except kvpool.OutOfBlocks:
                        time.sleep(0.01)
                    except kvpool.Error as error:
                        failed.append(error)
            home.pool.free(addrs)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: served.get("victim", 0) > 3)
        leaver("attachment.drain(60)\nattachment.closed")
        seen = served.get("steady", 0)
        eventually(lambda: served.get("steady", 0) > seen)
        over.set()
        for thread in threads:
            thread.join(60)
        assert failed == []
        home.events.wait("victim", "joined", "left")  # its callback may be called a moment later
        assert "lost" not in home.events.of("victim")
        eventually(lambda: leaver("blocks_at_peers(pool)") == blocks_at_peers(home.pool) == 0)
