"""Views of a GPU's memory without torch: what DLPack and the CUDA array interface say is where the GPU writes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_memory import DeviceArray, driver
from kit import small_layout, small_pool

import kvpool
from kvpool import HBM


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


@pytest.fixture
def streams():
    """Two streams of GPU 0."""
    cuda, context = driver(), ctypes.c_void_p()
    if cuda.cuInit(0) != 0 or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) != 0:
        pytest.skip("no CUDA GPU")
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    both = (ctypes.c_void_p(), ctypes.c_void_p())
    for stream in both:
        assert cuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
    yield both
    for stream in both:
        assert cuda.cuStreamDestroy_v2(stream) == 0
    assert cuda.cuCtxPopCurrent_v2(ctypes.byref(context)) == 0
    assert cuda.cuDevicePrimaryCtxRelease_v2(0) == 0


def _tensor_of(capsule: object) -> _Tensor:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return _Tensor.from_address(get(capsule, b"dltensor"))


@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_a_capsule_for_any_stream_shows_the_memory_that_the_gpu_writes(streams, order):
    with small_pool(6, 6, small_layout(order=order, dtype="uint8"), device="cuda:0") as pool:
        view = pool.tensor(HBM)
        interface = view.__cuda_array_interface__
        seen = DeviceArray(view)
        for value, stream in enumerate((None, -1, 1, 2, streams[0].value), start=3):
            capsule = view.__dlpack__(stream=stream)
            tensor = _tensor_of(capsule)
            place = tensor.data + tensor.byte_offset
            assert (tensor.device_type, tensor.device_id, tensor.bits) == (2, 0, 8)
            assert place == interface["data"][0]
            assert tuple(tensor.shape[: tensor.ndim]) == view.shape == interface["shape"]
            assert tuple(tensor.strides[: tensor.ndim]) == interface["strides"]
            # One layer of one block, by the consumer's stream.
            at = tuple(np.array([2, 1]) * np.array(interface["strides"][:2]))
            nbytes = int(np.prod(view.shape[3:]))  # K of it
            where = streams[1] if stream in (None, -1) else ctypes.c_void_p(stream)
            code = driver().cuMemsetD8Async(
                ctypes.c_ulonglong(place + int(sum(at))), value, ctypes.c_size_t(nbytes), where
            )
            assert code == 0
            assert driver().cuStreamSynchronize(where) == 0
            assert (seen[2, 1, 0] == value).all()
            del capsule


def test_a_swap_after_a_stream_returns_the_data_written_in_that_stream(streams):
    """The stream is held up by copies before it writes; a swap that did not wait would return the earlier content."""
    first, _ = streams
    with small_pool(8, 8, small_layout(dtype="uint8"), device="cuda:0") as pool:
        interface = pool.tensor(HBM).__cuda_array_interface__
        size = pool.kv_layout.block_bytes
        prompts = [np.arange(100 * number, 100 * number + pool.kv_layout.block_tokens) for number in range(4)]
        big, big_bytes = ctypes.c_ulonglong(), 64 << 20
        assert driver().cuMemAlloc_v2(ctypes.byref(big), ctypes.c_size_t(big_bytes)) == 0
        for number, tokens in enumerate(prompts):
            (address,) = pool.alloc(1)
            pool.insert(tokens, [address]).close()
            place = interface["data"][0] + int(kvpool.block_ids([address])[0]) * interface["strides"][0]
            for value in (1, 50 + number):
                for _ in range(100 if value > 1 else 0):  # some milliseconds
                    driver().cuMemsetD8Async(big, value, ctypes.c_size_t(big_bytes), first)
                code = driver().cuMemsetD8Async(ctypes.c_ulonglong(place), value, ctypes.c_size_t(size), first)
                assert code == 0
                if value == 1:
                    assert driver().cuStreamSynchronize(first) == 0
            assert len(pool.swap_out(1, stream=first.value)) == 1
            with pool.match(tokens) as hit, pool.swap_in(hit.addrs, stream=first.value) as held:
                block = int(kvpool.block_ids(held.addrs)[0])
                assert (DeviceArray(pool.tensor(HBM))[block] == 50 + number).all()
        assert driver().cuStreamSynchronize(first) == 0
        assert driver().cuMemFree_v2(big) == 0
