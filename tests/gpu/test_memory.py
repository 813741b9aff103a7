"""A GPU without enough memory: a typed error with the numbers, and the memory of the GPU is unchanged."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from gpu_memory import DeviceArray, driver, is_fake
from kit import prompt, store
from transfer.kit import eventually

import kvpool
from kvpool import HBM

MIB = 1 << 20


@pytest.fixture
def free_bytes() -> Iterator[object]:
    """How much of GPU 0 is free, by the driver's word."""
    cuda, device, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        pytest.skip("no CUDA GPU")
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0

    def free() -> int:
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
        return left.value

    yield free
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert cuda.cuDevicePrimaryCtxRelease_v2(device) == 0


@pytest.mark.parametrize("kind", ["virtual", "plain"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_pool_that_does_not_fit_is_refused_and_leaves_nothing_behind(free_bytes, kind, checked):
    """By kvpool's own look, and by the driver itself."""
    layout = kvpool.RawLayout(block_bytes=MIB, block_tokens=4)
    options = {"device": "cuda:0", "device_memory": kind, "check_memory": checked}
    slack = 0 if is_fake() else 4 * MIB  # what a driver may keep for itself; a pool that stayed would be far more

    def is_as(before: int) -> bool:
        return abs(free_bytes() - before) <= slack

    with kvpool.Pool(layout, 8, 4, **options) as other:  # with it goes all that a first pool takes for good
        addrs = store(other, prompt(3))
        kv = DeviceArray(other.tensor(HBM))
        kv[kvpool.block_ids(addrs)] = 7
        other.swap_out(1)
        before = free_bytes()
        for dram in (0, 2):
            blocks = before // MIB + 64
            with pytest.raises(kvpool.OutOfMemory) as caught:
                kvpool.Pool(layout, blocks, dram, **options)
            assert isinstance(caught.value, MemoryError)
            assert caught.value.needed_bytes == blocks * MIB
            assert caught.value.device == 0
            assert 0 < caught.value.available_bytes < blocks * MIB
            del caught
            eventually(lambda: is_as(before), seconds=10)
        # All free memory can be allocated, and is free again afterwards.
        with kvpool.Pool(layout, max(1, before // MIB // 2), **options) as half:
            assert half.stats().device_bytes >= before // MIB // 2 * MIB
            assert free_bytes() <= before - before // MIB // 2 * MIB
        eventually(lambda: is_as(before), seconds=10)
        with other.match(prompt(3)) as hit, other.swap_in(hit.addrs) as held:
            assert (kv[kvpool.block_ids(held.addrs)] == 7).all()
        other.audit()
        del kv


def test_memory_that_others_take_meanwhile_is_an_error_of_the_same_kind(free_bytes):
    """The engine beside the pool has taken it, not another pool."""
    before = free_bytes()
    taken, left = ctypes.c_ulonglong(), max(MIB, before // 8)
    assert driver().cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(before - left)) == 0
    try:
        for _ in range(3):
            with pytest.raises(kvpool.OutOfMemory):
                kvpool.Pool(kvpool.RawLayout(block_bytes=MIB), 2 * left // MIB, device="cuda:0", check_memory=False)
    finally:
        assert driver().cuMemFree_v2(taken) == 0
    with kvpool.Pool(kvpool.RawLayout(block_bytes=MIB), 2 * left // MIB, device="cuda:0") as pool:
        assert np.asarray(pool.alloc(1)).size == 1


def test_the_fastest_way_to_copy_is_measured_where_kernels_run():
    with kvpool.Pool(kvpool.RawLayout(block_bytes=MIB), 4, 4, device="cuda:0") as pool:
        bounds = pool.stats().kernel_piece_bytes
    if is_fake() or not kvpool._core.build_info()["cuda_kernels"]:
        assert bounds is None
    else:
        assert bounds is not None
        assert all(16 << 10 <= bound <= MIB for bound in bounds)
