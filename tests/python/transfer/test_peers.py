"""Two pools connect."""

from __future__ import annotations

import os

import pytest
from transfer.kit import (
    NEAR,
    SECRET,
    address_of,
    eventually,
    fill,
    small_layout,
    small_pool,
)  # fmt: skip

import kvpool


@pytest.mark.parametrize("address", ["unix", "abstract", "tcp"])
def test_two_pools_connect(address, tmp_path, child):
    where = {"unix": f"unix:{tmp_path}/socket", "abstract": address_of("shm"), "tcp": "tcp:127.0.0.1:0"}[address]
    to = child("pool = small_pool(secret=secret, name='b')\npool.peers.listen(where)", secret=SECRET, where=where)
    with small_pool(secret=SECRET) as pool:
        assert pool.peers.connect(to) == "b"
        (peer,) = pool.peers.list()
        assert (peer.name, peer.pid) == ("b", child.process.pid)
        assert peer.instance != 0 != peer.incarnation
        assert "sock" in peer.routes
        assert (peer.lent_blocks, peer.borrowed_blocks, peer.reserved_blocks) == (0, 0, 0)
        assert [one.name for one in child("pool.peers.list()")] == [pool.peers.name]
        assert child("pool.peers.list()[0].instance") != peer.instance


def test_a_name_is_made_when_none_is_given():
    with small_pool() as one, small_pool() as two:
        one.peers.listen(address_of("shm"))
        two.peers.listen(address_of("shm"))
        assert one.peers.name != two.peers.name
        assert str(os.getpid()) in one.peers.name


def test_a_wrong_secret_is_refused_and_reported(child):
    address = child("pool = small_pool(secret='right')\npool.peers.listen('tcp:127.0.0.1:0')")
    with small_pool(secret="wrong") as pool:
        with pytest.raises(kvpool.AuthError):
            pool.peers.connect(address)
        assert pool.peers.list() == []
    assert child("pool.peers.list()") == []
    with small_pool(secret="right") as pool:
        pool.peers.connect(address)


def test_blocks_of_another_shape_are_refused(child):
    address = child(
        "pool = small_pool(layout=small_layout(layers=3))\npool.peers.listen(where)", where=address_of("shm")
    )
    with small_pool() as pool:
        with pytest.raises(kvpool.LayoutMismatch):
            pool.peers.connect(address)
        assert pool.peers.list() == child("pool.peers.list()") == []


def test_another_model_is_refused(child):
    address = child("pool = small_pool(model='llama')\npool.peers.listen(where)", where=address_of("shm"))
    with small_pool(model="mistral") as pool:
        with pytest.raises(kvpool.LayoutMismatch, match="model"):
            pool.peers.connect(address)
        assert pool.peers.list() == []


def test_the_absence_of_a_peer_is_reported_at_once_or_at_the_deadline():
    with small_pool(secret="x") as pool:
        for nowhere in (address_of("shm"), "tcp:127.0.0.1:1", "unix:/tmp/kvpool-nobody-here"):
            with pytest.raises(kvpool.PeerLost):
                pool.peers.connect(nowhere, wait=False)
            with pytest.raises(kvpool.PeerLost, match=r"nobody listened at .* during \d+\.\d s"):
                pool.peers.connect(nowhere, timeout=0.1)


@pytest.mark.parametrize("address", ["unix", "abstract", "tcp"])
def test_two_processes_may_be_started_in_any_order(address, tmp_path, child):
    with small_pool(secret=SECRET, name="a") as spare:  # a port that is free
        port = spare.peers.listen("tcp:127.0.0.1:0").rpartition(":")[2]
    where = {"unix": f"unix:{tmp_path}/socket", "abstract": address_of("shm"), "tcp": f"tcp:127.0.0.1:{port}"}[address]
    child.send("pool = small_pool(secret=secret)\npool.peers.connect(where, timeout=30)", secret=SECRET, where=where)
    with small_pool(secret=SECRET, name="late") as pool:
        pool.peers.listen(where)
        assert child.answer() == "late"


