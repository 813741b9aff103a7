"""Transfers between processes with HBM on a GPU, over a library that stands in for the CUDA driver."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transfer.kit import SECRET, Child, address_of, eventually, route_or_skip, small_layout, small_pool, stop_process

import kvpool

HBM, DRAM = kvpool.HBM, kvpool.DRAM

# In each process: the fake driver, and blocks that have one number each.
SETUP = """
import ctypes
from kit import Stamps
fake = ctypes.CDLL(os.environ["KVPOOL_CUDA_LIBRARY"])
fake.fake_cuda_count.restype = ctypes.c_size_t

def put(addrs, first):
    Stamps(pool).write(addrs, range(first, first + len(addrs)))

def get(addrs):
    return Stamps(pool).read(addrs)

def new_stream():
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    assert fake.cuInit(0) == 0
    assert fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert fake.cuCtxPushCurrent_v2(context) == 0
    assert fake.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return stream.value
"""


@contextmanager
def two_processes(library: Path, device: str = "cuda:1", **settings: Any) -> Iterator[tuple[Child, Child]]:
    """Pool a on the first GPU, b on another one, or where `device` says; a is connected to b."""
    processes = [Child(KVPOOL_CUDA_LIBRARY=str(library)) for _ in range(2)]
    try:
        a, b = processes
        for name, child, where in (("a", a, "cuda:0"), ("b", b, device)):
            child(
                "pool = small_pool(device=where, secret=secret, name=name, **settings)\n" + SETUP,
                where=where, secret=SECRET, name=name, settings=settings,
            )  # fmt: skip
        address = b("pool.peers.listen(address)", address=address_of("shm"))
        assert a("pool.peers.connect(address, timeout=30)", address=address) == "b"
        yield a, b
    finally:
        for child in processes:
            child.close()


@pytest.mark.parametrize("route", ["cuda_ipc", "sock"])
def test_blocks_of_a_gpu_go_to_another_process_and_come_back(fake_cuda, route):
    with two_processes(fake_cuda, routes=(route,)) as (a, b):
        for source, target in [(HBM, HBM), (HBM, DRAM), (DRAM, HBM), (DRAM, DRAM)]:
            a("addrs = pool.alloc(3, medium=medium); put(addrs, 10)", medium=source)
            sent = a("done = pool.transfer('b', addrs, medium=medium, checksum=True).wait()\ndone.addrs", medium=target)
            assert a("done.stats.route") == route
            assert b("with pool.inbox.receive(60) as item: got = item.take()\nget(got)") == [10, 11, 12]
            assert set(kvpool.media(sent)) == {target}
            b("put(got, 50)")
            assert a("done = pool.fetch('b', sent, to=addrs).wait()\nget(addrs)", sent=sent) == [50, 51, 52]
            a("pool.free(addrs)")
            b("pool.free(got)")
        assert a("fake.fake_cuda_count(b'pageable')") == b("fake.fake_cuda_count(b'pageable')") == 0


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_prompts_are_cached_at_the_receiver_and_lent_blocks_are_written(fake_cuda, device):
    with two_processes(fake_cuda, device) as (a, b):
        a("tokens = prompt(3); addrs = pool.alloc(3); put(addrs, 20)")
        a("pool.transfer_with_insert('b', tokens, addrs).wait(); None")
        found = "with pool.match(prompt(3)) as hit: found = (hit.tokens, get(hit.addrs))\nfound"
        assert b(found) == (12, [20, 21, 22])
        a("lent = pool.alloc(2, instance='b'); pool.transfer('b', addrs[:2], to=lent).wait(); pool.free(lent)")


def test_a_transfer_follows_the_stream_that_it_names(fake_cuda):
    with two_processes(fake_cuda) as (a, b):
        a("""
stream = new_stream()
addrs = pool.alloc(2)
put(addrs, 10)
go = threading.Event()
callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
work = callback(lambda _: (go.wait(60), put(addrs, 70)))
assert fake.cuLaunchHostFunc(ctypes.c_void_p(stream), work, None) == 0
handle = pool.transfer("b", addrs, stream=stream)
""")
        assert a("handle.done()") is False
        a("go.set(); handle.wait(); None")
        assert b("with pool.inbox.receive(60) as item: got = item.take()\nget(got)") == [70, 71]
        # Layer by layer, each after the work that came before it.
        a("""
go.clear()
with pool.transfer("b", addrs, stream=stream, layerwise=True) as layers:
    work = callback(lambda _: (go.wait(60), put(addrs, 90)))
    assert fake.cuLaunchHostFunc(ctypes.c_void_p(stream), work, None) == 0
    layers.send_layer(0)
    layers.send_layer(1)
go.set()
layers.wait()
None
""")
        assert b("with pool.inbox.receive(60) as item: got = item.take()\nget(got)") == [90, 91]


NOTES = """
import logging
notes = []
class Notes(logging.Handler):
    def emit(self, record):
        notes.append(record.getMessage())
