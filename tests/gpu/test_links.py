"""Transfers between two processes that share a GPU, by each route that copies on it: bit for bit.

`KVPOOL_CUDA_LIBRARY` may name another driver. `nccl` speaks over sockets here, as two ranks on one GPU do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transfer.kit import SECRET, Child, address_of

import kvpool

HBM, DRAM = kvpool.HBM, kvpool.DRAM
DRIVER = os.environ.get("KVPOOL_CUDA_LIBRARY") or "libcuda.so.1"
BLOCKS = 24

# In each process: the pool's memory as bytes, in and out.
SETUP = """
import ctypes
driver = ctypes.CDLL(library)
context, stream = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxPushCurrent_v2(context) == 0
assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0

def copy(to, source, nbytes):
    assert driver.cuMemcpyAsync(ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream) == 0
    assert driver.cuStreamSynchronize(stream) == 0

def arena(medium, change=None):
    # [block, ...] of the whole medium; changes by `change` are written back.
    tensor = pool.tensor(medium)
    if medium == kvpool.DRAM:
        array = tensor.numpy()
        if change is not None:
            change(array)
        return array
    found = tensor.__cuda_array_interface__
    host = np.empty(layout.block_bytes * blocks, np.uint8)
    array = np.ndarray(found["shape"], np.dtype(found["typestr"]), host, strides=found["strides"])
    copy(host.ctypes.data, found["data"][0], host.nbytes)
    if change is not None:
        change(array)
        copy(found["data"][0], host.ctypes.data, host.nbytes)
    return array

def content(addrs):
    medium = kvpool.decode_address(addrs[0]).medium
    return np.ascontiguousarray(arena(medium)[kvpool.block_ids(addrs)]).tobytes()

def fill(addrs, seed):
    def change(array):
        for block in kvpool.block_ids(addrs):
            words = np.random.default_rng(seed + int(block)).integers(0, 1 << 16, array[block].shape, np.uint16)
            array[block] = words.view(array.dtype)
    arena(kvpool.decode_address(addrs[0]).medium, change)
    return content(addrs)
"""


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        pytest.skip(f"no CUDA driver: {error}")
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        pytest.skip("no CUDA GPU")


@contextmanager
def two_processes(route: str, order: str, **settings: Any) -> Iterator[tuple[Child, Child]]:
    """Pools a and b on the first GPU, connected, with this route alone."""
    processes = [Child(NCCL_HOSTID=f"kvpool-test-{os.getpid()}-{name}") for name in "ab"]
    try:
        a, b = processes
        for name, child in (("a", a), ("b", b)):
            child(
                "layout = kvpool.KVLayout(3, 4, 32, 'float16', 16, order=order)\n"
                "pool = kvpool.Pool(layout, hbm_blocks=blocks, dram_blocks=blocks, device='cuda:0', secret=secret,\n"
                "                   name=name, routes=(route,), **settings)\n" + SETUP,
                library=DRIVER, blocks=BLOCKS, order=order, secret=SECRET, name=name, route=route, settings=settings,
            )  # fmt: skip
        try:
            address = b("pool.peers.listen(address)", address=address_of("shm"))
            assert a("pool.peers.connect(address, timeout=60)", address=address) == "b"
        except kvpool.Unsupported as error:
            for library in ("UCX", "NCCL"):
                if f"no {library}:" in str(error):
                    pytest.skip(f"{'libucx' if library == 'UCX' else library} is not installed: {error}")
            raise
        yield a, b
    finally:
        for child in processes:
            child.close()


@pytest.mark.parametrize("order", ["aggregated", "discrete"])
@pytest.mark.parametrize(
    ("route", "memory"), [("cuda_ipc", "auto"), ("ucx", "auto"), ("ucx", "plain"), ("nccl", "auto"), ("nccl", "plain")]
)
def test_scattered_blocks_arrive_bit_for_bit_between_all_media(route, memory, order):
    with two_processes(route, order, device_memory=memory) as (a, b):
        for number, (source, target) in enumerate([(HBM, HBM), (HBM, DRAM), (DRAM, HBM), (HBM, HBM)]):
            # Every other one of those taken: no two are neighbours.
            sent = a("taken = pool.alloc(14, medium=medium)\nfill(taken[::2], seed)", medium=source, seed=1000 * number)
            done = a("done = pool.transfer('b', taken[::2], medium=medium, route=route, timeout=60).wait()\n"
                     "(done.addrs, done.stats.route)", medium=target, route=route)  # fmt: skip
            assert done[1] == route
            assert b("with pool.inbox.receive(60) as item: got = item.take()\ncontent(got)") == sent
            # Back, by a fetch, into blocks that hold something else.
            a("back = pool.alloc(7, medium=medium); fill(back, 77)", medium=source)
            assert a("pool.fetch('b', addrs, to=back, timeout=60).wait()\ncontent(back)", addrs=done[0]) == sent
            a("pool.free(taken); pool.free(back)")
            b("pool.free(got)")
        assert a("pool.peers.list()[0].failing_routes") == ()
        a("pool.audit()")
        b("pool.audit()")


# A stream of a's own beside the one that copies: what it reads of blocks, in the order of its work, to pinned memory.
WAITING = """
import mmap
waits = ctypes.c_void_p()
assert driver.cuStreamCreate(ctypes.byref(waits), 1) == 0
seen = mmap.mmap(-1, layout.block_bytes * len(back))
where = ctypes.addressof(ctypes.c_char.from_buffer(seen))
assert driver.cuMemHostRegister_v2(ctypes.c_void_p(where), ctypes.c_size_t(len(seen)), 0) == 0