def test_both_sides_may_connect_and_connecting_to_a_connected_peer_is_no_error(child):
    settings = {"secret": SECRET, "routes": (NEAR, "sock")}
    with small_pool(name="a", **settings) as pool:
        here = pool.peers.listen(address_of("shm"))
        for _ in range(10):
            there = child("pool = small_pool(name='b', **settings)\npool.peers.listen(where)", settings=settings,
                          where=address_of("shm"))  # fmt: skip
            child.send("pool.peers.connect(where)", where=here)
            assert pool.peers.connect(there) == "b"
            assert child.answer() == "a"
            assert pool.peers.connect(there) == "b"
            assert child("pool.peers.connect(where)", where=here) == "a"
            addrs = pool.alloc(1)
            pool.transfer("b", addrs).wait()
            child("pool.transfer('a', pool.alloc(1)).wait()\npool.close()")
            pool.inbox.receive(60).close()
            pool.free(addrs)
            eventually(lambda: pool.peers.list() == [])


def test_the_application_is_told_of_peers_that_come_and_go(child):
    heard: list[kvpool.PeerEvent] = []
    with small_pool(name="a", lease_s=10.0) as pool:
        with pytest.raises(kvpool.StateError):
            pool.peers.on_change(heard.append)
        where = pool.peers.listen(address_of("shm"))
        child("pool = small_pool(name='b')\npool.peers.connect(where)", where=where)
        with pytest.raises(kvpool.ArgumentTypeError):
            pool.peers.on_change(7)  # type: ignore[arg-type]
        eventually(pool.peers.list)
        with pool.peers.on_change(heard.append) as callback:
            with pytest.raises(kvpool.StateError, match="already"):
                pool.peers.on_change(print)
            eventually(lambda: len(heard) == 1)  # it was here before
            assert (heard[0].name, heard[0].kind, heard[0].error) == ("b", "joined", None)
            assert heard[0].instance == pool.peers.list()[0].instance
            assert heard[0].incarnation == pool.peers.list()[0].incarnation
            child.kill()
            eventually(lambda: len(heard) == 2)
            assert (heard[1].name, heard[1].kind, heard[1].incarnation) == ("b", "lost", heard[0].incarnation)
            assert isinstance(heard[1].error, kvpool.PeerLost)
            with small_pool(name="c") as other:
                other.peers.connect(where)
                eventually(lambda: len(heard) == 3)
                assert (heard[2].name, heard[2].kind) == ("c", "joined")
        assert callback.closed
        with small_pool(name="d") as unheard, pool.peers.on_change(lambda event: heard.append(event) or 1 / 0):
            unheard.peers.connect(where)
            eventually(lambda: any(event.name == "d" for event in heard))
        last = pool.peers.on_change(heard.append)
    assert last.closed


def test_the_newest_peer_of_a_name_counts(child):
    """A process that was restarted comes back before anybody has noticed that the old one is gone."""
    address = child("pool = small_pool()\npool.peers.listen(where)", where=address_of("shm"))
    with small_pool(name="same") as one, small_pool(name="same") as two:
        one.peers.connect(address)
        (old,) = child("pool.peers.list()")
        two.peers.connect(address)
        (new,) = child("pool.peers.list()")
        assert (old.name, new.name) == ("same", "same")
        assert old.incarnation != new.incarnation
        eventually(lambda: one.peers.list() == [])


def test_two_peers_cannot_share_a_name():
    with small_pool(name="same") as one, small_pool(name="same") as two:
        where = one.peers.listen(address_of("shm"))
        with pytest.raises(kvpool.ArgumentError, match="name"):
            two.peers.connect(where)


def test_an_address_in_use_is_refused():
    where = address_of("shm")
    with small_pool() as one, small_pool() as two:
        one.peers.listen(where)
        with pytest.raises(kvpool.StateError):
            two.peers.listen(where)


def test_many_peers_at_once(child):
    address = child("pool = small_pool(64)\npool.peers.listen(where)", where=address_of("shm"))
    pools = [small_pool(2, 0) for _ in range(8)]
    for number, pool in enumerate(pools):
        peer = pool.peers.connect(address)
        addrs = pool.alloc(1)
        sent = fill(pool, addrs, number)
        assert child("content(pool, addrs)", addrs=pool.transfer(peer, addrs).wait().addrs) == sent
    assert len({peer.instance for peer in child("pool.peers.list()")}) == 8
    for pool in pools:
        pool.close()
    eventually(lambda: child("pool.peers.list()") == [])


def test_pools_of_one_process_can_be_peers_of_each_other():
    with small_pool() as one, small_pool(layout=small_layout(order="discrete")) as two:
        peer = two.peers.connect(one.peers.listen(address_of("shm")))
        addrs = two.alloc(2)
        assert two.transfer(peer, addrs).wait().stats.route == "loopback"
        one.inbox.receive(60).close()
