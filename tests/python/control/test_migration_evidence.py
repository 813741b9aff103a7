"""What proves that a peer is gone, and what does not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import kvpool
from kvpool.control.migration.evidence import Evidence


class StandIn:
    """A pool with one peer, and a cluster with one member, which tells changes of `listed`."""

    def __init__(self, pid, link="unix"):
        self.closed, self.watchers = False, []
        self.peers = [SimpleNamespace(name="b", incarnation=7, pid=pid, link=link)]
        self._listed = [SimpleNamespace(incarnation=7)]

    @property
    def listed(self):
        return self._listed

    @listed.setter
    def listed(self, members):
        before, self._listed = self._listed, members
        if isinstance(members, Exception) or isinstance(before, Exception):
            return
        changes = [("lost", each) for each in before if each not in members]
        changes += [("joined", each) for each in members if each not in before]
        for kind, each in changes:
            for watcher in self.watchers:
                watcher(SimpleNamespace(kind=kind, member=each))

    def on_change(self, callback):
        self.watchers.append(callback)
        return SimpleNamespace(stop=lambda: self.watchers.remove(callback) if callback in self.watchers else None)

    def members(self):
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed

    def _incarnation(self):
        return 6


def begin(pid, link="unix", in_cluster=False, gone=None):
    one = StandIn(pid, link)
    evidence = Evidence(one, one if in_cluster else None, gone)
    assert evidence.incarnation("b") == 7
    assert evidence.of("b", 7) is None
    return one, evidence


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as one:
        yield one
        one.stdin.close()


def test_a_process_of_this_host_that_has_ended_is_gone_and_one_that_is_silent_is_not(process):
    one, evidence = begin(process.pid)
    one.peers.clear()  # the link is lost
    assert evidence.of("b", 7) is None
    process.kill()
    process.wait()
    assert evidence.of("b", 7) == "ended"
    evidence.close()


def test_a_member_that_the_cluster_has_given_up_is_fenced():
    one, evidence = begin(1, "tcp 10.0.0.2:4000", in_cluster=True)
    one.peers.clear()
    assert evidence.of("b", 7) is None
    one.listed = [SimpleNamespace(incarnation=8)]  # of the same name, perhaps
    assert evidence.of("b", 7) == "fenced"
    one.listed.append(SimpleNamespace(incarnation=7))
    assert evidence.of("b", 7) is None  # it has come back in another term, and can be asked


def test_who_was_never_a_member_is_not_taken_for_one_that_has_gone():
    one, evidence = begin(1, "tcp 10.0.0.2:4000")
    one.listed = []
    assert Evidence(one, one, None).of("b", 7) is None
    assert evidence.of("b", 7) is None


def test_a_pool_of_this_process_is_gone_when_it_was_closed_and_not_when_its_link_is_lost():
    one, evidence = begin(os.getpid())  # before the other pool has migrations
    other = StandIn(os.getpid())
    other._incarnation = lambda: 7
    Evidence(other, None, None)
    assert evidence.of("b", 7) is None
    one.peers.clear()
    assert evidence.of("b", 7) is None
    other.closed = True
    assert evidence.of("b", 7) == "ended"


def test_a_pool_of_this_process_that_is_no_more_is_gone():
    other = StandIn(os.getpid())
    other._incarnation = lambda: 7
    Evidence(other, None, None)
    _, evidence = begin(os.getpid())
    del other
    gc.collect()
    assert evidence.of("b", 7) == "ended"


def test_a_question_that_fails_proves_nothing():
    def gone(name, incarnation):
        raise OSError("etcd")

    one, evidence = begin(1, "tcp 10.0.0.2:4000", in_cluster=True, gone=gone)
    one.listed = []
    assert evidence.of("b", 7) == "fenced"
    one.members = lambda: 1 / 0
    assert evidence.of("b", 7) is None
    assert evidence.incarnation("b") == 7
    del one.members
    assert evidence.of("b", 7) == "fenced"


def test_a_cluster_that_is_closed_proves_nothing():
    one = StandIn(1, "tcp 10.0.0.2:4000")

    def closed(callback):
        raise kvpool.ClosedError("the cluster is closed")

    one.on_change, one.listed = closed, []
    evidence = Evidence(one, one, None)
    assert evidence.incarnation("b") == 7
    assert evidence.of("b", 7) is None
    evidence.close()


def test_a_member_that_was_given_up_before_it_was_met_is_fenced():
    """Its link has outlived its lease; or the cluster could not say who its members are when it was met."""
    one = StandIn(1, "tcp 10.0.0.2:4000")
    evidence = Evidence(one, one, None)
    one.listed = []
    assert evidence.incarnation("b") == 7
    assert evidence.of("b", 7) == "fenced"
    evidence.close()
    assert not one.watchers


def test_evidence_that_is_dropped_watches_its_cluster_no_more():
    one = StandIn(1)
    Evidence(one, one, None)
    gc.collect()
    assert not one.watchers


def test_no_descriptor_is_opened_that_nobody_would_close(process):
    one = StandIn(process.pid)
    evidence = Evidence(one, None, None)
    evidence.close()
    assert evidence.incarnation("b") == 7  # what a pool's inbox still brings
    assert not evidence._processes


def test_the_engine_can_say_who_is_gone():
    told = {}
    _, evidence = begin(1, "tcp 10.0.0.2:4000", gone=lambda name, incarnation: told.get((name, incarnation)))
    told["b", 7] = "fenced"
    assert evidence.of("b", 7) == "fenced"
    assert evidence.of("b", 8) is None


def test_the_engine_can_say_that_who_is_fenced_has_ended():
    told = {}
    one, evidence = begin(1, "tcp 10.0.0.2:4000", in_cluster=True, gone=lambda name, incarnation: told.get(name))
    one.listed = []
    assert evidence.of("b", 7) == "fenced"
    told["b"] = "ended"
    assert evidence.of("b", 7) == "ended"


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_that_has_ended_costs_no_descriptor(asked):
    one = StandIn(1)
    evidence = Evidence(one, one, None)
    for number in range(3):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            one.peers = [SimpleNamespace(name="b", incarnation=number, pid=process.pid, link="unix")]
            one.listed = [SimpleNamespace(incarnation=each) for each in range(100)]
            assert evidence.incarnation("b") == number
            process.kill()
        if asked:
            assert evidence.of("b", number) == "ended"
        assert len(evidence._processes) == (0 if asked else 1)
    assert [evidence.of("b", number) for number in range(3)] == ["ended"] * 3
    assert not evidence._processes
    assert len(evidence._departed._found) == 0  # of the many that the cluster lists


def test_only_the_latest_incarnations_are_remembered(monkeypatch):
    monkeypatch.setattr("kvpool.control.migration.evidence._PEERS_MAX", 2)
    one, evidence = begin(1, "tcp 10.0.0.2:4000", in_cluster=True)
    for number in (8, 9):
        one.peers = [SimpleNamespace(name="b", incarnation=number, pid=1, link="tcp 10.0.0.2:4000")]
        one.listed = [SimpleNamespace(incarnation=number)]
        assert evidence.incarnation("b") == number
    one.listed = []
    assert [evidence.of("b", number) for number in (7, 8, 9)] == [None, "fenced", "fenced"]


def test_nothing_is_proved_to_a_pool_that_is_closed():
    one, evidence = begin(os.getpid())
    assert evidence.incarnation("c") is None
    one.closed = True
    with pytest.raises(kvpool.ClosedError):
        evidence.of("b", 7)


def test_only_the_latest_pools_of_this_process_are_remembered(monkeypatch):
    monkeypatch.setattr("kvpool.control.migration.evidence._PEERS_MAX", 2)
    one, evidence = begin(os.getpid())
    for number in range(8, 12):
        one.peers = [SimpleNamespace(name="b", incarnation=number, pid=os.getpid(), link="unix")]
        assert evidence.incarnation("b") == number
    assert len(evidence._here) == 2
