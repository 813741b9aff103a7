"""A watch of etcd that is dead without an error; and which events of a watch have been handled."""

from __future__ import annotations

import threading

import pytest
from cluster.kit import Events, wait_for

from kvpool.cluster.etcd.gateway import Gateway, NoAnswer, Options, Stream, encode
from kvpool.cluster.etcd.keys import Ids, Keys
from kvpool.cluster.etcd.watcher import EtcdWatcher
from kvpool.cluster.membership_view import MembershipView


class DeadStream:
    """A connection that is open, and by which nothing comes."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def __iter__(self):
        self.stopped.wait(120)
        raise NoAnswer("the stream has ended")
        yield

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch):
    """Every watch that is begun; `dead` of the next ones are dead."""
    begun, stream = [], Gateway.stream

    def begin(gateway, *arguments):
        begun.append(DeadStream() if begun_dead else stream(gateway, *arguments))
        if begun_dead:
            begun_dead.pop()
        return begun[-1]

    begun_dead: list[int] = []
    monkeypatch.setattr(Gateway, "stream", begin)
    return begun, begun_dead


def test_a_watcher_with_a_dead_connection_sees_everything_all_the_same(etcd, streams):
    """Joined, changed, lost: each behind a watch that says nothing."""
    begun, dead = streams
    first = etcd.register(etcd.join(), "a")
    wait_for(lambda: len(begun) == 1)
    dead.append(1)
    router = etcd.join()
    events = Events(router)
    wait_for(lambda: len(begun) == 2)
    assert isinstance(begun[1], DeadStream)
    etcd.register(etcd.join(), "b")
    events.wait("b", "joined")
    assert begun[1].stopped.is_set()
    assert events.of("a") == ["joined"]

    def blind():
        """The one that is read now ends, and the next one is dead."""
        watcher = router._directory.watcher
        wait_for(lambda: isinstance(watcher._stream, Stream))
        dead.append(1)
        watcher._stream.stop()
        wait_for(lambda: isinstance(watcher._stream, DeadStream))

    blind()
    first.publish(state="draining")
    wait_for(lambda: [one.state for one in router.members()] == ["draining", "up"])
    blind()
    first.leave()
    wait_for(lambda: [one.name for one in router.members()] == ["b"])
    assert events.of("b") == ["joined"]


def test_a_watch_that_is_silent_for_lack_of_events_is_left_alone(etcd, etcd_server, streams, monkeypatch):
    """Also when others write to the same etcd."""
    begun, _ = streams
    router = etcd.join()
    wait_for(lambda: len(begun) == 1)
    watcher, checks, check = router._directory.watcher, [], EtcdWatcher._silence_of
    watcher._heartbeat_s = 60.0  # this is not about an etcd that is slow on a busy machine
    monkeypatch.setattr(EtcdWatcher, "_silence_of", lambda *given: checks.append(check(*given)) or checks[-1])
    for number in range(3):
        etcd_server.call("kv/put", {"key": encode("elsewhere"), "value": encode(str(number))})
        seen = len(checks)
        wait_for(lambda seen=seen: len(checks) > seen)
    assert set(checks) == {""}
    assert len(begun) == 1
    assert watcher._stream is begun[0]


def test_a_broken_watch_is_logged_with_the_members_it_concerns(etcd, etcd_server, caplog):
    """The member of this process and its lease; a process that is no member has neither."""
    router, cluster = etcd.join(), etcd.join()
    etcd.register(cluster, "a b")
    prefix = cluster._directory.store.keys.members
    own = {"a b": cluster._directory.watcher.own[prefix + "a%20b"]}
    for watcher in (cluster._directory.watcher, router._directory.watcher):
        with caplog.at_level("WARNING", "kvpool.cluster"):
            caplog.clear()
            stream = wait_for(lambda watcher=watcher: isinstance(watcher._stream, Stream) and watcher._stream)
            stream.stop()
            wait_for(lambda: caplog.records)
        (found,) = caplog.records
        (name, lease) = ("a b", own["a b"]) if watcher is cluster._directory.watcher else ("", 0)
        assert found.getMessage() == f"the watch of etcd is broken: {found.why}"
        assert (found.name, found.levelname) == ("kvpool.cluster", "WARNING")
        assert (found.address, found.member, found.lease) == (f"127.0.0.1:{etcd_server.port}", name, lease)
        assert found.why
    assert own["a b"] > 0


@pytest.fixture
def watcher():
    one = EtcdWatcher(Options((("127.0.0.1", 1),)), Keys("x"), MembershipView(), 1.0, 3.0)
    one._revision = 10
    return one


def event(revision, **more):
    kv = {"key": encode("x/instances/1"), "mod_revision": str(revision), "version": "1"}
    return {"kv": kv, **more}


def test_missed_events_are_not_skipped_when_a_watch_breaks_before_it_delivers_them(watcher):
    """etcd tells its own revision first, then the past in portions: only events that were delivered count."""
    watcher._read([{"created": True, "header": {"revision": "50"}}])
    assert watcher._revision == 10
    watcher._read([{"header": {"revision": "50"}, "events": [event(20), event(30)]}])
    assert watcher._revision == 30
    watcher._read([{"header": {"revision": "60"}}])  # a sign of life, behind all that there was to tell
    assert watcher._revision == 60


def test_the_watcher_counts_the_keys(watcher):
    watcher._count = 4
    changed = event(13)
    changed["kv"]["version"] = "2"
    watcher._read([{"events": [event(11), event(12), changed, event(14, type="DELETE")]}])
    assert watcher._count == 5


def test_a_counter_that_begins_again_does_not_forget_ids_in_use(watcher):
    watcher._note_ids(Ids(9, "one").to_bytes())
    for content in (Ids(4, "one").to_bytes(), Ids(1, "another").to_bytes(), b"", b"garbage"):
        watcher._note_ids(content)
        assert watcher.given == 9
