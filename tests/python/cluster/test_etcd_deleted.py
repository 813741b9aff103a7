"""Keys in etcd that are deleted or replaced under live members: name and id stay with one of them."""

from __future__ import annotations

import json

import pytest
from cluster.kit import EtcdPlace, Events, wait_for

import kvpool
from kvpool.cluster.etcd.gateway import after, decode, encode
from kvpool.cluster.etcd.keys import Holder, Ids


class Keys:
    """The keys below the prefix of a cluster, read and changed behind the members' backs."""

    def __init__(self, place: EtcdPlace) -> None:
        self._call = place.server.call
        self._prefix = place.prefix

    def read(self, key: str) -> bytes | None:
        found = self._call("kv/range", {"key": encode(f"{self._prefix}/{key}")}).get("kvs", [])
        return decode(found[0]["value"]) if found else None

    def put(self, key: str, content: bytes) -> None:
        self._call("kv/put", {"key": encode(f"{self._prefix}/{key}"), "value": encode(content)})

    def delete(self, key: str) -> None:
        self._call("kv/deleterange", {"key": encode(f"{self._prefix}/{key}")})

    def delete_all(self) -> None:
        below = f"{self._prefix}/"
        self._call("kv/deleterange", {"key": encode(below), "range_end": after(below)})


@pytest.fixture
def keys(etcd):
    return Keys(etcd)


def listener(registration):
    words = []
    registration.on_lease(words.append)
    return words


def test_a_deleted_record_is_restored_in_the_same_term(etcd, keys):
    """Members without a link to it are told that it is lost; no other has taken anything from it."""
    router = etcd.join()
    events = Events(router)
    reg = etcd.register(etcd.join(), "a")
    words = listener(reg)
    events.wait("a", "joined")
    keys.delete("members/a")
    events.wait("a", "joined", "lost", "joined")
    (back,) = router.members()
    assert (back.instance, back.incarnation, back.term) == (reg.instance, reg.record.incarnation, 0)
    wait_for(reg.lease_valid)
    assert words == []
    other = etcd.join()
    with pytest.raises(kvpool.StateError, match="live member has the name"):
        etcd.register(other, "a", timeout=60)


def test_a_deleted_id_is_restored_silently(etcd, keys):
    router = etcd.join()
    events = Events(router)
    reg = etcd.register(etcd.join(), "a")
    words = listener(reg)
    events.wait("a", "joined")
    keys.delete(f"instances/{reg.instance}")
    wait_for(lambda: keys.read(f"instances/{reg.instance}") == Holder(reg.record.incarnation, 1).to_bytes())
    wait_for(reg.lease_valid)
    assert words == []
    assert events.of("a") == ["joined"]


def test_a_name_that_another_member_has_taken_is_refused_to_the_first(etcd, keys):
    reg = etcd.register(etcd.join(), "a")
    words = listener(reg)
    record = json.loads(keys.read("members/a"))
    keys.put("members/a", json.dumps(record | {"incarnation": record["incarnation"] + 1000, "instance": 77}).encode())
    wait_for(lambda: words == ["lost", "refused"])
    assert not reg.lease_valid()
    with pytest.raises(kvpool.StateError, match="another incarnation"):
        reg.publish(state="draining")
    wait_for(lambda: keys.read(f"instances/{reg.instance}") is None)  # it deletes its own key


def test_an_id_that_another_member_has_taken_is_refused_to_the_first(etcd, keys):
    reg = etcd.register(etcd.join(), "a")
    words = listener(reg)
    keys.put(f"instances/{reg.instance}", b"12345")
    wait_for(lambda: words == ["lost", "refused"])
    wait_for(lambda: keys.read("members/a") is None)
    assert keys.read(f"instances/{reg.instance}") == b"12345"


def test_a_deleted_counter_of_ids_continues(etcd, keys):
    first = etcd.register(etcd.join(), "a")
    gone = etcd.register(etcd.join(), "b")
    gone.leave()  # no member has this id any more, and none is to get it again
    words = listener(first)
    before = Ids.read(keys.read("ids"))
    wait_for(lambda: first._entry._watcher.given == before.given)
    keys.delete("ids")
    wait_for(lambda: keys.read("ids") is not None)
    assert Ids.read(keys.read("ids")) == before
    assert etcd.register(etcd.join(), "c").instance == gone.instance + 1
    wait_for(first.lease_valid)
    assert words == []


def test_everything_below_the_prefix_is_deleted_and_all_members_return_with_their_ids(etcd, keys):
    router = etcd.join()
    events = Events(router)
    members = [etcd.register(etcd.join(), name) for name in "ab"]
    words = [listener(one) for one in members]
    before = [one.instance for one in members]
    events.wait("b", "joined")
    keys.delete_all()
    for name in "ab":
        events.wait(name, "joined", "lost", "joined")
    assert words == [[], []]
    assert [one.instance for one in router.members()] == before
    assert etcd.register(etcd.join(), "c").instance not in before
    for one in members:
        wait_for(one.lease_valid)


def test_changes_that_the_watch_misses_are_found_within_a_lease(etcd, keys, monkeypatch):
    cluster = etcd.join()
    reg = etcd.register(cluster, "a")
    words = listener(reg)
    monkeypatch.setattr(cluster._directory.watcher, "_take_events", lambda events: None)
    keys.delete("members/a")
    wait_for(lambda: keys.read("members/a") is not None)
    assert json.loads(keys.read("members/a"))["term"] == 0
    assert words == []


def test_a_publication_without_a_record_restores_it_at_once(etcd, keys, monkeypatch):
    cluster = etcd.join(lease=60, heartbeat=1.0)
    reg = etcd.register(cluster, "a")
    monkeypatch.setattr(cluster._directory.watcher, "_take_events", lambda events: None)
    keys.delete("members/a")
    reg.publish(state="draining")
    # Sooner than by the look that comes once a lease.
    wait_for(lambda: (found := keys.read("members/a")) and json.loads(found)["state"] == "draining", 30)
