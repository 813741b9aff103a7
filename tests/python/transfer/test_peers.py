"""Meeting, parting, coming back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from kit import run_script
from transfer.kit import (
    NEAR,
    NEAR_ROUTES,
    SECRET,
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
    small_layout,
    small_pool,
    stop_process,
)  # fmt: skip

import kvpool


@pytest.fixture
def child():
    one = Child()
    yield one
    one.close()


@pytest.mark.parametrize("address", ["unix", "abstract", "tcp"])
def test_two_pools_meet(address, tmp_path, child):
    where = {"unix": f"unix:{tmp_path}/door", "abstract": address_of("shm"), "tcp": "tcp:127.0.0.1:0"}[address]
    to = child("pool = small_pool(secret=secret)\npool.listen(where, name='b')", secret=SECRET, where=where)
    with small_pool() as pool:
        assert pool.connect(to, secret=SECRET) == "b"
        (peer,) = pool.peers()
        assert (peer.name, peer.pid) == ("b", child.process.pid)
        assert peer.instance != 0 != peer.epoch
        assert "sock" in peer.routes
        assert (peer.lent_blocks, peer.borrowed_blocks, peer.reserved_blocks) == (0, 0, 0)
        assert [one.name for one in child("pool.peers()")] == [pool.name]
        assert child("pool.peers()[0].instance") != peer.instance


def test_a_name_is_made_when_none_is_given():
    with small_pool() as one, small_pool() as two:
        one.listen(address_of("shm"))
        two.listen(address_of("shm"))
        assert one.name != two.name
        assert str(os.getpid()) in one.name


def test_a_wrong_secret_is_refused_and_told(child):
    address = child("pool = small_pool()\npool.listen('tcp:127.0.0.1:0', secret='right')")
    with small_pool() as pool:
        with pytest.raises(kvpool.AuthError):
            pool.connect(address, secret="wrong")
        assert pool.peers() == []
    assert child("pool.peers()") == []
    with small_pool() as pool:
        pool.connect(address, secret="right")


def test_blocks_of_another_shape_are_refused(child):
    address = child("pool = small_pool(layout=small_layout(layers=3))\npool.listen(where)", where=address_of("shm"))
    with small_pool() as pool:
        with pytest.raises(kvpool.LayoutMismatch):
            pool.connect(address)
        assert pool.peers() == child("pool.peers()") == []


def test_another_model_is_refused(child):
    address = child("pool = small_pool(model='llama')\npool.listen(where)", where=address_of("shm"))
    with small_pool(model="mistral") as pool:
        with pytest.raises(kvpool.LayoutMismatch, match="model"):
            pool.connect(address)
        assert pool.peers() == []


def test_nobody_there_is_told_at_once_or_at_the_deadline():
    with small_pool(secret="x") as pool:
        for nowhere in (address_of("shm"), "tcp:127.0.0.1:1", "unix:/tmp/kvpool-nobody-here"):
            with pytest.raises(kvpool.PeerLost):
                pool.connect(nowhere, wait=False)
            with pytest.raises(kvpool.PeerLost, match=r"nobody listened at .* during \d+\.\d s"):
                pool.connect(nowhere, timeout=0.1)


@pytest.mark.parametrize("address", ["unix", "abstract", "tcp"])
def test_two_processes_may_be_started_in_any_order(address, tmp_path, child):
    with small_pool(secret=SECRET, name="a") as spare:  # a port that is free
        port = spare.listen("tcp:127.0.0.1:0").rpartition(":")[2]
    where = {"unix": f"unix:{tmp_path}/door", "abstract": address_of("shm"), "tcp": f"tcp:127.0.0.1:{port}"}[address]
    child.send("pool = small_pool(secret=secret)\npool.connect(where, timeout=30)", secret=SECRET, where=where)
    with small_pool(secret=SECRET, name="late") as pool:
        pool.listen(where)
        assert child.answer() == "late"


def test_both_sides_may_connect_and_a_peer_that_is_connected_is_no_error(child):
    settings = {"secret": SECRET, "routes": (NEAR, "sock")}
    with small_pool(name="a", **settings) as pool:
        here = pool.listen(address_of("shm"))
        for _ in range(10):
            there = child("pool = small_pool(name='b', **settings)\npool.listen(where)", settings=settings,
                          where=address_of("shm"))  # fmt: skip
            child.send("pool.connect(where)", where=here)
            assert pool.connect(there) == "b"
            assert child.answer() == "a"
            assert pool.connect(there) == "b"
            assert child("pool.connect(where)", where=here) == "a"
            addrs = pool.alloc(1)
            pool.transfer("b", addrs).wait()
            child("pool.transfer('a', pool.alloc(1)).wait()\npool.close()")
            pool.received(60).close()
            pool.free(addrs)
            eventually(lambda: pool.peers() == [])


def test_the_application_hears_of_peers_that_come_and_go(child):
    heard: list[kvpool.PeerEvent] = []
    with small_pool(name="a", lease_s=10.0) as pool:
        with pytest.raises(kvpool.StateError):
            pool.on_peer(heard.append)
        where = pool.listen(address_of("shm"))
        child("pool = small_pool(name='b')\npool.connect(where)", where=where)
        with pytest.raises(kvpool.ArgumentTypeError):
            pool.on_peer(7)  # type: ignore[arg-type]
        eventually(pool.peers)
        with pool.on_peer(heard.append) as callback:
            with pytest.raises(kvpool.StateError, match="already"):
                pool.on_peer(print)
            eventually(lambda: len(heard) == 1)  # it was here before
            assert (heard[0].name, heard[0].kind, heard[0].error) == ("b", "joined", None)
            assert heard[0].instance == pool.peers()[0].instance
            assert heard[0].epoch == pool.peers()[0].epoch
            child.kill()
            eventually(lambda: len(heard) == 2)
            assert (heard[1].name, heard[1].kind, heard[1].epoch) == ("b", "lost", heard[0].epoch)
            assert isinstance(heard[1].error, kvpool.PeerLost)
            with small_pool(name="c") as other:
                other.connect(where)
                eventually(lambda: len(heard) == 3)
                assert (heard[2].name, heard[2].kind) == ("c", "joined")
        assert callback.closed
        with small_pool(name="d") as unheard, pool.on_peer(lambda event: heard.append(event) or 1 / 0):
            unheard.connect(where)
            eventually(lambda: any(event.name == "d" for event in heard))
        last = pool.on_peer(heard.append)
    assert last.closed


def test_a_first_call_that_is_wrong_leaves_no_trace():
    with small_pool() as pool:
        for call in (pool.listen, pool.connect):
            with pytest.raises(kvpool.ArgumentError, match="tcp:HOST:PORT"):
                call("tcp:nonsense")  # said first, whatever else is wrong
            with pytest.raises(kvpool.ArgumentError, match="secret"):
                call("tcp:127.0.0.1:0")
            assert pool.name is None
        pool.listen("tcp:127.0.0.1:0", secret="given now")


FAILURES = ("wrong secret", "nobody there", "silence", "a door that refuses", "another layout", "unix without a secret")


def fail_to_connect(pool: kvpool.Pool, how: str, child: Child) -> type[kvpool.Error]:
    """Returns the error that pool.connect raised."""
    listen = "pool = small_pool(name='other', **options)\npool.listen(where)"
    tcp = {"where": "tcp:127.0.0.1:0"}
    options: dict[str, Any] = {"secret": "first", "timeout": 60}
    if how == "wrong secret":
        where = child(listen, options={"secret": "right"}, **tcp)
    elif how == "nobody there":
        where, options["wait"] = "tcp:127.0.0.1:1", False
    elif how == "silence":
        where, options["timeout"] = address_of("shm"), 0.1
        silent = socket.socket(socket.AF_UNIX)
        silent.bind(where.removeprefix("unix:").replace("@", "\0"))
        silent.listen()
    elif how == "a door that refuses":
        where = child(listen, options={"secret": "first"}, **tcp)
        child(SHUT_DOORS)
    elif how == "another layout":
        where = child(listen, options={"secret": "first", "layout": small_layout(layers=3)}, **tcp)
    else:
        where = child(listen, options={"secret": "first"}, where=address_of("shm"))
        del options["secret"]
    with pytest.raises(kvpool.Error) as caught:
        pool.connect(where, **options)
    child("pool.close()" if how not in ("nobody there", "silence") else "None")
    if how == "silence":
        silent.close()
    return type(caught.value)


SHUT_DOORS = """
import socket, stat
for fd in map(int, os.listdir("/proc/self/fd")):
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            continue
        one = socket.socket(fileno=os.dup(fd))
    except OSError:
        continue
    if one.family == socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
