"""How a cluster ends, for every kind of cluster: closed, dropped, in whatever thread."""

from __future__ import annotations

import os
import threading

import pytest
from cluster.kit import LEASE, Events, wait_for

import kvpool


def test_closing_ends_threads_descriptors_and_processes(place):
    place.join().close()  # creates everything that is made once

    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = count()
    for _ in range(5):
        cluster = place.join()
        cluster.on_change(lambda event: None)
        place.register(cluster, "a")
        cluster.close()
        cluster.close()
        with pytest.raises(kvpool.ClosedError):
            cluster.members()
    wait_for(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))


def test_dropping_a_cluster_leaves_it(place):
    router = place.join()
    events = Events(router)
    cluster = kvpool.Cluster.join(place.url, lease=LEASE)
    place.register(cluster, "a")
    events.wait("a", "joined")
    del cluster
    events.wait("a", "joined", "left")


def test_a_cluster_that_its_own_thread_drops_leaves(place):
    """The garbage collector may find it there, while the thread asks the directory."""
    router = place.join()
    events = Events(router)
    holder = [kvpool.Cluster.join(place.url, lease=LEASE)]
    reg = place.register(holder[0], "a")
    events.wait("a", "joined")
    entry, loop = reg._entry, holder[0]._loop
    hold = entry.check_lease

    def drop_and_hold():
        holder.clear()
        return hold()

    entry.check_lease = drop_and_hold
    events.wait("a", "joined", "left")
    loop._thread.join(60)
    assert not loop._thread.is_alive()


def test_a_cluster_that_is_closed_in_its_membership_thread_leaves(place):
    """As a finalizer does that the garbage collector calls there: the view is locked, and callbacks wait for it."""
    router, cluster = place.join(), place.join()
    events = Events(router)
    place.register(cluster, "a")
    events.wait("a", "joined")
    cluster.on_change(lambda event: cluster.closed or cluster.members())
    painting: list[threading.Thread] = []

    def close(event):
        if event.member.name == "b":
            painting.append(threading.current_thread())
            cluster.close()
            with pytest.raises(kvpool.ClosedError):
                cluster.members()

    cluster._view.subscribe(close)
    loop = cluster._loop
    place.register(place.join(), "b")
    events.wait("a", "joined", "left")
    assert painting[0].name in ("kvpool-cluster", "kvpool-etcd")
    for thread in (loop._thread, painting[0]):
        thread.join(60)
        assert not thread.is_alive()
    cluster.close()


def test_leaving_while_the_directory_is_asked_by_the_same_thread(place):
    router, cluster = place.join(), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    events.wait("a", "joined")
    hold = reg._entry.check_lease

    def leave_and_hold():
        reg.leave()
        return hold()

    reg._entry.check_lease = leave_and_hold
    events.wait("a", "joined", "left")
    place.register(cluster, "b")
    events.wait("b", "joined")
