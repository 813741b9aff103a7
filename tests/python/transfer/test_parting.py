"""Peers that disconnect, are killed, stop or come back, and what they leave."""

from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest
from kit import run_script
from transfer.kit import (
    NEAR,
    NEAR_ROUTES,
    UCX_SETTINGS,
    Child,
    address_of,
    environment,
    eventually,
    fill,
    local_settings,
    not_on_gpu,
    pair_of,
    route_or_skip,
    small_pool,
    stop_process,
)  # fmt: skip

import kvpool


def test_closing_a_pool_frees_its_memory_whatever_handle_is_kept():
    run_script("""
from pathlib import Path
from transfer.kit import *
def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:kvpool" in line]
for routes in (("loopback",), (NEAR,), ("sock",)):
    one, two = small_pool(routes=routes), small_pool(routes=routes)
    assert mapped()
    peer = two.peers.connect(one.peers.listen(address_of("shm")))
    addrs = two.alloc(2)
    kept = [two.transfer(peer, addrs, private=b"x").wait(), two.transfer(peer, addrs, layerwise=True)]
    kept += [one.inbox.receive(60), two.fetch(peer, one.alloc(1)), two.alloc(1, instance=peer)]
    two.close()
    one.close()
    eventually(lambda: not mapped())
    view = small_pool()
    assert mapped()
    view.close()
    assert not mapped()
""")


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_disconnecting_ends_all_loans(route, who):
    """Unless this side writes the bytes itself, it cannot know that the peer has stopped until they reconnect."""
    with pair_of(route) as pair:
        lent = pair.a.alloc(2, instance=pair.to_b)
        pair.b("mine = pool.alloc(3, instance=peer)\nNone", peer=pair.to_a)
        if who == "a":
            pair.a.peers.disconnect(pair.to_b)
        else:
            pair.b("pool.peers.disconnect(peer)", peer=pair.to_a)
        eventually(lambda: pair.a.peers.list() == pair.b("pool.peers.list()") == [])
        eventually(lambda: pair.a.audit().hbm.lent == pair.b("pool.audit().hbm.lent") == 0)
        assert pair.a.stats().hbm.quarantined in ((0,) if route != NEAR else (0, 3))
        with pytest.raises(kvpool.PeerLost):
            pair.a.transfer(pair.to_b, pair.a.alloc(1))
        with pytest.raises(kvpool.PeerLost):
            pair.a.peers.disconnect(pair.to_b)
        pair.b("pool.peers.connect(where, timeout=60)", where=pair.a.peers.listen(address_of(route)))
        eventually(lambda: pair.a.audit().hbm.free == 7 and pair.b("pool.audit().hbm.free") == 8)
        with pytest.raises(kvpool.NotOwner):
            pair.a.transfer(pair.to_b, pair.a.alloc(2), to=lent)


@pytest.mark.parametrize("route", [NEAR, "sock-unix", "sock-tcp"])
def test_a_killed_peer_is_noticed_and_its_blocks_come_back(route):
    child = Child()
    with pair_of(route, child=child, clean=False) as pair:
        assert pair.b("len(pool.alloc(3, instance=peer))", peer=pair.to_a) == 3
        borrowed = pair.a.alloc(2, instance=pair.to_b)
        stream = pair.a.transfer(pair.to_b, pair.a.alloc(2), layerwise=True)
        child.kill()
        with pytest.raises(kvpool.PeerLost):
            stream.transfer.wait(60)
        eventually(lambda: pair.a.peers.list() == [])
        eventually(lambda: pair.a.audit().hbm.lent == 0 and pair.a.stats().hbm.quarantined == 0)
        assert pair.a.stats().hbm.active == 2
        with pytest.raises(kvpool.PeerLost):
            pair.a.transfer(pair.to_b, pair.a.alloc(1), to=borrowed[:1])
        pair.a.free(borrowed)  # the blocks that it had lent are gone with it


def test_a_peer_comes_back_under_its_name():
    with small_pool(name="a", **local_settings(NEAR)) as pool:
        pool.peers.listen(where := address_of("shm"))
        incarnations = set()
        for round_ in range(3):
            child = Child()
            child("pool = small_pool(name='b', **options)", options=local_settings(NEAR))
            assert child("pool.peers.connect(where)", where=where) == "a"
            eventually(lambda: [peer.name for peer in pool.peers.list()] == ["b"])
            incarnations.add(pool.peers.list()[0].incarnation)
            addrs = pool.alloc(2)
            sent = fill(pool, addrs, round_)
            done = pool.transfer("b", addrs).wait()
            assert child("content(pool, addrs)", addrs=done.addrs) == sent
            assert child("len(pool.alloc(3, instance='a'))") == 3
            child.kill() if round_ < 2 else child.close()
            pool.free(addrs)
            eventually(lambda: pool.peers.list() == [] and pool.audit().hbm.free == 8)
        assert len(incarnations) == 3


def test_a_stopped_peer_is_lost_and_its_late_writes_do_no_harm(child):
    """SIGSTOP is not SIGKILL: blocks that it may still write are quarantined until it is known to be gone."""
    short = {"lease_s": 3.0}
    with pair_of(NEAR, child=child, a=short, b=short, clean=False) as pair:
        assert pair.b("len(pool.alloc(2, instance=peer))", peer=pair.to_a) == 2
        child.kill(signal.SIGSTOP)
        eventually(lambda: pair.a.peers.list() == [])
        eventually(lambda: pair.a.audit().hbm.quarantined == 2)
        child.kill(signal.SIGCONT)
        child.kill()
        eventually(lambda: pair.a.audit().hbm.quarantined == 0)
        assert pair.a.stats().hbm.free == 8