"""


@pytest.mark.parametrize("how", FAILURES)
def test_a_connect_that_fails_leaves_no_trace(how, child):
    """Another secret is right afterwards, and over TCP too."""
    expected = {
        "wrong secret": kvpool.AuthError, "nobody there": kvpool.PeerLost, "silence": kvpool.DeadlineExceeded,
        "a door that refuses": kvpool.PeerLost, "another layout": kvpool.LayoutMismatch,
        "unix without a secret": kvpool.AuthError,
    }  # fmt: skip
    with small_pool() as pool:
        settings, addrs = pool.settings, pool.alloc(1)
        for _ in range(2):
            assert fail_to_connect(pool, how, child) is expected[how]
            assert (pool.name, pool.peers(), pool.settings, pool.transfer_totals()) == (None, [], settings, {})
            with pytest.raises(kvpool.StateError, match="no peers"):
                pool.on_peer(print)
            assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        to = child("pool = small_pool(name='b')\npool.listen(where, secret='right')", where="tcp:127.0.0.1:0")
        assert pool.connect(to, secret="right", timeout=60) == "b"
        assert pool.settings.secret == "right"
        pool.transfer("b", addrs).wait(60)
        with pytest.raises(kvpool.StateError, match="another secret"):
            pool.connect(to, secret="wrong")
        assert [peer.name for peer in pool.peers()] == ["b"]


def test_a_listen_that_fails_leaves_no_trace():
    with small_pool() as taken, small_pool() as pool:
        where = taken.listen(address_of("shm"))
        with pytest.raises(kvpool.StateError, match="cannot listen"):
            pool.listen(where, name="x", secret="first")
        assert (pool.name, pool.settings.secret) == (None, "")
        assert kvpool.decode_address(int(pool.alloc(1)[0])).instance == 0
        pool.listen("tcp:127.0.0.1:0", name="y", secret="second")
        assert (pool.name, pool.settings.secret) == ("y", "second")


def test_a_first_call_that_is_interrupted_while_it_makes_the_service_leaves_no_trace():
    class Interrupted(kvpool.Pool):
        def _start_service(self, *args: Any, **options: Any) -> list[str]:
            super()._start_service(*args, **options)
            raise KeyboardInterrupt  # as Python hears Ctrl-C: when a long call of the core returns

    with Interrupted(small_layout(), hbm_blocks=2) as pool:
        for call in (pool.listen, pool.connect):
            with pytest.raises(KeyboardInterrupt):
                call(address_of("shm"), secret="first")
        pool.__class__ = kvpool.Pool
        pool.listen(address_of("shm"), secret="second")
        assert pool.settings.secret == "second"


def test_a_first_call_that_fails_leaves_another_one_of_the_same_pool_alone():
    for round_ in range(10):
        with small_pool(name="a") as pool, small_pool(name="b") as other, ThreadPoolExecutor(4) as threads:
            where = other.listen(address_of("shm"))
            failing = [threads.submit(pool.connect, address_of("shm"), wait=False) for _ in range(round_ % 4)]
            met = threads.submit(pool.connect, where, timeout=60)
            assert met.result() == "b"
            for one in failing:
                assert isinstance(one.exception(), kvpool.PeerLost)
            assert [peer.name for peer in pool.peers()] == ["b"]
            pool.transfer("b", pool.alloc(1)).wait(60)


def test_nothing_is_left_of_connects_that_failed():
    run_script("""
