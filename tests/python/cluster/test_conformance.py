"""Properties of every kind of cluster: the same tests over the files of one machine and over etcd."""

from __future__ import annotations

import os
import time

import pytest
from cluster.kit import LEASE, Events, free_name, in_thread, wait_for

import kvpool


def test_a_member_is_seen_by_itself_and_by_all_others(place):
    cluster, router = place.join(), place.join()
    events = Events(router)
    layout = {"layers": 2, "dtype": "float16"}
    reg = place.register(
        cluster, "a", role="prefill", incarnation=(1 << 64) - 1, layout=layout, model="m", parallel={"tp": 2},
        hbm_blocks=10, dram_blocks=20, endpoints=["tcp://127.0.0.1:1"],
    )  # fmt: skip
    assert [member.name for member in cluster.members()] == ["a"]  # at once
    events.wait("a", "joined")
    (member,) = router.members()
    assert member == cluster.members()[0]
    assert (member.instance, member.incarnation, member.role) == (reg.instance, (1 << 64) - 1, "prefill")
    assert (member.layout, member.model, member.parallel) == (layout, "m", {"tp": 2})
    assert (member.hbm_blocks, member.dram_blocks, member.endpoints) == (10, 20, ("tcp://127.0.0.1:1",))
    assert (member.state, member.term, member.load) == ("up", 0, kvpool.Load())
    assert 0 <= member.joined_for_s < 60
    assert 1 <= reg.instance <= 16383
    assert reg.lease_valid()


def test_what_is_published_arrives_in_order(place):
    cluster, router = place.join(), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    wait_for(lambda: events.of("a") == ["joined"])  # or it joins with its endpoint
    reg.publish(endpoints=["unix:///x"])
    wait_for(lambda: [m.endpoints for m in router.members()] == [("unix:///x",)])
    reg.publish(load=kvpool.Load(hbm_free=7, requests=3))
    wait_for(lambda: [m.load.requests for m in router.members()] == [3])
    reg.publish(state="draining")
    wait_for(lambda: [m.state for m in router.members()] == ["draining"])
    reg.publish(state="up")
    wait_for(lambda: [m.state for m in router.members()] == ["up"])
    wait_for(lambda: events.of("a") == ["joined", "changed", "changed", "changed", "changed"])
    assert router.members()[0].load == kvpool.Load(hbm_free=7, requests=3)


def test_what_a_member_lends_is_published_once_a_heartbeat_the_newest(place):
    cluster, router = place.join(heartbeat=0.5), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    assert cluster.members()[0].lending == {}
    for number in range(1, 501):
        reg.publish(lending={"lent": number})
    wait_for(lambda: [m.lending for m in router.members()] == [{"lent": 500}])
    assert len(events.of("a")) < 100
    reg.publish(load=kvpool.Load(requests=1))
    wait_for(lambda: [m.load.requests for m in router.members()] == [1])
    assert router.members()[0].lending == {"lent": 500}
    with pytest.raises(kvpool.ArgumentTypeError, match="lending"):
        reg.publish(lending=[1])


def test_what_a_member_runs_is_published_once_a_heartbeat_the_newest(place):
    cluster, router = place.join(heartbeat=0.5), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    assert cluster.members()[0].rebalancing == {}
    for number in range(1, 101):
        reg.publish(rebalancing={"state": {"n": number}})
    wait_for(lambda: [m.rebalancing for m in router.members()] == [{"state": {"n": 100}}])
    assert len(events.of("a")) < 50
    with pytest.raises(kvpool.ArgumentTypeError, match="rebalancing"):
        reg.publish(rebalancing=[1])
    with pytest.raises(kvpool.ArgumentError, match="65536 are allowed"):
        reg.publish(rebalancing={"state": "x" * 66_000})
    assert reg.record.rebalancing == {"state": {"n": 100}}


def test_loads_are_published_once_a_heartbeat_the_newest(place):
    cluster, router = place.join(heartbeat=0.5), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    for number in range(1, 2001):
        reg.publish(load=kvpool.Load(requests=number))
    wait_for(lambda: [m.load.requests for m in router.members()] == [2000])
    assert len(events.of("a")) < 200


def test_a_member_that_leaves_is_reported_as_left(place):
    cluster, router = place.join(), place.join()
    events = Events(router)
    reg = place.register(cluster, "a")
    events.wait("a", "joined")
    reg.leave()
    events.wait("a", "left")
    assert events.of("a") == ["joined", "left"]
    reg.leave()
    assert not reg.lease_valid()
    with pytest.raises(kvpool.ClosedError):
        reg.publish(state="up")
    place.register(cluster, "a").leave()  # the name is free at once, and the cluster can have another member
    place.register(cluster, "b")
    events.wait("b", "joined")
    cluster.close()
    events.wait("b", "left")


def test_a_callback_gets_the_present_members_first_and_then_changes(place):
    first, second, router = place.join(), place.join(), place.join()
    place.register(first, "a")
    wait_for(lambda: len(router.members()) == 1)
    events = Events(router)
    reg = place.register(second, "b")
    events.wait("b", "joined")
    reg.publish(state="draining")
    events.wait("b", "joined", "changed")
    reg.leave()
    events.wait("b", "joined", "changed", "left")
    assert [(e.kind, e.member.name) for e in events.all] == [
        ("joined", "a"), ("joined", "b"), ("changed", "b"), ("left", "b"),
    ]  # fmt: skip


