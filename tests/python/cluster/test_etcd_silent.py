"""An etcd that is silent for many leases: living members are kept, members that died meanwhile are lost."""

from __future__ import annotations

import time

import pytest
from cluster.kit import EtcdPlace, Events, wait_for

from kvpool.cluster.etcd.gateway import encode
from kvpool.cluster.etcd.keys import Keys

LEASE = 5.0  # a busy machine must be able to renew a lease, and to put a record back, within it
SILENT_S = 3 * LEASE


@pytest.fixture
def own(own_etcd):
    one = EtcdPlace(own_etcd, lease=LEASE, timeout=60.0)
    yield one
    one.close()


def silence(server, how, meanwhile=lambda: None):
    """etcd says nothing for several leases, and is back."""
    server.stop() if how == "stopped" else server.kill()
    meanwhile()
    time.sleep(SILENT_S)
    if how == "empty":
        server.forget()
    server.wake() if how == "stopped" else server.start()


@pytest.mark.parametrize("how", ["stopped", "killed", "empty"])
def test_while_etcd_is_silent_only_a_member_that_died_is_lost(own, own_etcd, how):
    router = own.join()
    events = Events(router)
    registrations = [own.register(own.join(), name) for name in "ab"]
    words: list[str] = []
    for one in registrations:
        one.on_lease(words.append)
    other, victim = own.member("c", lease=LEASE), own.member("d", lease=LEASE)
    wait_for(lambda: len(router.members()) == 4)
    before = router.members()
    silence(own_etcd, how, victim.kill)
    wait_for(lambda: all(one.lease_valid() for one in registrations) and other("reg.lease_valid()"))
    events.wait("d", "joined", "lost")
    assert router.members() == before[:3]  # the same ids, incarnations and terms
    for name in "abc":
        assert set(events.of(name)) == {"joined"}
    assert words == other.words == []
    with own.join() as fresh:  # one that knows nothing from before
        wait_for(lambda: fresh.members() == before[:3])
        newcomer = own.register(fresh, "e")
    assert newcomer.instance > max(one.instance for one in before)


def test_the_death_of_a_member_is_reported_at_once_while_etcd_answers(own):
    """Its renewer says so: there is no wait for members that may be on their way back."""
    router = own.join(lease=60.0)
    events = Events(router)
    member = own.member("a", lease=60.0)
    events.wait("a", "joined")
    router._directory.watcher._contact.forgive()  # as if etcd had just been silent
    member.kill()
    events.wait("a", "joined", "lost", seconds=50)


def test_a_member_that_a_peer_has_dropped_fences_itself_and_begins_a_new_term(own):
    cluster = own.join()
    events = Events(cluster)
    reg = own.register(own.join(), "a")
    words: list[str] = []
    reg.on_lease(words.append)
    events.wait("a", "joined")
    key = Keys(own.prefix).dropped(reg.record.incarnation)
    own.server.call("kv/put", {"key": encode(key), "value": encode("0")})
    wait_for(lambda: words == ["lost", "regained"])
    wait_for(lambda: [(one.instance, one.term) for one in cluster.members()] == [(reg.instance, 1)])
    assert "kvs" not in own.server.call("kv/range", {"key": encode(key)})
    wait_for(reg.lease_valid)


def test_a_peer_that_refuses_a_member_as_dropped_makes_it_fence_itself(own):
    reg = own.register(own.join(), "a")
    words: list[str] = []
    reg.on_lease(words.append)
    reg.note_dropped("the test has dropped it")
    wait_for(lambda: words == ["lost", "regained"])
    assert reg.record.term == 1
    wait_for(reg.lease_valid)