import os
from transfer.kit import *
def things():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
with small_pool() as pool:
    before = things()
    for _ in range(20):
        try:
            pool.connect(address_of("shm"), secret="x", wait=False)
        except kvpool.PeerLost:
            pass
    # A thread that was joined may still be on its way out.
    eventually(lambda: all(now <= then for now, then in zip(things(), before)))
""")


def test_no_error_shows_the_secret():
    script = """
import dataclasses, types
from transfer.kit import *
pool = small_pool(secret="hush-hush")
wrong = dataclasses.asdict(pool.settings) | {"model": "\\udc80"}  # no UTF-8, so nothing that the core can take
try:
    pool._start_service(types.SimpleNamespace(**wrong), "wheel", "wheel")
except TypeError as error:
    assert "model" in str(error), error
    print(error)
"""
    run = run_script(script)
    assert "model" in run.stdout
    assert "hush" not in run.stdout + run.stderr


def test_a_pool_that_is_closed_gives_its_memory_back_whatever_handle_is_kept():
    run_script("""
from pathlib import Path
from transfer.kit import *
def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:kvpool" in line]
for routes in (("loopback",), (NEAR,), ("sock",)):
    one, two = small_pool(routes=routes), small_pool(routes=routes)
    assert mapped()
    peer = two.connect(one.listen(address_of("shm")))
    addrs = two.alloc(2)
    kept = [two.transfer(peer, addrs, private=b"x").wait(), two.open_transfer(peer, addrs), one.received(60)]
    kept += [two.fetch(peer, one.alloc(1)), two.alloc(1, instance=peer)]
    two.close()
    one.close()
    eventually(lambda: not mapped())
    view = small_pool()
    assert mapped()
    view.close()
    assert not mapped()
