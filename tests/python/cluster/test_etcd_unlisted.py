"""How a watcher handles expired records, without an etcd and without waiting."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvpool.cluster.etcd import unlisted as etcd_unlisted
from kvpool.cluster.etcd.gateway import Denied, NoAnswer, Options, encode
from kvpool.cluster.etcd.keys import Keys
from kvpool.cluster.etcd.unlisted import Contact
from kvpool.cluster.etcd.watcher import EtcdWatcher
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import Member

LEASE, HEARTBEAT = 3.0, 1.0
MEMBER = Member("a", 7, 70, "both")
OTHER = Member("a", 8, 80, "both")


class Clock:
    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(etcd_unlisted.time, "monotonic", lambda: self.now)


class Links:
    """The peer_links: what the pool's links show."""

    def __init__(self) -> None:
        self.linked, self.ended = False, False

    def is_connected(self, member):
        return self.linked

    def has_disconnected(self, member):
        return self.ended and not self.linked

    def connected_instances(self):
        return []


class FakeEtcd:
    """The gateway: records which members were dropped, unless the member is back or it has to fail."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.is_back, self.by_another = False, False
        self.error: Exception | None = None

    def call(self, path, body, timeout_s, endpoint=None, *, authenticate_s=0.0):
        if self.error is not None:
            raise self.error
        if path == "lease/grant":
            return {"ID": "5", "TTL": body["TTL"]}
        if path == "kv/txn":
            if not self.is_back and not self.by_another:
                self.dropped.append(body["success"][0]["request_put"]["key"])
                return {"succeeded": True}
            found = [{"key": encode("x"), "value": ""}] if self.by_another else []
            return {"responses": [{"response_range": {"kvs": found}}]}
        return {}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Scene:
    def __init__(self) -> None:
        self.view, self.links, self.etcd, self.told = MembershipView(), Links(), FakeEtcd(), []
        self.watcher = EtcdWatcher(Options((("127.0.0.1", 1),)), Keys("x"), self.view, HEARTBEAT, LEASE)
        self.watcher._checker = self.etcd
        self.watcher.peer_links = self.links
        self.view.subscribe(lambda event: self.told.append(event.kind))
        self._revision = itertools.count(1)
        self.lists(MEMBER)

    def lists(self, member):
        self._tell({"value": encode(member.to_bytes()), "version": "1"}, member, "PUT")

    def runs_out(self):
        self._tell({}, MEMBER, "DELETE")

    def _tell(self, more, member, kind):
        kv = {"key": encode(f"x/members/{member.name}"), "mod_revision": str(next(self._revision))} | more
        self.watcher._read([{"events": [{"kv": kv, "type": kind}]}])


@pytest.fixture
def scene(clock):
    return Scene()


def test_an_expired_record_is_a_loss_if_nothing_else_explains_it(scene):
    scene.runs_out()
    assert scene.told == ["joined", "lost"]
    assert scene.etcd.dropped == []  # nothing was taken from it


def test_after_a_silence_a_record_may_be_back_for_two_leases(scene, clock):
    clock.now += 2.5  # of the watcher's contact with etcd
    scene.runs_out()
    clock.now += 2 * LEASE
    scene.watcher._contact.answered()
    scene.watcher.check()
    assert scene.told == ["joined"]
    clock.now += 2.5
    scene.watcher.check()
    assert scene.told == ["joined", "lost"]


def test_a_member_that_is_back_after_a_silence_is_not_lost(scene, clock):
    clock.now += 10
    scene.runs_out()
    scene.lists(MEMBER)
    clock.now += 100
    scene.watcher.check()
    assert scene.told == ["joined"]


def test_a_record_that_is_back_at_the_last_moment_counts(scene, monkeypatch):
    """The watch's thread shows it while the loop's, which has just looked, takes the member off the view."""
    watch = threading.Thread(target=lambda: scene.lists(MEMBER))

    def has(name):
        watch.start()
        watch.join(0.2)  # it cannot wait for this thread
        return True

    monkeypatch.setattr(scene.watcher._unlisted, "has", has)
    scene.watcher._give_up("a", "its lease has run out")
    watch.join(30)
    assert scene.view.find("a") is not None


def test_a_linked_member_is_kept_until_its_link_ends(scene, clock):
    scene.links.linked = True
    scene.runs_out()
    for _ in range(3):
        clock.now += 100
        scene.watcher.check()
    assert scene.told == ["joined"]
    scene.links.linked, scene.links.ended = False, True
    scene.watcher.check()
    assert scene.told == ["joined", "lost"]
    assert scene.etcd.dropped == [encode("x/dropped/70")]  # so that it learns it


def test_a_member_that_is_back_before_it_is_recorded_as_dropped_is_not_dropped(scene):
    scene.links.ended = scene.etcd.is_back = True
    scene.runs_out()
    scene.watcher.check()
    assert scene.told == ["joined"]
    scene.lists(MEMBER)
    scene.watcher.check()
    assert scene.told == ["joined"]


def test_a_member_that_another_peer_has_dropped_is_lost(scene):
    scene.links.ended = scene.etcd.by_another = True
    scene.runs_out()
    assert scene.told == ["joined", "lost"]


def test_no_member_can_be_dropped_while_etcd_does_not_answer(scene):
    scene.links.ended, scene.etcd.error = True, NoAnswer("silent")
    scene.runs_out()
    assert scene.told == ["joined"]
    scene.etcd.error = None
    scene.watcher.check()
    assert scene.told == ["joined", "lost"]


def test_a_member_without_write_access_reports_the_loss_in_its_own_process(scene):
    scene.links.ended, scene.etcd.error = True, Denied("no right to write")
    scene.runs_out()
    assert scene.told == ["joined", "lost"]


def test_another_incarnation_of_a_name_ends_the_earlier_one_although_it_is_linked(scene):
    scene.links.linked = True
    scene.runs_out()
    scene.lists(OTHER)
    assert scene.told == ["joined", "lost", "joined"]


def test_a_member_whose_process_has_ended_is_lost_at_once(scene, clock):
    """Also after a silence, and although its link has not noticed it yet."""
    clock.now += 10
    scene.links.linked = True
    scene.lists(Member("a", 7, 70, "both", state="ended"))
    assert scene.told == ["joined", "lost"]
    assert scene.etcd.dropped == []


def test_an_idle_etcd_is_probed_before_it_counts_as_silent(clock):
    contact = Contact(LEASE, HEARTBEAT)
    for _ in range(20):  # a look each heartbeat, at any moment of it
        clock.now += 0.75 * HEARTBEAT
        assert contact.is_due()
        contact.answered()
        assert contact.forgiven_until() <= clock.now
    clock.now += 0.8 * (LEASE - HEARTBEAT) + 0.1  # a lease may have run out that was to be renewed first thing in it
    assert not contact.is_due()
    contact.answered()
    assert contact.forgiven_until() > clock.now + 2 * LEASE
