"""For a process with the fake CUDA driver: what tests ask of it, and streams and tensors as engines have them.

Streams are for a real driver, too.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gpu_memory import driver, is_fake
from kit import Stamps, cached_tokens, content, prompt, refused, small_layout, small_pool, store
from transfer.kit import address_of, wait_for

import kvpool
from kvpool import DRAM, HBM

__all__ = [
    "DRAM",
    "HBM",
    "ROUTES",
    "EngineTensor",
    "HeldWork",
    "Stamps",
    "address_of",
    "byte_layout",
    "cached_tokens",
    "call",
    "content",
    "ctypes",
    "cuda",
    "fake_counts",
    "gc",
    "itertools",
    "kvpool",
    "left",
    "meanwhile",
    "new_stream",
    "np",
    "os",
    "pair_on_gpu",
    "prompt",
    "raises",
    "refused",
    "small_layout",
    "small_pool",
    "store",
    "threading",
    "time",
    "wait_for",
]  # fmt: skip

ROUTES = ["loopback", "cuda_ipc", "sock"]  # of pools on a GPU, and without NCCL
cuda = driver()
if is_fake():
    cuda.fake_cuda_left.restype = ctypes.c_char_p
    cuda.fake_cuda_count.restype = ctypes.c_size_t


def left() -> str:
    """Objects of the driver that were not freed."""
    return str(cuda.fake_cuda_left().decode())


def fake_counts(name: str) -> int:
    """How often the driver's function was called."""
    return int(cuda.fake_cuda_count(name.encode()))


def call(name: str, *arguments: Any) -> None:
    """One of the driver's functions, which must succeed."""
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name} failed with {code}"


def new_stream(device: int = 0) -> int:
    """A stream of this device; the context stays current and alive."""
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    assert stream.value
    return stream.value


class HeldWork:
    """Work in a stream that begins when it is let go, as that of a kernel that takes its time: what is put into the
    stream behind it waits, too. Blocks are those of an aggregated layout of bytes."""

    def __init__(self, stream: int) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._go = threading.Event()
        self._wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._go.wait(60) and None)
        call("cuLaunchHostFunc", self._stream, self._wait, None)

    def write(self, pool: kvpool.Pool, addrs: Any, values: Any, layer: int | None = None) -> HeldWork:
        """Then the GPU writes these blocks, or a layer of them."""
        for (address, nbytes), value in zip(_places(pool, addrs, layer), values, strict=True):
            call("cuMemsetD8Async", address, value, nbytes, self._stream)
        return self

    def read(self, pool: kvpool.Pool, addrs: Any) -> Callable[[], list[int]]:
        """Then the GPU reads these blocks; what it found, each of one number, after the stream has ended."""
        places = list(_places(pool, addrs))
        seen = mmap.mmap(-1, sum(nbytes.value for _, nbytes in places))
        base = ctypes.addressof(ctypes.c_char.from_buffer(seen))
        call("cuMemHostRegister_v2", ctypes.c_void_p(base), ctypes.c_size_t(len(seen)), 0)  # or the call would wait
        at = base
        for address, nbytes in places:
            call("cuMemcpyAsync", ctypes.c_ulonglong(at), address, nbytes, self._stream)
            at += nbytes.value

        def found() -> list[int]:
            call("cuStreamSynchronize", self._stream)
            call("cuMemHostUnregister", ctypes.c_void_p(base))
            rows = np.frombuffer(seen, np.uint8).reshape(len(places), -1)
            assert (rows == rows[:, :1]).all()
            return [int(row[0]) for row in rows]

        return found

    def let_go(self) -> None:
        self._go.set()


def _places(
    pool: kvpool.Pool, addrs: Any, layer: int | None = None
) -> Iterator[tuple[ctypes.c_ulonglong, ctypes.c_size_t]]:
    interface = pool.tensor(HBM).__cuda_array_interface__
    per_block, per_layer = interface["strides"][:2]
    assert interface["typestr"] == "|u1"
    for block in kvpool.block_ids(addrs):
        address = interface["data"][0] + int(block) * per_block + (layer or 0) * per_layer
        nbytes = pool.kv_layout.block_bytes if layer is None else per_layer
        yield ctypes.c_ulonglong(address), ctypes.c_size_t(nbytes)


OVERTAKE_SECONDS = 0.3  # that a copy has to run before what it should follow; what follows it is never too late


def meanwhile(held: HeldWork, verb: Callable[[], Any]) -> Any:
    """Calls a verb that has to follow held work, and lets that go when the verb has had time to do without. Returns
    what the verb does: that it has overtaken shows in what was copied."""
    copied = _copied()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(verb()))
    thread.start()
    until = time.monotonic() + OVERTAKE_SECONDS
    while time.monotonic() < until and _copied() == copied:
        time.sleep(0.001)
    held.let_go()
    thread.join(60)
    assert not thread.is_alive()
    return results[0]


def _copied() -> int:
    return fake_counts("copied") if is_fake() else 0


def byte_layout() -> kvpool.KVLayout:
    """Memory that held work can write and read."""
    return small_layout(dtype="uint8")


def pair_on_gpu(route: str, *, device: str = "cuda:0", **settings: Any) -> tuple[kvpool.Pool, kvpool.Pool]:
    """Two pools of this process, the first connected to the second, "there", and blocks go by this route."""
    settings = {"routes": (route,), "lease_s": 10.0} | settings
    here, there = small_pool(device="cuda:0", **settings), small_pool(device=device, name="there", **settings)
    assert here.peers.connect(there.peers.listen(address_of(route))) == "there"
    return here, there


def raises(error: type[Exception], what: Any, *texts: str) -> Any:
    """Calls it, and returns the error that it raises: of this class, with these texts."""
    with pytest.raises(error) as caught:
        what()
    assert type(caught.value) is error, caught.type
    assert all(text in str(caught.value) for text in texts), str(caught.value)
    return caught.value


class EngineTensor:
    """A tensor in the fake GPU's memory, with one protocol or the other, as an engine's."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", strides: tuple[int, ...] | None = None) -> None:
        """Allocates it; the context must be current."""
        address = ctypes.c_ulonglong()
        nbytes = int(np.prod(shape)) * np.dtype(typestr).itemsize
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address.value, False), "strides": strides, "version": 3,
        }  # fmt: skip