def test_a_callback_that_raises_is_called_again_and_one_that_is_closed_is_not(place, caplog):
    cluster, router = place.join(), place.join()
    told = []

    def callback(event):
        told.append(event.kind)
        if event.kind == "changed":
            handle.close()  # from within
        raise RuntimeError("of the application's")

    handle = router.on_change(callback)
    reg = place.register(cluster, "a")
    wait_for(lambda: told == ["joined"])
    reg.publish(state="draining")
    wait_for(lambda: handle.closed)
    reg.leave()
    wait_for(lambda: router.members() == [])
    assert told == ["joined", "changed"]
    assert "of the application's" in caplog.text


def test_a_killed_member_is_lost_and_its_name_can_be_taken(place):
    router = place.join()
    events = Events(router)
    member = place.member("a")
    events.wait("a", "joined")
    member.kill()
    events.wait("a", "joined", "lost")
    assert router.members() == []
    again = place.member("a")
    assert again.instance != member.instance
    events.wait("a", "joined", "lost", "joined")


def test_a_name_is_given_to_one(place):
    cluster, other = place.join(), place.join()
    place.register(cluster, "a")
    with pytest.raises(kvpool.StateError, match="live member has the name"):
        place.register(other, "a")
    assert other.registration is None
    with pytest.raises(kvpool.StateError, match="already"):
        place.register(cluster, "b")
    place.register(other, "b")
    wait_for(lambda: [m.name for m in cluster.members()] == ["a", "b"])


def test_twenty_incarnations_of_a_name_have_twenty_ids(place):
    router = place.join()
    events = Events(router)
    cluster = place.join()
    ids = []
    for number in range(20):
        ids.append(place.register(cluster, "a", incarnation=1000 + number).instance)
        if number % 2:
            cluster.close()
            cluster = place.join()
        else:
            cluster.registration.leave()
    assert len(set(ids)) == 20
    place.register(cluster, "last")
    events.wait("last", "joined")
    told = [(event.member.instance, event.member.incarnation) for event in events.all if event.member.name == "a"]
    assert set(told) <= {(number, 1000 + nth) for nth, number in enumerate(ids)}
    assert "lost" not in events.of("a")
    wait_for(lambda: [member.name for member in router.members()] == ["last"])


def test_a_stopped_member_is_lost_fences_itself_and_comes_back(place):
    router = place.join()
    events = Events(router)
    member = place.member("a")
    events.wait("a", "joined")
    assert member("reg.lease_valid()")
    member.stop()
    events.wait("a", "joined", "lost")
    assert router.members() == []
    member.wake()
    events.wait("a", "joined", "lost", "joined")
    wait_for(lambda: member.words[-2:] == ["lost", "regained"])
    (back,) = router.members()
    assert (back.instance, back.incarnation) == (member.instance, member.incarnation)
    assert back.term > 0
    wait_for(lambda: member("reg.lease_valid()"))


def test_a_stopped_member_whose_name_was_taken_is_refused(place):
    router = place.join()
    events = Events(router)
    member = place.member("a")
    events.wait("a", "joined")
    member.stop()
    events.wait("a", "joined", "lost")
    other = place.join()
    reg = place.register(other, "a")
    member.wake()
    wait_for(lambda: member.words[-1:] == ["refused"])
    assert member.words[-2:] == ["lost", "refused"]
    assert not member("reg.lease_valid()")
    wait_for(lambda: [m.incarnation for m in router.members()] == [reg.record.incarnation])
    with pytest.raises(kvpool.StateError, match="another incarnation"):
        member("reg.publish(state='draining')")
    member("reg.leave()")  # which takes nothing from the one that has the name
    time.sleep(0.2)
    assert reg.lease_valid()
    assert [m.incarnation for m in router.members()] == [reg.record.incarnation]


def test_a_stalled_interpreter_loses_nothing(place):
    """A C call holds the GIL for three leases: no thread of Python runs in the member meanwhile."""
    router = place.join()
    events = Events(router)
    member = place.member("a")
    events.wait("a", "joined")
    microseconds = int(3 * LEASE * 1e6)
    member(f"import ctypes; ctypes.PyDLL(None).usleep({microseconds}); reg.lease_valid()")
    assert member.words == []
    assert events.of("a") == ["joined"]


def test_wait_for_counts_roles(place):
    first, second, router = place.join(), place.join(), place.join()
    assert router.wait_for(n=0) == []
    prefill = place.register(first, "p", role="prefill")
    both = place.register(second, "b", role="both")
    assert [m.name for m in router.wait_for("prefill", 2)] == ["b", "p"]
    assert [m.name for m in router.wait_for("decode")] == ["b"]
    assert [m.name for m in router.wait_for("both")] == ["b"]
    assert [m.name for m in router.wait_for(n=2)] == ["b", "p"]
    both.publish(state="draining")
    wait_for(lambda: [m.state for m in router.members()] == ["draining", "up"])
    assert [m.name for m in router.wait_for("prefill")] == ["p"]
    with pytest.raises(kvpool.DeadlineExceeded, match=r"0 of 1 decode .* b \(both, draining\), p \(prefill, up\)"):
        router.wait_for("decode", timeout=0.05)
    prefill.leave()