""")


def test_somebody_who_does_not_answer_is_not_waited_for(tmp_path):
    import socket

    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as silent, small_pool() as pool:
        silent.bind(path)
        silent.listen()
        with pytest.raises(TimeoutError) as caught:
            pool.connect(f"unix:{path}", timeout=0.2)
        assert type(caught.value) is kvpool.DeadlineExceeded


def test_the_newest_of_a_name_is_the_peer(child):
    """A process that was restarted comes back before anybody has noticed that the old one is gone."""
    address = child("pool = small_pool()\npool.listen(where)", where=address_of("shm"))
    with small_pool(name="same") as one, small_pool(name="same") as two:
        one.connect(address)
        (old,) = child("pool.peers()")
        two.connect(address)
        (new,) = child("pool.peers()")
        assert (old.name, new.name) == ("same", "same")
        assert old.epoch != new.epoch
        eventually(lambda: one.peers() == [])


def test_two_peers_need_two_names():
    with small_pool(name="same") as one, small_pool(name="same") as two:
        where = one.listen(address_of("shm"))
        with pytest.raises(kvpool.ArgumentError, match="name"):
            two.connect(where)


def test_an_address_in_use_is_refused():
    where = address_of("shm")
    with small_pool() as one, small_pool() as two:
        one.listen(where)
        with pytest.raises(kvpool.StateError):
            two.listen(where)


@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_parting_ends_what_was_lent(route, who):
    """Nobody knows that the other side writes no more, unless it placed the bytes itself, until they meet again."""
    with pair_of(route) as pair:
        lent = pair.a.alloc(2, instance=pair.to_b)
        pair.b("mine = pool.alloc(3, instance=peer)\nNone", peer=pair.to_a)
        if who == "a":
            pair.a.disconnect(pair.to_b)
        else:
            pair.b("pool.disconnect(peer)", peer=pair.to_a)
        eventually(lambda: pair.a.peers() == pair.b("pool.peers()") == [])
        eventually(lambda: pair.a.audit().hbm.lent == pair.b("pool.audit().hbm.lent") == 0)
        assert pair.a.stats().hbm.quarantined in ((0,) if route != NEAR else (0, 3))
        with pytest.raises(kvpool.PeerLost):
            pair.a.transfer(pair.to_b, pair.a.alloc(1))
        with pytest.raises(kvpool.PeerLost):
            pair.a.disconnect(pair.to_b)
        pair.b("pool.connect(where, timeout=60)", where=pair.a.listen(address_of(route)))
        eventually(lambda: pair.a.audit().hbm.free == 7 and pair.b("pool.audit().hbm.free") == 8)
        with pytest.raises(kvpool.NotOwner):
            pair.a.transfer(pair.to_b, pair.a.alloc(2), to=lent)


@pytest.mark.parametrize("route", [NEAR, "sock-unix", "sock-tcp"])
def test_a_peer_that_was_killed_is_noticed_and_its_blocks_come_back(route):
    child = Child()
    with pair_of(route, child=child, clean=False) as pair:
        assert pair.b("len(pool.alloc(3, instance=peer))", peer=pair.to_a) == 3
        borrowed = pair.a.alloc(2, instance=pair.to_b)
        stream = pair.a.open_transfer(pair.to_b, pair.a.alloc(2))
        child.kill()
        with pytest.raises(kvpool.PeerLost):
            stream.transfer.wait(60)
        eventually(lambda: pair.a.peers() == [])
        eventually(lambda: pair.a.audit().hbm.lent == 0 and pair.a.stats().hbm.quarantined == 0)
        assert pair.a.stats().hbm.active == 2
        with pytest.raises(kvpool.PeerLost):
            pair.a.transfer(pair.to_b, pair.a.alloc(1), to=borrowed[:1])
        pair.a.free(borrowed)  # what it had lent is gone with it


def test_a_peer_comes_back_under_its_name():
    with small_pool(**local_settings(NEAR)) as pool:
        pool.listen(where := address_of("shm"), name="a")
        epochs = set()
        for round_ in range(3):
            child = Child()
            child("pool = small_pool(name='b', **options)", options=local_settings(NEAR))
            assert child("pool.connect(where)", where=where) == "a"
            eventually(lambda: [peer.name for peer in pool.peers()] == ["b"])
            epochs.add(pool.peers()[0].epoch)
            addrs = pool.alloc(2)
            sent = fill(pool, addrs, round_)
            done = pool.transfer("b", addrs).wait()
            assert child("content(pool, addrs)", addrs=done.addrs) == sent
            assert child("len(pool.alloc(3, instance='a'))") == 3
            child.kill() if round_ < 2 else child.close()
            pool.free(addrs)
            eventually(lambda: pool.peers() == [] and pool.audit().hbm.free == 8)
        assert len(epochs) == 3


def test_a_stopped_peer_is_lost_and_its_late_writes_harm_nobody(child):
    """SIGSTOP is not SIGKILL: what it may still write is kept apart until it is known to be gone."""
    short = {"lease_s": 3.0}
    with pair_of(NEAR, child=child, a=short, b=short, clean=False) as pair:
        assert pair.b("len(pool.alloc(2, instance=peer))", peer=pair.to_a) == 2
        child.kill(signal.SIGSTOP)
        eventually(lambda: pair.a.peers() == [])
        eventually(lambda: pair.a.audit().hbm.quarantined == 2)
        child.kill(signal.SIGCONT)
        child.kill()
        eventually(lambda: pair.a.audit().hbm.quarantined == 0)
        assert pair.a.stats().hbm.free == 8


def test_what_a_stopped_peer_has_not_read_yet_does_not_overwrite_what_comes_by_another_route(child):
    """The first transfer ends at its deadline, and the peer places its content later than that of the second."""
    to = child("pool = small_pool(name='b', lease_s=30.0)\npool.listen(where)", where=address_of("shm"))
    with small_pool(lease_s=30.0) as pool:
        assert pool.connect(to) == "b"
        lent, addrs = pool.alloc(1, instance="b"), pool.alloc(2)
        sent = fill(pool, addrs, 1)
        stop_process(child.process.pid)
        with pytest.raises(kvpool.DeadlineExceeded):
            pool.transfer("b", addrs[:1], to=lent, route="sock", timeout=0.3).wait()
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


def test_many_peers_at_once(child):
    address = child("pool = small_pool(64)\npool.listen(where)", where=address_of("shm"))
    pools = [small_pool(2, 0) for _ in range(8)]
    for number, pool in enumerate(pools):
        peer = pool.connect(address)
        addrs = pool.alloc(1)
        sent = fill(pool, addrs, number)
        assert child("content(pool, addrs)", addrs=pool.transfer(peer, addrs).wait().addrs) == sent
    assert len({peer.instance for peer in child("pool.peers()")}) == 8
    for pool in pools:
        pool.close()
    eventually(lambda: child("pool.peers()") == [])


def test_pools_of_one_process_can_be_peers_of_each_other():
    with small_pool() as one, small_pool(layout=small_layout(order="discrete")) as two:
        peer = two.connect(one.listen(address_of("shm"), name="one"))
        addrs = two.alloc(2)
        assert two.transfer(peer, addrs).wait().stats.route == "loopback"
        one.received(60).close()


def test_after_fork_the_verbs_raise_and_the_parent_goes_on():
    run_script("""
