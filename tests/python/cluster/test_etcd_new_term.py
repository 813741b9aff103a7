"""A member that begins a new term connects to its peers at once, before they may know of the term."""

from __future__ import annotations

import time

import pytest
from cluster.kit import EtcdPlace, wait_for
from kit import small_pool

from kvpool.cluster.etcd.gateway import encode
from kvpool.cluster.etcd.keys import Keys

HEARTBEAT = 0.3


@pytest.fixture
def place(own_etcd):
    one = EtcdPlace(own_etcd, lease=20.0, heartbeat=HEARTBEAT, timeout=60.0)
    yield one
    one.close()


def test_a_peer_that_has_not_noticed_the_new_term_does_not_end_it(place, monkeypatch):
    with small_pool(secret="s") as dropped, small_pool(secret="s") as peer:
        of_dropped = dropped.attach(place.join(), name="a")
        of_peer = peer.attach(place.join(), name="b")
        wait_for(lambda: of_dropped._members.names() and of_peer._members.names())
        dropped._meet("b", 30.0)
        wait_for(lambda: of_dropped._members.peers_to_reconnect() == ["b"])
        of_peer._members.remember_peers()
        # The peer drops the member, and learns late that it is back.
        monkeypatch.setattr(of_peer._members, "_pass", lambda: None)
        peer._expel(of_dropped._incarnation, "the test has given it up")
        key = Keys(place.prefix).dropped(of_dropped._incarnation)
        place.server.call("kv/put", {"key": encode(key), "value": encode("0")})
        wait_for(lambda: of_dropped._registration.record.term == 1)
        wait_for(dropped._dropped_by)
        monkeypatch.undo()
        of_peer._members.pass_again()
        wait_for(lambda: [one.name for one in dropped.peers.list()] == ["b"])
        time.sleep(4 * HEARTBEAT)
        assert of_dropped._registration.leases_lost == 1
        assert not dropped._dropped_by()
