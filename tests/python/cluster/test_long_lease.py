"""Clusters with a long lease: the first member in an etcd waits for a lease, and is given the time for that."""

from __future__ import annotations

import time

import pytest
from cluster.kit import EtcdPlace
from kit import small_pool

import kvpool
from kvpool.cluster.etcd import directory, id_counter

LONG = 60.0


class FastClock:
    """A second passes with each wait of a registering member; other threads take real time."""

    monotonic_ns = staticmethod(time.monotonic_ns)

    def __init__(self) -> None:
        self.waited_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.waited_s

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)
        self.waited_s += 1.0


@pytest.fixture
def clock(monkeypatch):
    one = FastClock()
    monkeypatch.setattr(directory, "time", one)
    monkeypatch.setattr(id_counter, "time", one)
    return one


@pytest.fixture
def empty(etcd_server):
    one = EtcdPlace(etcd_server, new=True)
    yield one
    one.close()


@pytest.fixture
def etcd(empty):
    return empty


def test_a_pool_attaches_to_a_new_cluster(place, clock):
    # A local cluster generates the secret.
    with place.join(lease=LONG) as cluster, small_pool(secret="" if cluster.secret else "s") as pool:
        pool.attach(cluster, name="a")
        assert [one.name for one in cluster.members()] == ["a"]


def test_the_first_member_in_an_etcd_waits_for_a_lease_by_default(empty, clock):
    empty.register(empty.join(lease=LONG), "a")
    assert clock.waited_s >= LONG - 1


def test_an_attach_with_too_short_a_timeout_says_why_and_changes_nothing(empty, clock):
    with empty.join(lease=LONG) as cluster, small_pool(secret="s") as pool:
        with pytest.raises(kvpool.DeadlineExceeded, match="live members have a lease's time to come back"):
            pool.attach(cluster, name="a", timeout=5)
        assert cluster.members() == []
        assert cluster.registration is None
        assert pool.peers.name is None
        pool.attach(cluster, name="a", timeout=10 * LONG)
        assert [one.name for one in cluster.members()] == ["a"]


@pytest.mark.parametrize("timeout", [-1, float("nan"), 4000, "x", True])
def test_an_invalid_time_is_refused(empty, timeout):
    with empty.join() as cluster, small_pool(secret="s") as pool:
        with pytest.raises((kvpool.ArgumentError, kvpool.ArgumentTypeError), match="timeout"):
            pool.attach(cluster, name="a", timeout=timeout)
        assert cluster.registration is None
