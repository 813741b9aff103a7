"""Pools on a GPU, with a library that stands in for the driver."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_a_pool_on_a_gpu_swaps_and_gives_everything_back(on_fake):
    on_fake("""
pool = small_pool(device="cuda", layout=small_layout(order="discrete"))
assert pool.arena(HBM).device == pool.tensor(HBM).device == "cuda:0"
assert pool.tensor(DRAM).device == "cpu"
stamps = Stamps(pool)
stamps.write(store(pool, prompt(4)), range(10, 14))
pool.swap_out(4, stream=new_stream())
with pool.match(prompt(4)) as hit:
    assert kvpool.media(hit.addrs).tolist() == [DRAM] * 4
    assert stamps.read(hit.addrs) == [10, 11, 12, 13]
    with pool.swap_in(hit.addrs, stream=0) as held:
        assert kvpool.media(held.addrs).tolist() == [HBM] * 4
        assert stamps.read(held.addrs) == [10, 11, 12, 13]
assert fake_counts("pageable") == 0
pool.close()
del stamps
assert left() == "contexts=1 streams=1", left()  # of the stream above
""")


def test_the_memory_of_a_gpu_is_counted_to_the_byte(on_fake):
    on_fake("""
with small_pool(device="cuda:1", device_memory="plain") as pool:
    hbm, dram = pool.arena(HBM), pool.arena(DRAM)
    assert (hbm.device, hbm.owned, hbm.pinned, dram.device, dram.pinned) == ("cuda:1", True, False, "cpu", True)
    assert pool.stats().device_bytes == hbm.mapped_bytes == hbm.payload_bytes == fake_counts("bytes")
with small_pool(device="cuda:1") as pool:
    assert pool.stats().device_bytes == pool.arena(HBM).mapped_bytes == 2 << 20 == fake_counts("bytes")
    assert pool.stats().kernel_piece_bytes is None  # no kernels run here, so nothing is measured
    assert pool.stats().nccl == kvpool.alloc.NcclCost(communicators=0, library_bytes=0, staging_bytes=0)
    from kvpool.observe.metrics import PoolCollector
    families = {family.name: family for family in PoolCollector(pool).collect()}
    assert [one.value for one in families["kvpool_nccl_communicators"].samples] == [0]
    assert [one.labels["use"] for one in families["kvpool_nccl_bytes"].samples] == ["library", "staging"]
with small_pool() as pool:
    assert pool.stats().device_bytes == 0
    assert pool.stats().nccl is None
assert left() == ""
""")


def test_a_gpu_that_is_too_small_is_out_of_memory_with_the_numbers(on_fake):
    on_fake("""
layout = kvpool.RawLayout(block_bytes=1 << 20, block_tokens=4)
error = raises(kvpool.OutOfMemory, lambda: kvpool.Pool(layout, 300, 2, device="cuda:0"), "does not fit GPU 0")
assert (error.needed_bytes, error.available_bytes, error.total_bytes) == (300 << 20, 256 << 20, 256 << 20)
assert left() == ""
""")


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_without_a_driver_the_error_says_what_is_missing(device):
    code = (
        "import kvpool\n"
        "layout = kvpool.RawLayout(block_bytes=64, block_tokens=4)\n"
        "try:\n"
        f"    kvpool.Pool(layout, 2, device={device!r})\n"
        "except kvpool.Unsupported as error:\n"
        "    print(error)\n"
        "assert len(kvpool.Pool(layout, 2).alloc(2)) == 2\n"
    )
    missing = "libkvpool_no_such_driver.so.1"
    environment = {"KVPOOL_CUDA_LIBRARY": missing, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    assert "GPU 0 cannot be used: there is no CUDA driver" in done.stdout
    assert missing in done.stdout


def test_the_driver_is_not_called_before_a_pool_needs_it(on_fake):
    on_fake("""
with small_pool(device="cpu") as pool:
    pool.swap_out(1)
cuda.fake_cuda_calls.restype = ctypes.c_char_p
assert cuda.fake_cuda_calls() == b""
""")


def test_invalid_devices_are_refused(on_fake):
    on_fake("""
raises(kvpool.Unsupported, lambda: small_pool(device="cuda:4"), "there is no GPU 4", "shows 4")
for device in ("cuda:", "cuda:x", "cuda:-1", "cuda0", "cuda:99999", "gpu", "cuda:\\u0661"):
    raises(kvpool.ArgumentError, lambda: small_pool(device=device), "device")
raises(kvpool.ArgumentError, lambda: small_pool(device="cuda", pin_dram="never"), "pin_dram")
raises(kvpool.ArgumentError, lambda: small_pool(device="cuda", device_memory="some"), "device_memory")
assert left() == ""
""")


def test_a_stream_is_an_int_or_an_object_that_has_one(on_fake):
    on_fake("""
class Torch:
    def __init__(self, handle):
        self.cuda_stream = handle
class CuPy:
    def __init__(self, handle):
        self.ptr = handle
