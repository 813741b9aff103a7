"""A process that comes back under its name, and one that forks.

Bugs these tests are there to find: the one that stayed crashes or stalls when the other one is there again (7);
addresses of the dead incarnation that still work (1); blocks of an incarnation that is gone (3); a pair that is kept
apart (4).
"""

from __future__ import annotations

import contextlib
import time

import pytest
from crew import far_nursery, near_nursery, reading, survivor_of, unix_address
from transfer.kit import SECRET
from victims import await_no_peers, big_pool, blocks_at_peers, call, eventually, repeats, stamp, things

import kvpool

__all__ = ["far_nursery", "near_nursery"]

RESTARTS = repeats(10, long=1000)
ROUTES = ["shm", "sock-unix", "sock-tcp"]


@pytest.mark.parametrize("place", ["the same address", "another address"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_restarted_server_is_reconnected_every_time(route, place, near_nursery, far_nursery):
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    options = {"routes": (route.partition("-")[0],), "secret": SECRET, "lease_s": 20.0}
    where = ""
    epochs = set()
    old: list[int] = []
    counts = []
    with big_pool(**options, name="survivor") as pool:
        addrs = pool.alloc(4)
        for life in range(RESTARTS if place == "the same address" else 5):
            if not where or place == "another address":
                where = "tcp:127.0.0.1:0" if route == "sock-tcp" else unix_address()
            with nursery.victim() as victim:
                made = "pool = big_pool(**options, name='victim')\npool.peers.listen(where)"
                where = victim(made, options=options, where=where)
                # The old one may not have been noticed yet: no peer of ours is called twice, and none is the dead one.
                assert call(pool, where) == "victim"
                epochs.add(pool.peers.list()[0].incarnation)
                stamp(pool, addrs, life)
                if old:
                    with pytest.raises((kvpool.NotOwner, kvpool.PeerLost)):
                        pool.transfer("victim", addrs, to=old)
                    with contextlib.suppress(kvpool.Error):
                        pool.free(
                            old
                        )  # of the dead incarnation: says so or does nothing, and touches none of the new one's
                old = pool.alloc(4, instance="victim").tolist()
                pool.transfer("victim", addrs, to=old).wait()
                sent = pool.transfer("victim", addrs).wait().addrs.tolist()
                assert victim("check(pool, sent, life) + check(pool, old, life)", sent=sent, old=old, life=life) == []
                assert victim("len(pool.alloc(4, instance='survivor'))") == 4
                victim.kill()
                eventually(lambda: pool.peers.list() == [])
            eventually(lambda: blocks_at_peers(pool) == 0)
            counts.append(things())
        assert len(epochs) == life + 1
        pool.free(addrs)
        await_no_peers(pool)
        for what in ("descriptors", "mappings"):  # the last link may be just about to go
            eventually(lambda what=what: things()[what] <= counts[1][what])


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_returns_before_it_was_missed_takes_its_own_place(route, near_nursery, far_nursery):
    """The old process is stopped, not dead: the newest process under a name is the peer."""
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with survivor_of(route, nursery, lease_s=30.0) as survivor, reading(survivor.pool) as reader:
        pool = survivor.pool
        with nursery.victim() as old:
            survivor.greet(old)
            assert old("len(pool.alloc(6, instance='survivor'))") == 6
            old.stop()
            with nursery.victim() as new:
                survivor.greet(new)
                assert len(pool.peers.list()) == 1
                new.send("send_for_ever(pool, 'survivor', 1, 1)")
                eventually(lambda: reader.items > 3)
                old.wake()
                old("eventually(lambda: pool.peers.list() == [])")
                seen = reader.items
                eventually(lambda: reader.items > seen + 3)
                old.kill()
                assert len(pool.peers.list()) == 1
                new.kill()
        assert reader.wrong == []


@pytest.mark.parametrize("route", ROUTES)
def test_a_forked_child_keeps_no_connection_open_and_does_not_hang(route, near_nursery, far_nursery):
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with (
        survivor_of(route, nursery, lease_s=60.0) as survivor,
        reading(survivor.pool) as reader,
        nursery.victim() as victim,
    ):
        survivor.greet(victim)
        said = victim("""
import warnings
warnings.simplefilter('ignore')  # newer Pythons warn of forks beside threads: that is what this is about
thread = threading.Thread(target=send_for_ever, args=(pool, 'survivor', 1, 1), daemon=True)
thread.start()
time.sleep(0.02)
looks = []
for kind in range(3):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pool.peers.list()
            os.write(write, b'it worked')
        except kvpool.ForkError:
            os.write(write, b'ForkError')
        if kind == 0:
            pool.close()
            del pool
            gc.collect()
        if kind == 2:  # it stays when its parent has gone
            os.close(write)
            time.sleep(30)
        os._exit(0)
    os.close(write)
    looks.append(os.read(read, 100))
    os.close(read)
    if kind < 2:
        looks.append(os.waitpid(child, 0)[1])
looks
""")
        assert said == [b"ForkError", 0, b"ForkError", 0, b"ForkError"]
        seen = reader.items
        eventually(lambda: reader.items > seen + 3)  # the parent goes on
        assert reader.wrong == []
        victim.kill()
        killed = time.monotonic()
        eventually(lambda: survivor.pool.peers.list() == [])
        assert time.monotonic() - killed < 15, "noticed by its lease only, or when the child ended"
        eventually(lambda: blocks_at_peers(survivor.pool) == 0)
