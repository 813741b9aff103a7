"""The counter of ids in etcd, deleted, overwritten or set back: no id of a live member is given again."""

from __future__ import annotations

import threading

import pytest
from cluster.kit import EtcdPlace, wait_for
from cluster.test_etcd_deleted import Keys

import kvpool
from kvpool import cli
from kvpool.cluster.etcd.keys import Holder, Ids
from kvpool.cluster.record import INSTANCE_MAX

SPOILED = {
    "deleted": None,
    "no JSON": b"garbage",
    "no number": b'{"v": 1, "given": "4", "birth": "x"}',
    "huge": b'{"v": 1, "given": 1000000000000000000000000, "birth": "x"}',
    "negative": b'{"v": 1, "given": -1, "birth": "x"}',
    "zero": b'{"v": 1, "given": 0, "birth": "x"}',
    "lower": b'{"v": 1, "given": 2, "birth": "x"}',
    "empty": b"",
}


@pytest.fixture
def etcd(etcd_server):
    one = EtcdPlace(etcd_server, lease=1.0, timeout=60.0)
    yield one
    one.close()


@pytest.fixture
def lasting(etcd_server):
    """One with a lease that a busy machine does not make run out."""
    one = EtcdPlace(etcd_server, lease=10.0, timeout=60.0)
    yield one
    one.close()


@pytest.fixture
def keys(etcd):
    return Keys(etcd)


def spoil(keys, content):
    keys.delete("ids") if content is None else keys.put("ids", content)


def register_at_once(etcd, *names):
    """Two members that join at the same moment: their ids, or their errors."""
    clusters = [etcd.join() for _ in names]
    begin = threading.Barrier(len(names))
    found: dict[str, object] = {}

    def enter(cluster, name):
        begin.wait()
        try:
            found[name] = etcd.register(cluster, name, timeout=60).instance
        except kvpool.Error as error:
            found[name] = error

    threads = [threading.Thread(target=enter, args=one) for one in zip(clusters, names, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[name] for name in names]


@pytest.mark.parametrize("content", SPOILED.values(), ids=SPOILED)
def test_live_members_repair_the_counter_and_newcomers_get_higher_ids(lasting, content):
    keys, living = Keys(lasting), [lasting.register(lasting.join(), name) for name in "abcd"]
    words: list[str] = []
    for one in living:
        one.on_lease(words.append)
    for step in range(2):  # again and again: id 4 was given four times
        spoil(keys, content)
        ids = register_at_once(lasting, f"x{step}", f"y{step}")
        assert sorted(ids) == [5 + 2 * step, 6 + 2 * step]
    wait_for(lambda: Ids.read(keys.read("ids") or b"") is not None)
    assert words == []
    wait_for(lambda: all(one.lease_valid() for one in living))


@pytest.mark.parametrize("content", [b"garbage", b'{"given": 1e99, "birth": "x"}'])
def test_newcomers_are_refused_if_no_member_can_repair_the_counter(etcd, keys, content, capsys):
    """They are told which key holds what, and the command that repairs it."""
    keys.put("instances/7", Holder(99, 7).to_bytes())  # of one that is silent
    keys.put("ids", content)
    for error in register_at_once(etcd, "a", "b"):
        assert isinstance(error, kvpool.StateError)
        assert f"{etcd.prefix}/ids" in str(error)
        assert content.decode()[:7] in str(error)
        assert f"kvpool cluster etcd://127.0.0.1:{etcd.server.port}/{etcd.prefix} --repair-ids" in str(error)
        assert error.shown == 7
    assert keys.read("ids") == content
    assert cli.main(["cluster", etcd.url, "--repair-ids"]) == 0
    assert "the counter of ids is at 7" in capsys.readouterr().out
    with etcd.join() as cluster:
        assert cluster.repair_ids() == 7  # it is well now
    assert sorted(register_at_once(etcd, "a", "b")) == [8, 9]


def test_a_counter_below_what_etcd_shows_is_raised_by_a_newcomer(etcd, keys):
    """No live member has seen it: the remaining keys show it."""
    keys.put("instances/7", Holder(99, 7).to_bytes())
    keys.put("ids", Ids(2, "x").to_bytes())
    assert etcd.register(etcd.join(), "a").instance == 8


def test_ids_that_begin_again_skip_those_that_are_taken(etcd, keys):
    """Also of a member whose record is gone, because it could not reach etcd for longer than its lease."""
    keys.put("instances/1", Holder(98, INSTANCE_MAX + 1).to_bytes())
    keys.put("instances/3", Holder(99, 3).to_bytes())
    keys.put("ids", Ids(INSTANCE_MAX - 1, "x").to_bytes())
    got = [etcd.register(etcd.join(), name).instance for name in "abc"]
    assert got == [2, 4, 5]  # 16,383 was given by the counter; 1 has been given since, as its key says


def test_an_id_outlasts_the_lease_of_its_member(etcd, keys):
    """So a silence of etcd frees no id: only the record is on the short lease."""
    reg = etcd.register(etcd.join(), "a")
    entry = reg._entry
    etcd.server.call("lease/revoke", {"ID": str(entry._lease)})
    assert keys.read(f"instances/{reg.instance}") == Holder(reg.record.incarnation, 1).to_bytes()
    found = etcd.server.call("lease/timetolive", {"ID": str(entry._id_lease)})
    assert int(found["grantedTTL"]) >= 3600
    wait_for(lambda: keys.read("members/a") is not None)


def test_ids_go_on_counting_when_they_begin_again():
    ids = Ids(INSTANCE_MAX, "x")
    assert ids.next_free(set()) == (Ids(INSTANCE_MAX + 1, "x"), 1)
    assert ids.next_free({1, 2}) == (Ids(INSTANCE_MAX + 3, "x"), 3)
    assert ids.next_free(range(1, INSTANCE_MAX + 1)) is None
    assert Ids(2, "x").next_free({1, 2, 4}) == (Ids(3, "x"), 3)


def test_a_local_cluster_has_no_counter_to_repair(local):
    with pytest.raises(kvpool.ArgumentError, match="kernel"):
        local.join().repair_ids()
