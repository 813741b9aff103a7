"""Pools of several processes that are members of one cluster: the survivor here, and victims that join by name."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

from cluster.kit import Events, Place
from transfer.kit import SECRET
from victims import LEASE, Nursery, Reader, Victim, big_pool, blocks_at_peers, stamp
from victims import eventually as eventually_within

import kvpool

__all__ = ["CLUSTER_LEASE", "JOIN", "LINK_LEASE", "Home", "Traffic", "eventually", "home_of", "ids", "send_by_name"]

# The cluster's lease: a machine that is busy with other things must not make one run out.
CLUSTER_LEASE = 6.0
# A silent link is left alone for long: whatever ends here, the cluster has ended.
LINK_LEASE = 60.0

eventually = functools.partial(eventually_within, seconds=60)

# A victim's code as a member, which receives items and reports errors in them.
JOIN = """
import contextlib
cluster = kvpool.Cluster.join(url, lease=lease)
pool = big_pool(**options)
words = []
attachment = pool.attach(cluster, name=name)
attachment._registration.on_lease(words.append)

def take():
    with contextlib.suppress(kvpool.Error):  # when it is closed
        receive_for_ever(pool, tell)

threading.Thread(target=take, daemon=True).start()
attachment.instance
"""


class Home:
    """The survivor: a member of this process, its events, and the items that it has received."""

    def __init__(self, place: Place, link_lease: float, **options: Any) -> None:
        self.place = place
        self.options: dict[str, Any] = {"lease_s": link_lease, "routes": ("shm",)} | options
        self.cluster = place.join(lease=CLUSTER_LEASE)
        if not self.cluster.secret:  # etcd keeps none, and its pools connect over TCP
            self.options["secret"] = SECRET
        self.pool = big_pool(**self.options)
        self.attachment = self.pool.attach(self.cluster, name="survivor")
        self.events = Events(self.cluster)
        self.reader = Reader(self.pool)

    @contextlib.contextmanager
    def member(self, nursery: Nursery, name: str = "victim") -> Iterator[Victim]:
        """A member in another process, which this one knows."""
        with nursery.victim() as victim:
            instance = victim(JOIN, url=self.place.url, lease=CLUSTER_LEASE, options=self.options, name=name)
            eventually(lambda: any(one.instance == instance for one in self.cluster.members()))
            yield victim

    def check_undisturbed(self) -> None:
        """Checks R1 to R3 on this side. No victim is left."""
        eventually(lambda: self.pool.peers.list() == [])
        eventually(lambda: blocks_at_peers(self.pool) == 0)
        self.pool.audit()
        assert self.reader.wrong == []

    def close(self) -> None:
        self.reader.close()
        self.pool.close()


@contextlib.contextmanager
def home_of(place: Place, link_lease: float = LEASE, **options: Any) -> Iterator[Home]:
    """`options` of every pool."""
    home = Home(place, link_lease, **options)
    try:
        yield home
        home.check_undisturbed()
    finally:
        home.close()


def send_by_name(pool: kvpool.Pool, peer: str, seconds: float = 60) -> float:
    """Sends until it succeeds, as an application does after a failure. Returns how long it took."""
    begin = time.monotonic()
    addrs = pool.alloc(1)
    stamp(pool, addrs, 3)
    try:
        while True:
            try:
                pool.transfer(peer, addrs, private=(3).to_bytes(4, "little"), timeout=5).wait()
                return time.monotonic() - begin
            except (kvpool.PeerLost, kvpool.Busy, kvpool.Fenced, kvpool.DeadlineExceeded, kvpool.OutOfBlocks):
                if time.monotonic() - begin > seconds:
                    raise
                time.sleep(0.01)
    finally:
        pool.free(addrs)


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


def ids(cluster: kvpool.Cluster) -> dict[str, int]:
    return {one.name: one.instance for one in cluster.members()}
