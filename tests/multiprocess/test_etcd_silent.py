"""An etcd that is silent for many leases, while blocks move between pools: no live member loses a link or a block."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from attached import Home, Traffic, eventually, home_of, ids, send_by_name
from cluster.kit import EtcdPlace
from cluster.own_etcd import own_etcd
from crew import near_nursery

__all__ = ["near_nursery", "own_etcd"]

LEASE = 3.0  # of the cluster; a busy machine must be able to start a renewer within it
LINK_LEASE = 10.0  # a busy machine must not make one run out


@pytest.fixture
def home(own_etcd, monkeypatch) -> Iterator[Home]:
    monkeypatch.setattr("attached.CLUSTER_LEASE", LEASE)
    place = EtcdPlace(own_etcd)
    with home_of(place, LINK_LEASE) as one:
        yield one
    place.close()


def test_an_etcd_that_is_stopped_for_many_leases_affects_only_the_dead(home, own_etcd, near_nursery):
    with home.member(near_nursery) as victim, home.member(near_nursery, "mortal") as mortal:
        peers = []
        watch = home.pool.peers.on_change(lambda event: peers.append((event.name, event.kind)))
        for name in ("victim", "mortal"):
            send_by_name(home.pool, name)
        before = ids(home.cluster)
        lent = home.pool.alloc(2, instance="victim")
        traffic = Traffic(home.pool, "victim")
        own_etcd.stop()
        mortal.kill()
        eventually(lambda: ("mortal", "lost") in peers)  # its link says so, without etcd
        begin = time.monotonic()
        while time.monotonic() < begin + 3 * LEASE:
            traffic.goes_on()
        own_etcd.wake()
        home.events.wait("mortal", "joined", "lost")
        eventually(lambda: home.attachment._registration.lease_valid())
        eventually(lambda: victim("attachment._registration.lease_valid()"))
        traffic.goes_on()
        traffic.close()
        assert traffic.failed == []
        assert "lost" not in home.events.of("victim")
        assert [kind for name, kind in peers if name == "victim"] == ["joined"]
        assert victim("list(words)") == []
        del before["mortal"]
        assert ids(home.cluster) == before
        assert all(one.term == 0 for one in home.cluster.members())
        assert victim("pool.stats().hbm.lent") == 2
        home.pool.free(lent)
        eventually(lambda: victim("pool.stats().hbm.lent") == 0)
        watch.close()
        victim.kill()