import os
from transfer.kit import *
one, two = small_pool(), small_pool()
peer = two.connect(one.listen(address_of("shm")))
addrs = two.alloc(1)
transfer = two.transfer(peer, addrs).wait()
child = os.fork()
if child == 0:
    try:
        for call in (lambda: two.transfer(peer, addrs), two.peers, lambda: two.alloc(1, instance=peer),
                     lambda: two.fetch(peer, addrs), lambda: one.received(0), lambda: two.connect(address_of("shm")),
                     lambda: two.listen(address_of("shm")), lambda: two.disconnect(peer)):
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
assert len(two.peers()) == 1
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
    peer = two.connect(one.listen(address_of("shm")))
    with one.on_received(lambda item: None):
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


def test_a_pool_that_is_dropped_with_its_peers_ends_by_itself():
    run_script("""
import gc, os
from transfer.kit import *
def life():
    one, two = small_pool(), small_pool()
    peer = two.connect(one.listen(address_of("shm")))
    two.transfer(peer, two.alloc(1))
    del one, two
    gc.collect()
def threads():
    return len(os.listdir("/proc/self/task"))
before = threads()
life()
if ON_GPU:  # whose driver keeps threads of its own
    before = threads()
life()
eventually(lambda: threads() <= before)  # one that was joined may still be on its way out
# The end of the interpreter may come at any time, too.
one, two = small_pool(), small_pool()
peer = two.connect(one.listen(address_of("shm")))
one.on_received(print)
transfer = two.transfer(peer, two.alloc(1))
""")


