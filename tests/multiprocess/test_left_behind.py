"""What a dead peer leaves, and a pool that was closed while one was connected.

Bugs these tests are there to find: a handle that the application keeps keeps the mapping, the socket and the pidfd of a
peer that is gone; the memory of a closed pool that stays for nothing; the memory of a closed pool that is given back
while a process that was stopped in a write may still write to it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from crew import ROUTES, far_nursery, near_nursery, survivor_of, unix_address, until_no_more_than
from transfer.kit import SECRET, route_or_skip
from victims import await_no_peers, big_pool, eventually, things

import kvpool

__all__ = ["far_nursery", "near_nursery"]


@pytest.mark.parametrize("route", ROUTES)
def test_handles_that_are_kept_hold_nothing_of_a_dead_peer(route, near_nursery, far_nursery):
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with survivor_of(route, nursery, lease_s=60.0) as survivor:
        pool = survivor.pool
        before = things()
        before["threads"] += pool.settings.transfer_threads
        with nursery.victim() as victim:
            survivor.greet(victim)
            addrs = pool.alloc(4)
            sent = pool.transfer("victim", addrs[:1]).wait()
            fetched = pool.fetch("victim", victim("pool.alloc(1).tolist()")).wait()
            victim("pool.transfer('survivor', pool.alloc(1), private=b'x').wait()\nNone")
            item = pool.inbox.receive(60)
            lent = pool.alloc(1, instance="victim")
            named = pool.transfer("victim", addrs[:1], to=lent).wait()
            stream = pool.transfer("victim", addrs, layerwise=True)
            asked = pool.fetch("victim", lent, timeout=30)
            victim.kill()
        eventually(lambda: stream.done() and asked.done())
        await_no_peers(pool)
        until_no_more_than(before)
        assert isinstance(stream.transfer.exception(), kvpool.PeerLost)
        with pytest.raises(kvpool.PeerLost):
            stream.send_layer(0)
        with pytest.raises(kvpool.PeerLost):
            stream.wait()
        name = route.partition("-")[0]
        assert [one.stats.route for one in (sent, named, stream.transfer)] == [name] * 3
        assert fetched.stats.bytes == sent.stats.bytes
        assert not sent.cancel()
        assert sent.wait().addrs.size == 1
        pool.free(fetched.addrs)
        if asked.exception() is None:
            pool.free(asked.addrs)
        item.close()
        pool.free(addrs)


def arenas() -> int:
    return sum("kvpool-hbm" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("lost_before", [False, True])
@pytest.mark.parametrize("route", ["cma", "ucx"])
def test_memory_that_a_stopped_peer_may_write_outlives_its_pool(route, lost_before, near_nursery):
    route_or_skip(route)
    options = {"routes": (route,), "secret": SECRET}
    before = arenas()
    with near_nursery.victim() as victim, big_pool(**options, name="survivor") as pool:
        where = pool.peers.listen(unix_address())
        victim(
            "pool = big_pool(**options, name='victim')\npool.peers.connect(where, timeout=60)",
            options=options,
            where=where,
        )
        victim("lent = pool.alloc(4, instance='survivor')\nNone")
        assert arenas() == before + 1
        victim.stop()
        if lost_before:
            eventually(lambda: pool.peers.list() == [])
        pool.close()
        assert arenas() == before + 1
        victim.kill()
        eventually(lambda: arenas() == before)


@pytest.mark.parametrize("route", ["shm", "sock-unix"])
def test_memory_that_a_stopped_peer_cannot_write_by_address_is_freed_with_its_pool(route, near_nursery):
    """By shm a peer writes to its own mapping, by a socket this process does."""
    options = {"routes": (route.partition("-")[0],), "secret": SECRET}
    before = arenas()
    with near_nursery.victim() as victim, big_pool(**options, name="survivor") as pool:
        where = pool.peers.listen(unix_address())
        victim(
            "pool = big_pool(**options, name='victim')\npool.peers.connect(where, timeout=60)",
            options=options,
            where=where,
        )
        victim("lent = pool.alloc(4, instance='survivor')\nNone")
        victim.stop()
        pool.close()
        eventually(lambda: arenas() == before)  # not when the victim is gone: it is there
        victim.wake()
        assert victim("1 + 1") == 2