def test_wait_for_ends_when_a_member_comes_and_when_the_cluster_is_closed(place):
    cluster, router = place.join(), place.join()
    found = []
    with in_thread(lambda: found.append(router.wait_for("decode", timeout=30))):
        place.register(cluster, "a", role="decode")
    assert [m.name for m in found[0]] == ["a"]
    ended = []

    def wait():
        with pytest.raises(kvpool.ClosedError):
            router.wait_for(n=9, timeout=60)
        ended.append(True)

    with in_thread(wait):
        time.sleep(0.05)
        router.close()
    assert ended


def test_two_clusters_do_not_see_each_other(place):
    is_local = place.url.startswith("local")
    other_url = f"local://{free_name()}" if is_local else place.url + "-other"
    cluster = place.join()
    with kvpool.Cluster.join(other_url, lease=LEASE) as other:
        place.register(cluster, "a")
        place.register(other, "a")
        wait_for(lambda: len(cluster.members()) == 1 and len(other.members()) == 1)
        assert cluster.members()[0].incarnation != other.members()[0].incarnation
    if is_local:
        assert kvpool.Cluster.forget(other_url)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"{", b"[]", b'{"v":1}', b"[" * 100_000, b'{"v":1,"load":3}'])
def test_garbage_among_the_members_is_left_out(place, content):
    router = place.join()
    events = Events(router)
    place.put_garbage("b", content)
    place.register(place.join(), "a")
    events.wait("a", "joined")
    assert [m.name for m in place.join().members()] == ["a"]
    assert [m.name for m in router.members()] == ["a"]


def test_a_forked_child_has_no_cluster_and_takes_nothing_from_its_parent(place):
    router = place.join()
    events = Events(router)
    member = place.member("a")
    events.wait("a", "joined")
    child = member(
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        cluster.close()\n"
        "        for call in (cluster.members, lambda: cluster.on_change(print), cluster.wait_for):\n"
        "            try: call()\n"
        "            except kvpool.ForkError: pass\n"
        "            else: os._exit(3)\n"
        "        time.sleep(600)\n"
        "    finally:\n"
        "        os._exit(4)\n"
        "child"
    )
    try:
        time.sleep(2 * LEASE)
        assert events.of("a") == ["joined"]
        member.kill()
        killed_at = time.monotonic()
        events.wait("a", "joined", "lost")
        assert time.monotonic() - killed_at < 10 * LEASE
        os.kill(child, 0)  # it lives, and does not keep its parent among the members
        place.member("a")
    finally:
        os.kill(child, 9)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"name": ""}, kvpool.ArgumentError),
        ({"name": "x" * 256}, kvpool.ArgumentError),
        ({"name": "a\nb"}, kvpool.ArgumentError),
        ({"name": 3}, kvpool.ArgumentTypeError),
        ({"role": "router"}, kvpool.ArgumentError),
        ({"incarnation": -1}, kvpool.ArgumentError),
        ({"incarnation": 1 << 64}, kvpool.ArgumentError),
        ({"incarnation": "1"}, kvpool.ArgumentTypeError),
        ({"endpoints": "tcp://x"}, kvpool.ArgumentTypeError),
        ({"endpoints": ["x"] * 17}, kvpool.ArgumentError),
        ({"layout": [1]}, kvpool.ArgumentTypeError),
        ({"layout": {"x": object()}}, kvpool.ArgumentError),
        ({"layout": {"x": "y" * 70_000}}, kvpool.ArgumentError),
        ({"hbm_blocks": -1}, kvpool.ArgumentError),
        ({"timeout": -1}, kvpool.ArgumentError),
    ],
)
def test_a_bad_registration_is_refused_and_leaves_nothing(place, fields, error):
    cluster = place.join()
    with pytest.raises(error):
        cluster.register(**{"name": "a", "role": "both", "incarnation": 1} | fields)
    assert cluster.members() == []
    assert cluster.registration is None
    assert place.register(cluster, "a").instance == 1


@pytest.mark.parametrize("name", ["a/b", "..", "ä" * 100, "x" * 255, "m.a.lock", "%2F"])
def test_any_printable_name_is_accepted(place, name):
    cluster, router = place.join(), place.join()
    place.register(cluster, name)
    wait_for(lambda: [m.name for m in router.members()] == [name])


def test_a_bad_publication_changes_nothing(place):
    cluster = place.join()
    reg = place.register(cluster, "a")
    record = reg.record
    for bad in ({"state": "left"}, {"load": 3}, {"endpoints": "x"}, {"endpoints": ["x" * 256], "state": "draining"}):
        with pytest.raises((kvpool.ArgumentError, kvpool.ArgumentTypeError)):
            reg.publish(**bad)
    assert reg.record == record
