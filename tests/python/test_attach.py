"""Pool.attach: pools that reach each other by their names, because a cluster lists them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from typing import Any

import numpy as np
import pytest
from attach_kit import eventually, join, member, names, two, url
from kit import prompt, refused, small_layout, small_pool
from transfer.kit import blocks_at_peers, content, fill

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, ClosedError, PeerLost, StateError
from kvpool.peers.attachment import Attachment

__all__ = ["url"]

_numbers = itertools.count(1)


# ---- by name


@pytest.mark.parametrize("field", ["events", "events_replay"])
def test_an_endpoint_of_events_to_which_nobody_can_connect_is_refused(url, field):
    with kvpool.Cluster.join(url) as cluster, small_pool() as pool:
        with refused(pool, ArgumentError, "tcp://*:5557"):
            pool.attach(cluster, name="a", **{field: "tcp://*:5557"})
        with pytest.raises(ArgumentTypeError):
            pool.attach(cluster, name="a", **{field: 7})
        pool.attach(cluster, name="a", events="tcp://127.0.0.1:5557", events_replay="ipc:///tmp/replay").close()


@pytest.mark.parametrize(
    "listen", [None, "tcp:127.0.0.1:0", "tcp:[::1]:0", ["tcp:127.0.0.1:0", "unix:@kvpool-attach-{pid}-{n}"]]
)
def test_every_verb_connects_to_the_member_that_it_names(url, listen):
    def where() -> Any:
        if not isinstance(listen, list):
            return listen
        return [one.format(pid=os.getpid(), n=next(_numbers)) for one in listen]

    with member(url, "a", listen=where()) as (a, *_), member(url, "b", listen=where()) as (b, *_):
        eventually(lambda: len(a._attachment._members.names()) == 1)
        own = a.alloc(2)
        held = fill(a, own)
        sent = a.transfer("b", own).wait().addrs
        assert content(b, sent) == held
        back = b.transfer_with_insert("a", prompt(2), sent).wait().addrs
        assert content(a, back) == held
        lent = a.alloc(2, instance="b")
        a.transfer("b", own, to=lent).wait()
        a.free(lent)
        with a.transfer("b", own, layerwise=True) as stream:
            stream.send_layer(0)
            stream.send_layer(1)
        b.free(stream.transfer.wait().addrs)
        assert [peer.name for peer in a.peers.list()] == ["b"]
        a.free(own)
        b.free(sent)


def test_the_first_fetch_may_find_the_owner_by_the_addresses_alone(url):
    with two(url) as (a, b):
        theirs = b.alloc(3)
        held = fill(b, theirs)
        assert content(a, a.fetch(None, theirs).wait().addrs) == held
        with refused(a, PeerLost, "instance id"):
            a.fetch(None, theirs ^ np.uint64(1 << 50))
        with refused(a, ArgumentError, "one owner's"):
            a.fetch(None, [int(theirs[0]), int(a.alloc(0).sum())])


def test_addresses_carry_the_id_that_the_cluster_gave(url):
    with member(url, "a") as (a, cluster, attachment), member(url, "b") as (b, _, other):
        assert attachment.instance != other.instance
        assert kvpool.decode_address(int(a.alloc(1)[0])).instance == attachment.instance
        assert kvpool.decode_address(int(b.alloc(1)[0])).instance == other.instance
        eventually(lambda: names(cluster) == ["a", "b"])
        assert [one.instance for one in cluster.members()] == [attachment.instance, other.instance]
        assert attachment.name == a.peers.name == "a"
        assert "a, instance" in repr(attachment)


def test_the_error_for_an_unknown_name_lists_the_known_ones(url):
    with two(url) as (a, _), refused(a, PeerLost, "no peer called 'c'", "members of its cluster: b"):
        a.alloc(1, instance="c")


def test_members_publish_their_role_model_and_layout(url):
    with member(url, "a", small_pool(6, 3, model="m"), role="prefill") as (_, cluster, _attachment):
        (one,) = cluster.members()
        assert (one.name, one.role, one.model, one.hbm_blocks, one.dram_blocks) == ("a", "prefill", "m", 6, 3)
        assert one.layout["kind"] == "KVLayout"
        assert one.layout["kv_heads"] == small_layout().kv_heads
        assert one.parallel is None
        assert len(one.endpoints) == 1


@pytest.mark.parametrize("changes", [{"kv_heads": 4}, {"kv_heads": 4, "head_dim": 2}, {"pages": "fused"}])
def test_different_layouts_are_reported_when_members_connect(url, changes):
    other = small_pool(layout=small_layout(**changes))
    with member(url, "a") as (a, *_), member(url, "b", other):
        eventually(lambda: len(a._attachment._members.names()) == 1)
        with refused(a, kvpool.LayoutMismatch, "the layouts differ"):
            a.alloc(1, instance="b")


def test_several_threads_that_name_a_new_member_at_once_are_all_served(url):
    with two(url) as (a, b):
        failed: list[BaseException] = []

        def send() -> None:
            try:
                own = a.alloc(1)
                a.transfer("b", own).wait(60)
                a.free(own)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed
        assert len(b.peers.list()) == 1


# ---- all or nothing


def test_an_attach_that_fails_leaves_pool_and_cluster_as_they_were(url):
    with member(url, "taken") as (_, watching, _attachment), join(url) as cluster, small_pool() as pool:
        before = pool.settings
        taken = watching.members()[0].endpoints[0]
        for error, options in (
            (StateError, {"name": "taken"}),
            (ArgumentError, {"role": "idle"}),
            (ArgumentError, {"listen": "smoke signals"}),
            (ArgumentError, {"listen": "tcp:*:0"}),  # to which no one can connect
            (ArgumentError, {"listen": "tcp:0.0.0.0:0"}),
            (ArgumentError, {"listen": ["tcp:127.0.0.1:0", "tcp:[::]:0"]}),
            (ArgumentError, {"listen": []}),
            (ArgumentTypeError, {"listen": 7}),
            (StateError, {"listen": taken}),
            (StateError, {"listen": [f"unix:@kvpool-free-{os.getpid()}", taken]}),
        ):
            with refused(pool, error):
                pool.attach(cluster, **options)
            assert cluster.registration is None
            assert names(watching) == ["taken"]
            assert pool.peers.name is None
            assert pool.settings == before
            probe = pool.alloc(1)
            assert kvpool.decode_address(int(probe[0])).instance == 0
            pool.free(probe)
        pool.attach(cluster, name="free", listen=f"unix:@kvpool-free-{os.getpid()}")
        pool.transfer("taken", pool.alloc(1)).wait()


def test_an_attach_that_fails_at_its_end_leaves_the_pool_without_an_id(url, monkeypatch):
    with member(url, "other") as (_, watching, _attachment), join(url) as cluster, small_pool() as pool:
        with monkeypatch.context() as patch:

            def cannot_start(thread: threading.Thread) -> None:
                if thread.name == "kvpool-attach":
                    raise RuntimeError("can't start new thread")
                start(thread)

            start = threading.Thread.start
            patch.setattr(threading.Thread, "start", cannot_start)
            with pytest.raises(RuntimeError, match="new thread"):
                pool.attach(cluster, name="late")
        assert cluster.registration is None
        assert pool.peers.name is None
        assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        with member(url, "between"):  # which may get the id that the directory had given
            attachment = pool.attach(cluster, name="late")
            assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == attachment.instance
            pool.transfer("other", pool.alloc(1)).wait()
        eventually(lambda: names(watching) == ["late", "other"])


def test_a_pool_whose_first_connect_or_listen_failed_can_be_attached(url):
    nowhere = f"unix:@kvpool-nowhere-{os.getpid()}"
    with small_pool() as pool, small_pool() as other, join(url) as cluster:
        taken = other.peers.listen(f"unix:@kvpool-taken-{os.getpid()}")
        for error, call in (
            (PeerLost, lambda: pool.peers.connect(nowhere, wait=False)),
            (StateError, lambda: pool.peers.listen(taken)),
        ):
            with refused(pool, error):
                call()
        pool.attach(cluster, name="late")
        assert names(cluster) == ["late"]


def test_attaches_that_fail_leave_no_descriptor_and_no_thread(url):
    def kept() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with member(url, "taken") as (_, watching, _attachment), join(url) as cluster, small_pool() as pool:
        eventually(lambda: names(cluster) == ["taken"])
        taken = watching.members()[0].endpoints[0]
        counts = []
        for _ in range(6):
            for options in ({"name": "taken"}, {"listen": taken}):
                with pytest.raises(StateError):
                    pool.attach(cluster, **options)
            counts.append(kept())
        eventually(lambda: all(now <= then for now, then in zip(kept(), counts[0], strict=True)))


def test_a_pool_is_attached_once_and_first(url):
    with member(url, "a") as (a, cluster, attachment), small_pool() as other, join(url) as second:
        with refused(a, StateError, "attached already"):
            a.attach(cluster, name="b")
        with refused(a, StateError, "attached already"):
            a.attach(second, name="b")
        with refused(other, StateError, "already has a registration"):
            other.attach(cluster, name="b")
        other.peers.listen(f"unix:@kvpool-first-{os.getpid()}")
        with pytest.raises(StateError, match=r"before peers\.listen"):
            other.attach(second, name="b")
        attachment.close()
        with pytest.raises(StateError, match="make a new one"):
            a.attach(second, name="b")


def test_the_secret_is_the_clusters(url):
    with join(url) as cluster, small_pool(secret="mine") as pool:
        with refused(pool, ArgumentError, "setting secret differs"):
            pool.attach(cluster)
        with pytest.raises(ArgumentTypeError):
            pool.attach(url)
    with small_pool() as pool, pytest.raises(ClosedError):
        pool.attach(cluster)


# ---- load


def test_the_load_goes_out_with_the_heartbeat(url):
    with member(url, "a", small_pool(8, 4)) as (a, _, attachment), join(url) as watching:
        a.alloc(3)
        with a.insert(prompt(2), a.alloc(2)):
            attachment.report(requests=5)
            wanted = kvpool.Load(3, 3, 2, 4, 0, 0, 5)
            eventually(lambda: [one.load for one in watching.members()] == [wanted])
        with pytest.raises(ArgumentError):
            attachment.report(requests=-1)
        with pytest.raises(ArgumentTypeError):
            attachment.report(requests=1.5)


# ---- what the directory tells


def test_a_restarted_member_is_reconnected_by_the_next_verb(url):
    with member(url, "a") as (a, cluster, _):
        own = a.alloc(1)
        instances = set()
        for _ in range(4):
            with member(url, "b") as (b, _, attachment):
                eventually(lambda: attachment.instance in [one.instance for one in cluster.members()])
                a.transfer("b", own).wait()
                instances.add(attachment.instance)
                assert blocks_at_peers(b) == 0
            eventually(lambda: a.peers.list() == [])
        assert len(instances) == 4


@pytest.mark.parametrize("is_back", [True, False])
def test_a_member_that_is_listed_again_is_not_disconnected_for_an_earlier_loss(url, monkeypatch, is_back):
    with two(url) as (a, b):
        own = a.alloc(1)
        stream = a.transfer("b", own, layerwise=True)
        attachment = a._attachment
        members = attachment._cluster.members()
        (old,) = [one for one in members if one.name == "b"]
        seen = [dataclasses.replace(one, since_ns=one.since_ns + is_back) for one in members]
        monkeypatch.setattr(attachment._cluster, "members", lambda: seen)
        attachment._on_change(kvpool.MemberEvent("lost", old))  # late: the new connection is there already
        if is_back:
            with stream:
                stream.send_layer(0)
                stream.send_layer(1)
            b.free(stream.transfer.wait(30).addrs)
        else:
            assert isinstance(stream.transfer.exception(30), PeerLost)


def test_a_caller_that_sees_a_member_may_name_it(url, monkeypatch):
    """The thread that receives changes may be late: the book does not wait for it."""
    monkeypatch.setattr(Attachment, "_on_change", lambda self, event: None)
    with member(url, "a") as (a, cluster, _), member(url, "b") as (b, *_):
        cluster.wait_for(n=2, timeout=60)
        own = a.alloc(1)
        held = fill(a, own)
        assert content(b, a.transfer("b", own).wait().addrs) == held


def test_peers_connected_by_name_are_reported_like_others(url):
    with two(url) as (a, b):
        events: list[tuple[str, str]] = []
        with b.peers.on_change(lambda event: events.append((event.kind, event.name))):
            a.transfer("b", a.alloc(1)).wait()
            eventually(lambda: events == [("joined", "a")])
            a.close()
            eventually(lambda: events == [("joined", "a"), ("lost", "a")])


def test_a_logical_instance_is_attached_by_its_scheduler(url):
    layout = small_layout()
    scheduler = kvpool.Pool(
        layout, 8, parallel=kvpool.ParallelConfig(tp=2), huge_pages="never", audit=True, lease_s=30.0
    )
    with member(url, "many", scheduler) as (many, cluster, attachment), member(url, "one") as (one, *_):
        assert [each.parallel["tp"] for each in cluster.members() if each.name == "many"] == [2]
        secret = many.settings.secret
        ranks = [kvpool.RankArena.join(many.ranks.export(rank), secret=secret) for rank in range(2)]
        try:
            many.ranks.wait()
            own = one.alloc(2)
            held = fill(one, own)
            sent = one.transfer("many", own).wait().addrs
            assert {kvpool.decode_address(int(addr)).instance for addr in sent} == {attachment.instance}
            assert content(one, one.fetch("many", sent).wait().addrs) == held
        finally:
            for rank in ranks:
                rank.close()


def test_a_forked_child_ends_no_membership(url):
    with two(url) as (a, b), join(url) as watching:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                a._attachment.close()
                a.close()
            os._exit(0)
        os.waitpid(child, 0)
        a.transfer("b", a.alloc(1)).wait()
        assert names(watching) == ["a", "b"]
        assert len(b.peers.list()) == 1