@not_on_gpu("ucx is for memory of the host")
@pytest.mark.parametrize("route", UCX_SETTINGS)
def test_blocks_of_a_killed_peer_that_was_met_over_tcp_are_released_when_it_wrote_by_ucx(route):
    """Its link has no descriptor of its process, and UCX may still deliver what it sent: both need a proof."""
    route_or_skip(route)
    settings = {"routes": ("ucx",), "unix_door": False, "lease_s": 3.0, "secret": "s"}
    child = Child(**UCX_SETTINGS[route])
    with environment(UCX_SETTINGS[route]), small_pool(**settings) as pool:
        child("pool = small_pool(**settings)", settings=settings)
        child("peer = pool.connect(address)", address=pool.listen("tcp:127.0.0.1:0"))
        child("stream = pool.open_transfer(peer, pool.alloc(4))\nstream.send_layer(0)")
        eventually(lambda: pool.stats().hbm.reserved == 4)
        child.kill()
        eventually(lambda: pool.audit().hbm.free == pool.stats().hbm.capacity)
        assert pool.peers() == []


def test_lent_blocks_of_a_peer_that_is_gone_are_freed_with_the_others():
    child = Child()
    settings = {"routes": (NEAR,), "lease_s": 10.0}
    with small_pool(**settings) as pool:
        peer = pool.connect(child("pool = small_pool(**settings)\npool.listen(address)", settings=settings,
                                  address=address_of("shm")))  # fmt: skip
        mixed = np.concatenate([pool.alloc(2), pool.alloc(2, instance=peer), pool.alloc(1)])
        child.kill()
        eventually(lambda: not pool.peers())
        pool.free(mixed)
        assert pool.audit().hbm.active == 0
        with pytest.raises(kvpool.StaleAddress):
            pool.free(mixed)
