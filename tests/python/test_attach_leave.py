"""How a pool leaves its cluster: closed, dropped, drained, or because its registration has left."""

from __future__ import annotations

import gc
import threading

import pytest
from attach_kit import eventually, join, member, names, two, url
from kit import refused, small_pool
from transfer.kit import blocks_at_peers
from transfer.kit import eventually as eventually_within

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, ClosedError, DeadlineExceeded, Fenced, PeerLost, StateError
from kvpool.cluster.directory import Unreachable

__all__ = ["url"]

# ---- leaving


def test_closing_a_pool_leaves_its_cluster(url):
    with member(url, "a") as (a, *_), join(url) as watching:
        events: list[tuple[str, str]] = []
        with (
            watching.on_change(lambda event: events.append((event.kind, event.member.name))),
            member(url, "b") as (b, *_),
        ):
            eventually(lambda: ("joined", "b") in events)
            b.transfer("a", b.alloc(1)).wait()
            b.close()
            eventually(lambda: ("left", "b") in events)
            assert ("lost", "b") not in events
            eventually(lambda: a.peers.list() == [] and blocks_at_peers(a) == 0)
        with refused(a, PeerLost, "'b'"):
            a.alloc(1, instance="b")


def test_a_member_that_leaves_has_no_peers_and_its_local_verbs_go_on(url):
    with two(url) as (a, b):
        own = a.alloc(2)
        stream = a.transfer("b", own, layerwise=True)
        attachment = a._attachment
        attachment.close()
        attachment.close()
        assert attachment.closed
        assert isinstance(stream.transfer.exception(30), PeerLost)
        with refused(a, Fenced, "has left its cluster"):
            a.transfer("b", own)
        eventually(lambda: b.peers.list() == [] and blocks_at_peers(b) == 0)
        a.free(own)
        with pytest.raises(ClosedError):
            attachment.drain(1)


def test_closing_a_cluster_detaches_its_pool_at_once(url):
    with join(url, heartbeat=30) as cluster, small_pool() as a, member(url, "b") as (b, *_):
        attachment = a.attach(cluster, name="a")
        eventually(lambda: len(attachment._members.names()) == 1)
        own = a.alloc(1)
        stream = a.transfer("b", own, layerwise=True)
        cluster.close()
        assert attachment.closed
        with refused(a, Fenced, "has left its cluster"):
            a.transfer("b", own)
        eventually_within(lambda: a.peers.list() == [], 20)  # before the next heartbeat
        eventually_within(lambda: b.peers.list() == [], 20)
        assert isinstance(stream.transfer.exception(30), PeerLost)


def test_a_registration_that_leaves_by_itself_detaches_its_pool_at_once(url):
    """No heartbeat informs anyone here: the next one comes when the test is long over."""
    with join(url, heartbeat=30) as cluster, small_pool() as a, member(url, "b") as (b, *_):
        attachment = a.attach(cluster, name="a")
        eventually(lambda: len(attachment._members.names()) == 1)
        own = a.alloc(1)
        stream = a.transfer("b", own, layerwise=True)
        cluster.registration.leave()
        with refused(a, Fenced, "has left its cluster"):
            a.transfer("b", own)
        assert isinstance(stream.transfer.exception(20), PeerLost)
        eventually_within(lambda: blocks_at_peers(b) == 0, 20)


def test_a_pool_whose_attachment_is_closed_in_the_clusters_own_thread_leaves(url):
    with join(url) as watching, member(url, "a") as (a, cluster, attachment):
        eventually(lambda: names(watching) == ["a"])
        closing: list[bool] = []

        def close(event: kvpool.MemberEvent) -> None:
            if event.member.name == "b":
                attachment.close()
                closing.append(attachment.closed)

        cluster._view.subscribe(close)
        with member(url, "b"):
            eventually(lambda: names(watching) == ["b"])
        assert closing[0]

        def refusal() -> type[Exception]:
            with pytest.raises((Fenced, PeerLost)) as caught:
                a.alloc(1, instance="b")
            return caught.type

        eventually(lambda: refusal() is Fenced)  # such a close only schedules the leave; before it, b has gone
        with refused(a, Fenced, "has left its cluster"):
            a.alloc(1, instance="b")


def test_dropping_a_pool_leaves_its_cluster(url):
    with join(url) as watching, join(url) as cluster:
        pool = small_pool()
        pool.attach(cluster, name="dropped")
        eventually(lambda: names(watching) == ["dropped"])
        del pool
        gc.collect()
        eventually(lambda: names(watching) == [])


# ---- draining


def test_a_draining_member_stays_until_its_transfers_have_ended(url):
    with two(url) as (a, b), join(url) as watching:
        own = a.alloc(1)
        stream = a.transfer("b", own, layerwise=True)
        for leaver in (a, b):  # from the one, and to the other
            with pytest.raises(DeadlineExceeded, match="draining"):
                leaver._attachment.drain(0.6)
        eventually(lambda: [one.state for one in watching.members()] == ["draining", "draining"])
        a.transfer("b", own).wait()  # a peer that ignores the state is served
        with stream:
            stream.send_layer(0)
            stream.send_layer(1)
        stream.wait()
        b._attachment.drain(60)
        eventually(lambda: names(watching) == ["a"])
        eventually(lambda: blocks_at_peers(a) == blocks_at_peers(b) == 0)


def test_a_drain_waits_only_after_the_others_can_know_of_it(url, monkeypatch):
    def is_cut_off(record: kvpool.Member) -> None:
        raise Unreachable("the test has cut it off")

    with member(url, "a") as (_, cluster, attachment), join(url) as watching:
        with monkeypatch.context() as cut:
            cut.setattr(attachment._registration._entry, "write", is_cut_off)
            with pytest.raises(DeadlineExceeded, match="draining: its cluster is not told"):
                attachment.drain(3 * cluster.heartbeat_s)
            assert [one.state for one in watching.members()] == ["up"]
            assert not attachment.closed
        attachment.drain(60)
        eventually(lambda: names(watching) == [])


def test_a_drain_ends_when_another_member_has_the_name(url, monkeypatch):
    """It was stopped, and learns only while it drains that others consider it lost: by then nothing handles it."""

    def is_cut_off(record: kvpool.Member) -> None:
        raise Unreachable("the test has cut it off")

    with member(url, "a") as (_, _cluster, attachment):
        entry, drained = attachment._registration._entry, []
        monkeypatch.setattr(entry, "write", is_cut_off)

        def drain() -> None:
            with pytest.raises(StateError, match="another incarnation has the name a"):
                attachment.drain(3000)
            drained.append(True)

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        eventually(lambda: attachment._registration.record.state == "draining")
        monkeypatch.setattr(entry, "enter_again", lambda record, lost: None)
        monkeypatch.setattr(entry, "check_lease", lambda: "lost")
        thread.join(60)
        assert drained
        assert not attachment.closed


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_a_drain_needs_a_valid_timeout(url, timeout):
    with member(url, "a") as (_, cluster, attachment), pytest.raises((ArgumentError, ArgumentTypeError)):
        attachment.drain(timeout)
    assert cluster.closed