def read_behind():
    first = pool.tensor(HBM).__cuda_array_interface__["data"][0]
    for i, block in enumerate(kvpool.block_ids(back)):
        assert driver.cuMemcpyAsync(ctypes.c_uint64(where + i * layout.block_bytes),
                                    ctypes.c_uint64(first + int(block) * layout.block_bytes),
                                    ctypes.c_size_t(layout.block_bytes), waits) == 0
    assert driver.cuStreamSynchronize(waits) == 0
    return bytes(seen)
"""


@pytest.mark.parametrize("route", ["cuda_ipc", "sock", "ucx", "nccl"])
def test_a_stream_waits_for_a_fetch_and_no_thread_does(route):
    """Again and again, with other content: a read that is too early gets the earlier content."""
    with two_processes(route, "aggregated") as (a, b):
        theirs = b("theirs = pool.alloc(8)\ntheirs")
        a("from kvpool import HBM\nback = pool.alloc(8)\n" + WAITING)
        for number in range(20):
            content = b("fill(theirs, seed)", seed=100 * number)
            code = "fetch = pool.fetch('b', theirs, to=back, timeout=60)\nfetch.wait_on(waits.value)\nread_behind()"
            assert a(code, theirs=theirs) == content
            assert a("fetch.done()") is True
            assert a("fetch.exception()") is None
        # And of one that does not succeed: the stream goes on.
        a("late = pool.fetch('b', theirs, to=back, timeout=60)\nlate.wait_on(waits.value)\nlate.cancel()")
        a("read_behind(); None")
        assert a("late.done()") is True


# In the process of a rank, or of the pool that is one: its part of the same blocks of the whole cache.
PART = """
def whole(seed, blocks):
    return np.random.default_rng(seed).integers(0, 1 << 16, (blocks, *whole_layout.shape), np.uint16)

def put(addrs, seed):
    def change(array):
        for block, words in zip(kvpool.block_ids(addrs), whole(seed, len(addrs)), strict=True):
            array[block] = (words if part is None else words[part]).view(array.dtype)
    arena(kvpool.decode_address(addrs[0]).medium, change)

def holds(addrs, seed):
    array = arena(kvpool.decode_address(addrs[0]).medium)
    parts = [words if part is None else words[part] for words in whole(seed, len(addrs))]
    return all((array[block].view(np.uint16) == words).all()
               for block, words in zip(kvpool.block_ids(addrs), parts, strict=True))
"""


@pytest.mark.parametrize("route", ["cuda_ipc", "nccl"])
def test_ranks_of_a_logical_instance_send_to_a_pool_and_back_bit_for_bit(route):
    layout = kvpool.KVLayout(3, 4, 32, "float16", 16)
    parallel = kvpool.ParallelConfig(tp=2)
    common = {"secret": SECRET, "routes": (route,)}
    processes = [Child(NCCL_HOSTID=f"kvpool-test-{os.getpid()}-{number}") for number in range(3)]
    scheduler = kvpool.Pool(layout, BLOCKS, BLOCKS, parallel=parallel, name="a", **common)
    try:
        for child, part in zip(processes, [*parallel.slices(layout), None], strict=True):
            child("part = index", index=None if part is None else part.index)
            make = (
                "layout = whole_layout; pool = kvpool.Pool(layout, blocks, blocks, device='cuda:0', name='b', **common)"
                if part is None
                else "pool = kvpool.RankArena.join(ticket, device='cuda:0', **common); layout = pool.layout"
            )
            try:
                child(f"{make}\n{SETUP}\n{PART}", library=DRIVER, blocks=BLOCKS, whole_layout=layout, common=common,
                      ticket=None if part is None else scheduler.ranks.export(part.rank))  # fmt: skip
            except kvpool.Unsupported as error:
                if "no NCCL:" in str(error):
                    pytest.skip(f"NCCL is not installed: {error}")
                raise
        *ranks, single = processes
        scheduler.ranks.wait(60)
        address = single("pool.peers.listen(address)", address=address_of("shm"))
        assert scheduler.peers.connect(address, timeout=60) == "b"
        for seed, (source, target) in enumerate([(HBM, HBM), (HBM, DRAM), (DRAM, HBM)]):
            addrs = scheduler.alloc(6, medium=source)[::2].tolist()
            for rank in ranks:
                rank("put(addrs, seed)", addrs=addrs, seed=seed)
            scheduler.transfer("b", addrs, medium=target, timeout=60).wait()
            single("with pool.inbox.receive(60) as item: got = item.take().tolist()\nNone")
            assert single("holds(got, seed)", seed=seed)
            single("put(got, seed); pool.transfer('a', got, medium=medium, timeout=60).wait(); pool.free(got)",
                   seed=50 + seed, medium=target)  # fmt: skip
            with scheduler.inbox.receive(60) as item:
                back = item.take().tolist()
            for rank in ranks:
                assert rank("holds(addrs, seed)", addrs=back, seed=50 + seed)
        scheduler.audit()
        single("pool.audit()")
    finally:
        scheduler.close()
        for child in processes:
            child.close()


@pytest.mark.parametrize("route", ["ucx", "nccl"])
def test_a_receiver_that_is_killed_is_lost_and_the_gpu_goes_on(route):
    with two_processes(route, "aggregated", lease_s=2) as (a, b):
        a("taken = pool.alloc(8)\nsent = fill(taken, 5)")
        a("pool.transfer('b', taken, timeout=60).wait(); None")
        b.kill()
        with pytest.raises(kvpool.PeerLost):
            a("pool.transfer('b', taken, timeout=60).wait()")
        assert a("content(taken) == sent")
