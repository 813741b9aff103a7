"""The little of the CUDA driver that a bench needs from Python: bytes in and out, and how fast the device copies.

The library is libcuda.so.1, or what KVPOOL_CUDA_LIBRARY names, as in kvpool itself.
"""

from __future__ import annotations

import ctypes
import os
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class NoDevice(Exception):
    """There is no CUDA GPU here; says why."""


class Device:
    """The first GPU, in its primary context, which is current in the thread that made this. For one thread."""

    def __init__(self) -> None:
        """Opens it.

        Raises:
            NoDevice: There is no driver, or no GPU.
        """
        name = os.environ.get("KVPOOL_CUDA_LIBRARY") or "libcuda.so.1"
        try:
            self._driver: Any = ctypes.CDLL(name)
        except OSError as error:
            raise NoDevice(f"no CUDA GPU: {error}") from None
        code, count = self._driver.cuInit(0), ctypes.c_int()
        if code == 0:
            code = self._driver.cuDeviceGetCount(ctypes.byref(count))
        if code != 0 or count.value == 0:
            raise NoDevice(f"no CUDA GPU: the driver answers {code} and shows {count.value} devices")
        device, context, self._stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._must("cuDeviceGet", ctypes.byref(device), 0)
        self._must("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.enter()
        self._must("cuStreamCreate", ctypes.byref(self._stream), 1)

    def enter(self) -> None:
        """Makes its context current in the calling thread, for libraries that ask which one is. Once a thread."""
        self._must("cuCtxPushCurrent_v2", self._context)

    def allocate(self, nbytes: int) -> int:
        """Address of so many bytes, which may hold anything; plain memory, as cudaMalloc gives it."""
        address = ctypes.c_uint64()
        self._must("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave."""
        self._must("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, data: Bytes) -> None:
        """Copies an array to the device, and waits. REQUIRES: it is contiguous."""
        self._copy(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, data: Bytes) -> None:
        """Fills an array from the device. REQUIRES: it is contiguous."""
        self._copy(data.ctypes.data, address, data.nbytes)

    def copy_rates(self, nbytes: int, rounds: int) -> list[float]:
        """What one cuMemcpyAsync within the device does, read and written: GB/s of each of so many, after two."""
        source = self.allocate(nbytes)
        try:
            target = self.allocate(nbytes)
            try:
                rates = []
                for number in range(rounds + 2):
                    started = perf_counter()
                    self._copy(target, source, nbytes)
                    if number >= 2:
                        rates.append(2 * nbytes / (perf_counter() - started) / 1e9)
                return rates
            finally:
                self.free(target)
        finally:
            self.free(source)

    def copy_rate(self, nbytes: int, rounds: int) -> float:
        """The median of `copy_rates`."""
        return median(self.copy_rates(nbytes, rounds))

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        self._must("cuMemcpyAsync", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), self._stream)
        self._must("cuStreamSynchronize", self._stream)

    def _must(self, call: str, *arguments: Any) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code != 0:
            raise RuntimeError(f"{call} failed with {code}")