class Any:
    def __init__(self, handle):
        self.handle = handle
    def __cuda_stream__(self):
        return (0, self.handle)
with small_pool(device="cuda") as pool:
    stream = new_stream()
    for given in (None, 0, 1, 2, stream, Torch(stream), CuPy(stream), Any(stream), Torch(0)):
        store(pool, prompt(1))
        assert len(pool.swap_out(1, stream=given)) == 1
        pool.evict(1)
    store(pool, prompt(2))
    for wrong in ("0", 1.5, True, object(), Torch("x"), b""):
        with refused(pool, kvpool.ArgumentTypeError, "stream"):
            pool.swap_out(1, stream=wrong)
    other = new_stream(1)
    for wrong in (other, Torch(other)):
        with refused(pool, kvpool.ArgumentError, "stream is no stream of the primary context of GPU 0"):
            pool.swap_out(1, stream=wrong)
    for wrong in (-1, 1 << 64):
        with refused(pool, kvpool.ArgumentError, "stream"):
            pool.swap_out(1, stream=wrong)
with small_pool(device="cpu") as pool, refused(pool, kvpool.ArgumentError, "has no streams"):
    pool.swap_out(1, stream=0)
""")


def test_alloc_takes_a_stream_for_its_evictions(on_fake):
    on_fake("""
with small_pool(4, 8, device="cuda") as pool:
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4)), range(4))
    pool.alloc(3, stream=new_stream())
    with pool.match(prompt(4)) as hit:
        assert stamps.read(hit.addrs) == [0, 1, 2, 3]
    assert pool.stats().swapped_out_blocks == 3
""")


def test_every_verb_reports_a_lost_gpu(on_fake):
    on_fake("""
pool = small_pool(device="cuda")
store(pool, prompt(2))
cuda.fake_cuda_lose(0, 700)
error = raises(kvpool.DeviceLost, lambda: pool.swap_out(1), "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
assert error.driver_code == 700
for verb in (lambda: pool.alloc(1), lambda: pool.match(prompt(1)), lambda: pool.swap_in([])):
    raises(kvpool.DeviceLost, verb)
pool.close()
raises(kvpool.ClosedError, lambda: pool.alloc(1))
""")


def test_background_swaps_follow_the_stream_and_end(on_fake):
    on_fake("""
import asyncio
stream = new_stream()
with small_pool(device="cuda") as pool:
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4, 1)), range(10, 14))
    cold = pool.swap_out(4, stream=stream, wait=False).wait(60).result
    stamps.write(store(pool, prompt(4, 2)), range(20, 24))
    async def both():
        out = pool.swap_out(4, stream=stream, wait=False)
        into = pool.swap_in(cold, stream=stream, wait=False)
        await asyncio.gather(out, into)
        return out.result, into.result
    moved, held = asyncio.run(both())
    assert stamps.read(held.addrs) == [10, 11, 12, 13]
    assert stamps.read(moved) == [20, 21, 22, 23]
    held.close()
    with refused(pool, kvpool.ArgumentTypeError, "stream"):
        pool.swap_out(1, stream="0", wait=False)
    # At most one until now: where the one swap took blocks that the other had freed since it was ordered.
    assert (before := fake_counts("cuCtxRecordEvent")) <= 1
    pool.swap_in(moved, wait=False).wait(60).result.close()  # after all work of the device
    assert fake_counts("cuCtxRecordEvent") == before + 1 and fake_counts("cuCtxSynchronize") == 0
assert fake_counts("pageable") == 0
del stamps
assert left() == "contexts=1 streams=1", left()  # of the stream above
""")


def test_a_swap_behind_stalled_work_can_be_cancelled_and_lets_its_pool_close(on_fake):
    on_fake("""
import threading
let_go = threading.Event()
waits = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: let_go.wait(2))  # the driver unmaps memory behind it
stream = ctypes.c_void_p(new_stream())
pool = small_pool(device="cuda")
store(pool, prompt(4))
call("cuLaunchHostFunc", stream, waits, None)
first, second, third = (pool.swap_out(1, stream=stream.value, wait=False) for _ in range(3))
assert first.cancel()
raises(kvpool.Cancelled, lambda: first.wait(60))
assert not second.done()
pool.close()
for swap in (second, third):
    raises(kvpool.ClosedError, swap.wait)
let_go.set()
""")


def test_capturing_a_graph_elsewhere_is_not_disturbed(on_fake):
    on_fake("""
stream = new_stream()
with small_pool(device="cuda") as pool:
    store(pool, prompt(4))
    cuda.fake_cuda_set(b"capturing", 1)
    moved = pool.swap_out(2, stream=stream)
    pool.swap_in(moved, stream=stream, wait=False).wait(60).result.close()
    assert fake_counts("captures broken") == 0
    for wait in (True, False):
        with refused(pool, kvpool.StateError, "name the stream"):
            pool.swap_out(1, wait=wait)
    cuda.fake_cuda_set(b"capturing", 0)
""")