logging.getLogger("kvpool.peers").addHandler(Notes(logging.WARNING))
"""


def test_ucx_leaves_a_gpu_to_other_routes_if_it_finds_none(fake_cuda):
    """UCX knows nothing of the fake driver: to it this machine has no GPU."""
    route_or_skip("ucx-tcp")
    processes = [Child(KVPOOL_CUDA_LIBRARY=str(fake_cuda), UCX_LOG_LEVEL="fatal") for _ in range(2)]
    try:
        a, b = processes
        for name, child in (("a", a), ("b", b)):
            child(
                "pool = small_pool(device='cuda:0', secret=secret, name=name, routes=routes)\n" + SETUP + NOTES,
                secret=SECRET, name=name, routes=("ucx", "sock"),
            )  # fmt: skip
        assert (
            a("pool.peers.connect(address, timeout=30)", address=b("pool.peers.listen(where)", where=address_of("shm")))
            == "b"
        )
        (note,) = a("notes")
        assert "leaves out HBM" in note
        assert "without CUDA" in note
        a(
            "hbm = pool.alloc(2, medium=kvpool.HBM); put(hbm, 10)\n"
            "dram = pool.alloc(2, medium=kvpool.DRAM); put(dram, 20)"
        )
        assert a("pool.transfer('b', hbm).wait().stats.route") == "sock"
        assert b("with pool.inbox.receive(60) as item: got = item.take()\nget(got)") == [10, 11]
        with pytest.raises(kvpool.Unsupported, match="there is no route ucx from these blocks"):
            a("pool.transfer('b', hbm, route='ucx')")
        assert a("pool.transfer('b', dram, medium=kvpool.DRAM, route='ucx').wait().stats.route") == "ucx"
        assert b("with pool.inbox.receive(60) as item: got = item.take()\nget(got)") == [20, 21]
        a("alone = small_pool(dram_blocks=0, device='cuda:0', secret=secret, routes=('ucx', 'sock'))")
        with pytest.raises(kvpool.Unsupported, match=r"leaves out HBM.*no other memory"):
            a("alone.peers.listen(where)", where=address_of("shm"))
    finally:
        for child in processes:
            child.close()


def test_a_failed_route_is_reported_and_another_one_serves(fake_cuda, fake_nccl):
    settings = {"nccl": str(fake_nccl), "nccl_pass_bytes": 1 << 20, "nccl_init_s": 30.0, "routes": ("nccl", "sock")}
    with two_processes(fake_cuda, **settings) as (a, b):
        a("addrs = pool.alloc(3); put(addrs, 10); nccl = ctypes.CDLL(library)", library=str(fake_nccl))
        receive = "with pool.inbox.receive(30) as item: got = item.take()\nvalues = get(got); pool.free(got)\nvalues"
        assert a("pool.transfer('b', addrs, route='nccl').wait().stats.route") == "nccl"
        assert b(receive) == [10, 11, 12]
        assert a("pool.peers.list()[0].failing_routes") == ()

        a("nccl.fake_nccl_set(b'break_in', 1)")
        with pytest.raises(kvpool.RouteFailed, match="NCCL"):
            a("pool.transfer('b', addrs, route='nccl').wait()")
        (failing,) = a("pool.peers.list()[0].failing_routes")
        assert (failing.route, failing.failures, failing.able) == ("nccl", 1, True)
        assert "NCCL" in failing.why
        assert a("pool.transfer('b', addrs).wait().stats.route") == "sock"
        assert b(receive) == [10, 11, 12]

        assert a("pool.transfer('b', addrs, route='nccl').wait().stats.route") == "nccl"
        assert b(receive) == [10, 11, 12]
        assert a("pool.peers.list()[0].failing_routes") == ()


def test_a_pool_in_ordinary_memory_takes_no_stream():
    with small_pool(8) as pool:
        with pytest.raises(kvpool.ArgumentError, match="stream"):
            pool.transfer("nobody", pool.alloc(1), stream=0)
        with pytest.raises(kvpool.ArgumentTypeError, match="stream"):
            pool.transfer("nobody", pool.alloc(1), stream="main")


@pytest.mark.parametrize("route", ["cuda_ipc", "sock"])
def test_a_stream_that_waits_for_a_fetch_continues_when_the_owner_is_killed(fake_cuda, route):
    with two_processes(fake_cuda, routes=(route,), lease_s=20) as (a, b):
        theirs = b("addrs = pool.alloc(2); put(addrs, 10)\naddrs")
        a("stream = new_stream(); fetch = pool.fetch('b', theirs)", theirs=theirs)
        a("got = fetch.wait_on(stream); assert fake.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0")
        assert a("assert fetch.exception() is None\nget(got)") == [10, 11]
        stop_process(b.process.pid)
        a("late = pool.fetch('b', theirs); late.wait_on(stream); None")
        assert a("late.done()") is False
        b.kill(signal.SIGKILL)
        assert a("assert fake.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0\nlate.done()") is True
        assert a("type(late.exception()).__name__") == "PeerLost"


@pytest.mark.parametrize("route", ["cuda_ipc", "sock"])
def test_a_receiver_that_is_killed_is_lost_and_a_sender_that_is_killed_leaves_nothing(fake_cuda, route):
    with two_processes(fake_cuda, routes=(route,), lease_s=10, layout=small_layout()) as (a, b):
        a("addrs = pool.alloc(4); put(addrs, 10); fake.fake_cuda_set(b'delay_us', 1_000_000)")
        a("handle = pool.transfer('b', addrs)")
        b.kill(signal.SIGKILL)
        assert a("type(handle.exception(60)).__name__") == "PeerLost"
        assert a("get(addrs)") == [10, 11, 12, 13]
    with two_processes(fake_cuda, routes=(route,), lease_s=10) as (a, b):
        a("addrs = pool.alloc(4); put(addrs, 10); fake.fake_cuda_set(b'delay_us', 1_000_000)")
        a("handle = pool.transfer('b', addrs)")
        a.kill(signal.SIGKILL)
        eventually(lambda: b("stats = pool.stats()\nstats.hbm.free") == 8, seconds=30)
        b("pool.audit()")
