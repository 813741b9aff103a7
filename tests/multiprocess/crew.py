"""Fixtures of the tests that start processes: nurseries that live as long as the tests of a file, and one survivor."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transfer.kit import SECRET, route_or_skip
from victims import Nursery, Reader, Victim, await_no_peers, big_pool, dropped, eventually, things

import kvpool

__all__ = [
    "ROUTES", "Survivor", "far_nursery", "near_nursery", "reading", "survivor_of", "unix_address", "until_no_more_than",
]  # fmt: skip

ROUTES = ["shm", "cma", "sock-unix", "sock-tcp", "ucx"]
_numbers = itertools.count(1)


def unix_address() -> str:
    return f"unix:@kvpool-fault-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="module")
def near_nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def far_nursery() -> Iterator[Nursery]:
    nursery = Nursery(far=True)
    yield nursery
    nursery.close()


class Survivor:
    """A pool of this process that lives through everything, and how a victim connects to it by one route."""

    def __init__(self, route: str, **settings: Any) -> None:
        self.route = route_or_skip(route)
        self.options: dict[str, Any] = {"routes": (route.partition("-")[0],), "secret": SECRET} | settings
        self.pool = big_pool(name="survivor", **self.options)
        self.address = self.pool.peers.listen("tcp:127.0.0.1:0" if route == "sock-tcp" else unix_address())

    def greet(self, victim: Victim, name: str = "victim") -> None:
        """The victim comes; a victim that was there before under that name need not have been noticed as gone."""
        known = {peer.incarnation for peer in self.pool.peers.list()}
        options = self.options | {"name": name}
        victim("pool = big_pool(**options)\npool.peers.connect(where, timeout=60)", where=self.address, options=options)
        eventually(lambda: any(peer.name == name and peer.incarnation not in known for peer in self.pool.peers.list()))


@contextlib.contextmanager
def survivor_of(route: str, nursery: Nursery, **settings: Any) -> Iterator[Survivor]:
    """When it is over, nothing of any victim may be left: no block, descriptor, thread, mapping or file."""
    survivor = Survivor(route, **settings)
    pool = survivor.pool
    try:
        with nursery.victim() as victim:  # objects that are made once for all peers are no leak
            survivor.greet(victim)
            addrs = pool.alloc(1)
            pool.transfer("victim", addrs).wait()
            victim("pool.transfer('survivor', pool.alloc(1)).wait()\nNone")
            pool.free(addrs)
            pool.inbox.receive(60).close()
        await_no_peers(pool)
        before = things()
        before["threads"] += pool.settings.transfer_threads  # they start when there is work
        yield survivor
        await_no_peers(pool)
        eventually(lambda: dropped(pool))  # items that came after the test had stopped receiving
        until_no_more_than(before)
        stats = pool.audit()
        assert stats.hbm.quarantined == stats.hbm.lent == stats.hbm.reserved == 0
        pool.free(pool.alloc(stats.hbm.capacity))  # all of them can be allocated: no one holds any
    finally:
        pool.close()


def until_no_more_than(before: dict[str, int]) -> None:
    """Fails if something has leaked since. Objects that end by themselves may take a moment."""
    until = time.monotonic() + 60
    while any(count > before[what] for what, count in things().items()):
        assert time.monotonic() < until, f"there were {before}, there are {things()}"
        time.sleep(0.01)


def reading(pool: kvpool.Pool) -> contextlib.closing[Reader]:
    return contextlib.closing(Reader(pool))
