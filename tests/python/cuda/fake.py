"""In a process whose CUDA driver is the fake one: what tests ask of it, and tensors as engines have them."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
from kit import Stamps, cached_tokens, content, prompt, refused, small_layout, small_pool, store

import kvpool
from kvpool import DRAM, HBM

__all__ = [
    "DRAM", "HBM", "EngineTensor", "Stamps", "cached_tokens", "call", "content", "ctypes", "cuda", "fake_counts",
    "kvpool", "left", "new_stream", "np", "prompt", "raises", "refused", "small_layout", "small_pool", "store",
]  # fmt: skip

cuda = ctypes.CDLL(os.environ["KVPOOL_CUDA_LIBRARY"])
cuda.fake_cuda_left.restype = ctypes.c_char_p
cuda.fake_cuda_count.restype = ctypes.c_size_t


def left() -> str:
    """What was taken of the driver and not given back."""
    return str(cuda.fake_cuda_left().decode())


def fake_counts(name: str) -> int:
    """How often the driver's function was called."""
    return int(cuda.fake_cuda_count(name.encode()))


def call(name: str, *arguments: Any) -> None:
    """One of the driver's functions, which must succeed."""
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f"{name} failed with {code}"


def new_stream(device: int = 0) -> int:
    """A stream of this device, whose context stays current and alive."""
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxPushCurrent_v2", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    assert stream.value
    return stream.value


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
