"""A GPU's memory as tests see it: NumPy's arrays where the fake driver has it, copies by the driver where it is real.

Neither torch nor CuPy is needed: a machine with a GPU and a driver is enough.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["DeviceArray", "driver", "fake_array", "is_fake"]

_Run = tuple[int, int]  # bytes from the beginning of the memory, and their number


@functools.cache
def driver() -> ctypes.CDLL:
    """The CUDA driver that kvpool uses in this process, too."""
    return ctypes.CDLL(os.environ.get("KVPOOL_CUDA_LIBRARY") or "libcuda.so.1")


def is_fake() -> bool:
    """Whether it is tests/cpp/fake_cuda."""
    return hasattr(driver(), "fake_cuda_host")


def fake_array(view: Any) -> np.ndarray:
    """The elements that a view shows (anything with __cuda_array_interface__), which the fake has in this process's
    memory at another address."""
    array = _Interface(view)
    find = driver().fake_cuda_host
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_ulonglong, ctypes.c_size_t]
    address = find(array.address, array.nbytes)
    assert address, "device memory is not mapped"
    return array.over((ctypes.c_char * array.nbytes).from_address(address))


class DeviceArray:
    """The elements that a view shows, by index as NumPy's arrays; what is read is a copy, what is written is there when
    the call returns. For real GPUs; the fake answers, too.

    Any thread may use it. An index is what NumPy calls a basic one, or a list of numbers for the first dimension.
    """

    def __init__(self, view: Any) -> None:
        """`view`: anything with __cuda_array_interface__; its memory lives as long as this object."""
        self._view = view
        self._array = _Interface(view)
        self._context = _context(int(view.device.partition(":")[2] or 0))
        self._mutex = threading.Lock()
        # As large as the device's memory, and laid out as it: tells which bytes an index means.
        self._shadow = np.zeros(self._array.nbytes, np.uint8)
        self._elements = self._array.over(self._shadow)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._elements.shape

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, (list, np.ndarray)):
            return np.stack([self[int(one)] for one in index])
        with self._mutex:
            part = self._part(index)
            self._copy(part, to_device=False)
            return part.copy()

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, (list, np.ndarray)):
            values = np.broadcast_to(value, (len(index), *self.shape[1:]))
            for one, each in zip(index, values, strict=True):
                self[int(one)] = each
            return
        with self._mutex:
            part = self._part(index)
            part[...] = value
            self._copy(part, to_device=True)

    def _part(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        return self._elements[index if Ellipsis in index else (*index, Ellipsis)]  # an array, of no dimension even

    def _runs(self, part: np.ndarray) -> Iterator[_Run]:
        """What is contiguous in it."""
        if part.size == 0:
            return
        first = part.__array_interface__["data"][0] - self._shadow.ctypes.data
        outer, nbytes = list(zip(part.shape, part.strides, strict=True)), part.itemsize
        while outer and (outer[-1][1] == nbytes or outer[-1][0] == 1):
            nbytes *= outer.pop()[0]
        for at in np.ndindex(*(size for size, _ in outer)):
            yield first + sum(i * stride for i, (_, stride) in zip(at, outer, strict=True)), nbytes

    def _copy(self, part: np.ndarray, *, to_device: bool) -> None:
        cuda = driver()
        popped = ctypes.c_void_p()
        _check("cuCtxPushCurrent_v2", self._context)
        try:
            for offset, nbytes in self._runs(part):
                there = ctypes.c_ulonglong(self._array.address + offset)
                here = ctypes.c_ulonglong(self._shadow.ctypes.data + offset)
                to, source = (there, here) if to_device else (here, there)
                _check("cuMemcpyAsync", to, source, ctypes.c_size_t(nbytes), None)
            _check("cuStreamSynchronize", None)
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))


class _Interface:
    """What __cuda_array_interface__ says: an address, and where each element is from there."""

    def __init__(self, view: Any) -> None:
        interface = view.__cuda_array_interface__
        self.address = int(interface["data"][0])
        self.dtype = np.dtype(interface["typestr"])
        self.shape = tuple(interface["shape"])
        self.strides = interface.get("strides") or np.empty(self.shape, self.dtype).strides
        steps = zip(self.shape, self.strides, strict=True)
        self.nbytes = sum((size - 1) * stride for size, stride in steps) + self.dtype.itemsize

    def over(self, memory: Any) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, memory, strides=self.strides)


def _check(name: str, *arguments: Any) -> None:
    code = getattr(driver(), name)(*arguments)
    assert code == 0, f"{name} failed with {code}"


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary one, retained until the process ends."""
    _check("cuInit", 0)
    context = ctypes.c_void_p()
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context
