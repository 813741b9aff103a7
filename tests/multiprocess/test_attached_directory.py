"""The directory of a cluster goes, comes back, and comes back empty, while blocks move between its members.

Bugs these tests are there to find: a coordinator that restarts empty and lets live data be overwritten (6); members
that stop when nobody counts them.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator

import pytest
from attached import Home, eventually, home_of, send_by_name
from cluster.etcd_server import EtcdServer
from cluster.kit import EtcdPlace, LocalPlace
from crew import near_nursery
from victims import LONG, seed_of, stamp

import kvpool

__all__ = ["near_nursery"]


@pytest.fixture
def own_etcd(tmp_path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


class Traffic:
    """Sends to a member all the time; every failure is kept."""

    def __init__(self, pool: kvpool.Pool, peer: str) -> None:
        self.done = 0
        self.failed: list[kvpool.Error] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pool, peer))
        self._thread.start()

    def _run(self, pool: kvpool.Pool, peer: str) -> None:
        addrs = pool.alloc(2)
        stamp(pool, addrs, 7)
        while not self._over.wait(0.002):
            try:
                pool.transfer(peer, addrs, private=(7).to_bytes(4, "little"), timeout=20).wait()
                self.done += 1
            except kvpool.OutOfBlocks:
                continue  # its application has not had time
            except kvpool.Error as error:
                self.failed.append(error)
        pool.free(addrs)

    def goes_on(self) -> None:
        seen = self.done
        eventually(lambda: self.done > seen + 3)

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


KILLS = 1000 if LONG else 30


def ids(home: Home) -> dict[str, int]:
    return {one.name: one.instance for one in home.cluster.members()}


def test_the_folder_of_a_local_cluster_is_removed_and_nobody_notices(near_nursery):
    place = LocalPlace()
    try:
        with home_of(place, 60.0) as home, home.member(near_nursery) as victim:
            send_by_name(home.pool, "victim")
            before = ids(home)
            traffic = Traffic(home.pool, "victim")
            for _ in range(3):
                shutil.rmtree(place.folder, ignore_errors=True)  # while they put back what is missing
                traffic.goes_on()
                eventually(lambda: (place.folder / "m.victim.lock").exists())
            traffic.close()
            assert traffic.failed == []
            assert ids(home) == before
            assert "lost" not in home.events.of("victim")
            with home.member(near_nursery, "newcomer") as newcomer:
                assert newcomer("attachment.instance") not in before.values()
                send_by_name(home.pool, "newcomer")
            victim.kill()
    finally:
        place.close()


@pytest.mark.parametrize("memory", ["with its data", "empty"])
def test_etcd_is_killed_and_comes_back(memory, own_etcd, near_nursery):
    place = EtcdPlace(own_etcd)
    try:
        with home_of(place, 60.0) as home, home.member(near_nursery) as victim:
            send_by_name(home.pool, "victim")
            before = ids(home)
            traffic = Traffic(home.pool, "victim")
            own_etcd.kill()
            traffic.goes_on()
            if memory == "empty":
                own_etcd.forget()
            traffic.goes_on()
            own_etcd.start()
            traffic.goes_on()
            with place.join() as watching:  # one that knows nothing from before
                eventually(lambda: {one.name: one.instance for one in watching.members()} == before)
            with home.member(near_nursery, "newcomer") as newcomer:
                assert newcomer("attachment.instance") not in before.values()
                send_by_name(home.pool, "newcomer")
            traffic.goes_on()
            traffic.close()
            assert traffic.failed == []
            assert victim("words") == []
            assert ids(home)["victim"] == before["victim"]
            victim.kill()
    finally:
        place.close()


def test_etcd_that_is_killed_at_any_moment_of_a_transfer_makes_none_fail(own_etcd, near_nursery, request):
    dice = random.Random(seed_of(request))
    place = EtcdPlace(own_etcd)
    try:
        with home_of(place, 60.0) as home, home.member(near_nursery) as victim:
            send_by_name(home.pool, "victim")
            before = ids(home)
            traffic = Traffic(home.pool, "victim")
            for _ in range(KILLS):
                traffic.goes_on()
                time.sleep(0.01 * dice.random())
                own_etcd.kill()
                traffic.goes_on()
                own_etcd.start()
            eventually(home.attachment._registration.lease_valid)
            traffic.close()
            assert traffic.failed == []
            assert ids(home) == before
            assert "lost" not in home.events.of("victim")
            assert victim("words") == []
            victim.kill()
    finally:
        place.close()
