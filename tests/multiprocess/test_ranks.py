"""Ranks of logical instances in separate processes: SIGKILL and SIGSTOP of a rank, of a scheduler and of a pool.

The instance that survives is here, with its ranks; the other one has a process for its scheduler and for each rank.
Both send to each other. Every word is one number, so whatever lands in a wrong place, or late, is seen. Their HBM is
where KVPOOL_TEST_DEVICE says: the same tests run on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from crew import far_nursery, near_nursery
from kit import DEVICE
from transfer.kit import eventually, route_or_skip
from transfer.ranks_kit import Instance, grown, left, left_in, things
from victims import Nursery, Victim, repeats, seed_of

import kvpool
from kvpool import KVLayout, ParallelConfig

__all__ = ["far_nursery", "near_nursery"]

LEASE = 3.0  # a machine that stops a process for a second, as a busy one does, ends none
KILLS = repeats(2, long=200)  # a role and route
STOPS = repeats(1, long=40)
ROUTES = ["shm", "cma", "sock-unix", "sock-tcp"] if DEVICE == "cpu" else ["cuda_ipc", "sock-unix", "sock-tcp"]
ROLES = ["rank", "scheduler", "pool"]
LAYOUT = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype="float16", block_tokens=128)  # a block of 512 KiB
OWN = 7  # the survivor's content
_numbers = itertools.count(1)

SEND = """
def send():
    while True:
        try:
            pool.transfer("survivor", addrs, private=number.to_bytes(2, "little"), timeout=20).wait()
        except (kvpool.Busy, kvpool.OutOfBlocks):
            time.sleep(0.001)
threading.Thread(target=send, daemon=True).start()
def take():
    while True:
        item = pool.inbox.receive(1.0)
        if item is not None:
            item.close()
threading.Thread(target=take, daemon=True).start()
"""
FILL = """
from kit import content
kv = content(memory, kvpool.HBM)
kv[...] = np.full(kv[...].shape, number, np.uint16).view(np.float16)
"""
JOIN = "memory = rank = kvpool.RankArena.join(ticket, **settings)"
UNTIL_LOST = """
def until_lost():
    while not rank.wait_lost():
        pass
    rank.close()
    os._exit(0)
threading.Thread(target=until_lost, daemon=True).start()
"""


class Crew:
    """The instance of other processes: a scheduler and two ranks, or one pool."""

    def __init__(self, stack: contextlib.ExitStack, nursery: Nursery, one: bool, settings: dict[str, Any]) -> None:
        self.number = 100 + next(_numbers) % 1000
        self.name = f"crew-{self.number}"
        self.ranks: list[Victim] = []
        self.scheduler = stack.enter_context(nursery.victim())
        self.scheduler(
            "import numpy as np\n"
            "pool = kvpool.Pool(layout, hbm_blocks=16, dram_blocks=0, parallel=parallel, name=name, **settings)\n"
            "memory = pool\naddrs = pool.alloc(6)\nNone",
            layout=LAYOUT, parallel=None if one else ParallelConfig(tp=2), name=self.name,
            settings=settings | ({"device": DEVICE} if one else {}), number=self.number,
        )  # fmt: skip
        if one:
            self.scheduler(FILL + "None")
            return
        where = self.scheduler("pool.peers.listen(where)", where=address_of(settings))
        for i in range(2):
            self.ranks.append(stack.enter_context(nursery.victim()))
            ticket = self.scheduler("pool.ranks.export(i, address=where)", i=i, where=where)
            self.ranks[-1](
                "import numpy as np\n" + JOIN + FILL + UNTIL_LOST, ticket=ticket, number=self.number,
                settings=settings
                | {"device": DEVICE, "listen": "tcp:127.0.0.1:0" if settings["prefer_unix_socket"] is False else None},
            )  # fmt: skip
        self.scheduler("pool.ranks.wait(60)")

    @classmethod
    def meeting(
        cls, stack: contextlib.ExitStack, nursery: Nursery, one: bool, settings: dict[str, Any], where: str
    ) -> Crew:
        """A victim that is connected to the survivor and sends to it; another one if it drew the survivor's number."""
        while True:
            crew = cls(stack, nursery, one, settings)
            try:
                crew.go(where)
                return crew
            except kvpool.StateError as error:
                if "is taken by another peer" not in str(error):
                    raise
                crew.end()

    def go(self, where: str) -> None:
        self.scheduler("pool.peers.connect(where, timeout=60)", where=where)
        self.scheduler(SEND)

    def end(self) -> None:
        for victim in (*self.ranks, self.scheduler):
            victim.kill()


class Taker:
    """Takes the items that come to the survivor, checks every word, and sends to all connected peers."""

    def __init__(self, instance: Instance) -> None:
        self.items = 0
        self.wrong: list[str] = []
        self._instance = instance
        self._addrs = instance.pool.alloc(4)  # before any peer is there that may fill the pool
        self._over = threading.Event()
        self._threads = [threading.Thread(target=call, daemon=True) for call in (self._take, self._send)]
        for thread in self._threads:
            thread.start()

    def _take(self) -> None:
        while not self._over.is_set():
            item = self._instance.pool.inbox.receive(0.02)
            if item is None:
                continue
            number = int.from_bytes(item.private, "little")
            words = self._instance.read(item.addrs).view(np.uint16)
            if (words != number).any():
                self.wrong.append(f"{number}: {np.unique(words)[:8]}")
            item.close()
            self.items += 1

    def _send(self) -> None:
        pool = self._instance.pool
        addrs = self._addrs
        self._instance.write(addrs, np.full((4, *LAYOUT.shape), OWN, np.uint16).view(LAYOUT.numpy_dtype))
        while not self._over.is_set():
            peers = pool.peers.list()
            if not peers:
                time.sleep(0.002)
            for peer in peers:
                with contextlib.suppress(kvpool.PeerLost, kvpool.Busy, kvpool.OutOfBlocks):
                    pool.transfer(peer.name, addrs, private=b"", timeout=20).wait()
        pool.free(addrs)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def settings_of(route: str) -> dict[str, Any]:
    return {
        "routes": (route_or_skip(route).partition("-")[0],), "secret": "ranks", "lease_s": LEASE, "huge_pages": "never",
        "prefer_unix_socket": route != "sock-tcp", "check_memory": False,
    }  # fmt: skip