def test_data_that_a_stopped_peer_reads_late_does_not_overwrite_what_came_by_another_route(child):
    """The first transfer ends at its deadline, and the peer writes its content later than the second's."""
    to = child("pool = small_pool(name='b', lease_s=30.0)\npool.peers.listen(where)", where=address_of("shm"))
    with small_pool(lease_s=30.0) as pool:
        assert pool.peers.connect(to) == "b"
        lent, addrs = pool.alloc(1, instance="b"), pool.alloc(2)
        sent = fill(pool, addrs, 1)
        stop_process(child.process.pid)
        with pytest.raises(kvpool.DeadlineExceeded):
            pool.transfer("b", addrs[:1], to=lent, route="sock", timeout=2.0).wait()
        with pytest.raises(kvpool.Busy, match="given up"):
            pool.transfer("b", addrs[1:], to=lent, route=NEAR)
        child.kill(signal.SIGCONT)

        def write_again() -> bool:
            with contextlib.suppress(kvpool.Busy):
                pool.transfer("b", addrs[1:], to=lent, route=NEAR).wait()
                return True
            return False

        eventually(write_again)
        assert child("content(pool, addrs)", addrs=lent) == sent[1:]


def test_after_fork_the_verbs_raise_and_the_parent_goes_on():
    run_script("""
import os
from transfer.kit import *
one, two = small_pool(), small_pool()
peer = two.peers.connect(one.peers.listen(address_of("shm")))
addrs = two.alloc(1)
transfer = two.transfer(peer, addrs).wait()
child = os.fork()
if child == 0:
    try:
        for call in (lambda: two.transfer(peer, addrs), two.peers.list, lambda: two.alloc(1, instance=peer),
                     lambda: two.fetch(peer, addrs), lambda: one.inbox.receive(0),
                     lambda: two.peers.connect(address_of("shm")),
                     lambda: two.peers.listen(address_of("shm")), lambda: two.peers.disconnect(peer)):
            try:
                call()
            except kvpool.ForkError:
                continue
            os._exit(3)
        two.close()
        del one, two, transfer
        import gc
        gc.collect()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(4)
assert os.waitpid(child, 0)[1] == 0
assert two.transfer(peer, addrs).wait().done()
assert len(two.peers.list()) == 1
one.close()
two.close()
""")


def test_nothing_is_left_of_a_pool_that_had_peers():
    run_script("""
import os, threading
from transfer.kit import *
def things():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
def life():
    one, two = small_pool(), small_pool()
    peer = two.peers.connect(one.peers.listen(address_of("shm")))
    with one.inbox.on_received(lambda item: None):
        two.transfer(peer, two.alloc(1), private=b"x").wait()
        two.alloc(2, instance=peer)
    two.close()
    one.close()
life()
before = things()
for _ in range(10):
    life()
# A thread that was joined may still be on its way out.
eventually(lambda: all(now <= then for now, then in zip(things(), before)))
""")


def test_a_pool_that_is_dropped_while_it_has_peers_ends_by_itself():
    run_script("""
import gc, os
from transfer.kit import *
def life():
    one, two = small_pool(), small_pool()
    peer = two.peers.connect(one.peers.listen(address_of("shm")))
    two.transfer(peer, two.alloc(1))
    del one, two
    gc.collect()
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
life()
if ON_GPU:  # whose driver keeps its own threads
    before = threads()
life()
eventually(lambda: threads() <= before)  # one that was joined may still be on its way out
# The end of the interpreter may come at any time, too.
one, two = small_pool(), small_pool()
peer = two.peers.connect(one.peers.listen(address_of("shm")))
one.inbox.on_received(print)
transfer = two.transfer(peer, two.alloc(1))
""")


@not_on_gpu("ucx is for memory of the host")
@pytest.mark.parametrize("route", UCX_SETTINGS)
def test_blocks_of_a_killed_tcp_peer_are_released_when_it_wrote_by_ucx(route):
    """Its link has no descriptor of its process, and UCX may still deliver its bytes: both need a proof."""
    route_or_skip(route)
    settings = {"routes": ("ucx",), "prefer_unix_socket": False, "lease_s": 3.0, "secret": "s"}
    child = Child(**UCX_SETTINGS[route])
    with environment(UCX_SETTINGS[route]), small_pool(**settings) as pool:
        child("pool = small_pool(**settings)", settings=settings)
        child("peer = pool.peers.connect(address)", address=pool.peers.listen("tcp:127.0.0.1:0"))
        child("stream = pool.transfer(peer, pool.alloc(4), layerwise=True)\nstream.send_layer(0)")
        eventually(lambda: pool.stats().hbm.reserved == 4)
        child.kill()
        eventually(lambda: pool.audit().hbm.free == pool.stats().hbm.capacity)
        assert pool.peers.list() == []


def test_lent_blocks_of_a_lost_peer_are_freed_with_the_others():
    child = Child()
    settings = {"routes": (NEAR,), "lease_s": 10.0}
    with small_pool(**settings) as pool:
        peer = pool.peers.connect(child("pool = small_pool(**settings)\npool.peers.listen(address)", settings=settings,
                                  address=address_of("shm")))  # fmt: skip
        mixed = np.concatenate([pool.alloc(2), pool.alloc(2, instance=peer), pool.alloc(1)])
        child.kill()
        eventually(lambda: not pool.peers.list())
        pool.free(mixed)
        assert pool.audit().hbm.active == 0
        with pytest.raises(kvpool.StaleAddress):
            pool.free(mixed)