def address_of(settings: dict[str, Any]) -> str:
    if not settings["prefer_unix_socket"]:
        return "tcp:127.0.0.1:0"
    return f"unix:@kvpool-ranks-{os.getpid()}-{next(_numbers)}"


@contextlib.contextmanager
def survivor_of(settings: dict[str, Any], nursery: Nursery, parallel: ParallelConfig | None) -> Iterator[Any]:
    listen = address_of(settings) if not settings["prefer_unix_socket"] else None
    instance = Instance("survivor", parallel, layout=LAYOUT, blocks=48, dram=0, listen=listen, **settings)
    taker = Taker(instance)
    try:
        with contextlib.ExitStack() as stack:  # objects that are made once for all peers are no leak
            for one in (True, False):
                Crew.meeting(stack, nursery, one, settings, instance.address)
            eventually(lambda: taker.items > 3)
            for victim in nursery._victims:
                victim.close()
        until_whole(instance)
        before = things()
        yield instance, taker
        until_whole(instance)
        # Two threads of each executor, the scheduler's and the ranks', stay once they have started.
        assert grown(before | {"threads": before["threads"] + 2 * 5}) == {}
    finally:
        taker.close()
        instance.close()


def until_whole(instance: Instance) -> None:
    eventually(lambda: instance.pool.peers.list() == [])
    assert left(instance.pool) == []


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2, pp=2), None], ids=["2x2", "one"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_killed_process_leaves_no_wrong_byte_and_leaks_no_block(
    route: str, parallel: Any, near_nursery: Nursery, request: Any
) -> None:
    dice = random.Random(seed_of(request))
    settings = settings_of(route)
    with survivor_of(settings, near_nursery, parallel) as (instance, taker):
        for role in ROLES * KILLS:
            if parallel is None and role == "pool":
                continue  # that is between two pools
            with contextlib.ExitStack() as stack:
                came = taker.items
                crew = Crew.meeting(stack, near_nursery, role == "pool", settings, instance.address)
                if dice.random() < 0.7:
                    eventually(lambda came=came: taker.items > came)
                time.sleep(dice.choice([0.0, 0.002, 0.02]) * dice.random())
                (dice.choice(crew.ranks) if role == "rank" else crew.scheduler).kill()
                eventually(lambda: instance.pool.peers.list() == [])
                assert left(instance.pool) == []
                # The surviving ones learn of it, and end by themselves.
                for victim in crew.ranks:
                    if role == "scheduler":
                        victim.wait()
                crew.end()
            assert taker.wrong == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("role", ROLES)
def test_a_stopped_process_that_wakes_writes_into_no_reused_block(
    route: str, role: str, near_nursery: Nursery, request: Any
) -> None:
    dice = random.Random(seed_of(request))
    settings = settings_of(route)
    with survivor_of(settings, near_nursery, ParallelConfig(tp=2, pp=2)) as (instance, taker):
        for _ in range(STOPS):
            with contextlib.ExitStack() as stack:
                came = taker.items
                crew = Crew.meeting(stack, near_nursery, role == "pool", settings, instance.address)
                eventually(lambda came=came: taker.items > came)
                time.sleep(0.02 * dice.random())
                stopped = dice.choice(crew.ranks) if role == "rank" else crew.scheduler
                stopped.stop()
                eventually(lambda: instance.pool.peers.list() == [])
                time.sleep(0.1)
                kept = left_in(instance.pool)
                others = instance.pool.alloc(instance.pool.audit().hbm.free)
                mark = np.full((len(others), *LAYOUT.shape), 0xABC, np.uint16).view(LAYOUT.numpy_dtype)
                instance.write(others, mark)
                stopped.wake()
                if role == "pool":
                    time.sleep(0.2)
                    stopped.kill()
                for victim in crew.ranks:
                    if role == "scheduler" or victim is stopped:
                        victim.wait()  # a rank learns that its scheduler is gone, or has given it up
                assert left(instance.pool) == [], kept
                assert (instance.read(others).view(np.uint16) == 0xABC).all()
                instance.pool.free(others)
            assert taker.wrong == []


def test_a_pool_that_was_stopped_comes_back_and_nothing_stays_in_quarantine(near_nursery: Nursery) -> None:
    settings = settings_of(ROUTES[0])
    with survivor_of(settings, near_nursery, ParallelConfig(tp=2, pp=2)) as (instance, taker):
        with contextlib.ExitStack() as stack:
            crew = Crew(stack, near_nursery, True, settings)
            lent = crew.scheduler("lent = None\npool.peers.connect(where, timeout=60)", where=instance.address)
            for _ in range(3):
                crew.scheduler("lent = pool.alloc(4, instance='survivor')\nNone")
                crew.scheduler.stop()
                eventually(lambda: instance.pool.peers.list() == [])
                eventually(lambda: left_in(instance.pool)["quarantined"] == 4)  # it may wake, and write them
                crew.scheduler.wake()
                crew.scheduler(
                    "eventually(lambda: pool.peers.list() == [])\ncall(pool, where)\nNone", where=instance.address
                )
                assert left(instance.pool) == []
            assert lent == "survivor"
            crew.end()
        assert taker.wrong == []
