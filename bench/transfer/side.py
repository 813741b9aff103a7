"""Shared by the two ends of every subject: scattered blocks, stamps in them, and the timing of calls.

Imports NumPy only, so that peers use it in their own virtual environments. A subject is a pair of processes of one
module; one is asked to `receive`, then the other to `send` to it, and from then on the sender is timed:

    receive(count, size) -> target      a dictionary that tells the sender where to write
    send(count, size, target) -> slots  where block i of the transfer goes, as slot numbers of the receiver
    attend(on)                        the receiver does, or stops doing, what it must for bytes to arrive
    end()                             gives everything back

Both sides have two slots of memory for each block, and each uses the even ones in its own random order. So no two
blocks lie side by side, no merging of neighbours can help, and the odd slots, which must stay zero, show a stray write.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.measure import no_collections

Region = npt.NDArray[np.uint64]  # [slot, ...]

_HUGE_PAGE = 2 << 20
_IDLE_S = 0.01  # between two looks of a receiver that need not be quick
_BUFFER_BYTES_MIN = 4 << 20  # from here on NumPy asks for huge pages


def buffer(size: int) -> npt.NDArray[np.uint8]:
    """Zeros, all touched, aligned to a huge page: the best ordinary memory, for every contestant."""
    whole = np.empty(max(size, _BUFFER_BYTES_MIN) + _HUGE_PAGE, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    part = whole[start : start + size]
    part[:] = 0
    return part


def region(memory: npt.NDArray[np.uint8], size: int) -> Region:
    """The same bytes as slots of `size` bytes."""
    return memory.reshape(-1).view(np.uint64).reshape(-1, size // 8)


def scattered(count: int, seed: int) -> npt.NDArray[np.int64]:
    """The even ones of 2 * count slots in a random order."""
    return np.asarray(np.random.default_rng(seed).permutation(count) * 2, np.int64)


class Side:
    """One end. A subclass sets `_region`, `_order` and `_calls`."""

    _region: Region
    _order: npt.NDArray[np.int64]  # of the sender: slot of block i
    _calls: dict[str, Callable[[], Any]]  # of the sender: ways to make the same transfer

    def stamp(self, number: int) -> None:
        """Fills every sent block with distinct words, which differ for each number."""
        for index, slot in enumerate(self._order):
            self._region[slot] = self._words(number, index).reshape(self._region.shape[1:])

    def check(self, number: int, slots: list[int]) -> None:
        """Looks at every word that was received.

        Raises:
            AssertionError: A block is not what was stamped.
        """
        for index, slot in enumerate(slots):
            if not np.array_equal(self._region[slot].reshape(-1), self._words(number, index)):
                raise AssertionError(f"block {index} of {len(slots)} did not arrive in slot {slot}")

    def check_others(self, slots: list[int]) -> None:
        """Looks at every word of the slots that nothing was sent to.

        Raises:
            AssertionError: One is not zero.
        """
        for slot in set(range(len(self._region))).difference(slots):
            if self._region[slot].any():
                raise AssertionError(f"slot {slot} was written to, and nothing was sent there")

    def once(self, variant: str) -> None:
        self._calls[variant]()

    def time(self, variant: str, seconds: float, at_least: int) -> list[float]:
        """Times of whole transfers for about so long, after one to warm up; microseconds."""
        call = self._calls[variant]
        times: list[float] = []
        end = perf_counter_ns() + int(seconds * 1e9)
        with no_collections():
            call()
            while len(times) < at_least or perf_counter_ns() < end:
                start = perf_counter_ns()
                call()
                times.append((perf_counter_ns() - start) / 1000)
        return times

    def attend(self, on: bool) -> None:
        """Does nothing if bytes arrive without the receiver's help, or by its background threads."""

    def facts(self) -> dict[str, Any]:
        """What a sender can tell about the way that its bytes took."""
        return {}

    def _words(self, number: int, index: int) -> npt.NDArray[np.uint64]:
        words = math.prod(self._region.shape[1:])
        start = (number << 40) + index * (words + 1) + 1  # never zero, and no block's words are another's
        return np.arange(start, start + words, dtype=np.uint64)


class AttendingSide(Side, ABC):
    """A library whose receiver takes bytes in, or accepts connections, only while it is called."""

    _busy: bool  # it looks all the time

    def __init__(self) -> None:
        self._attendant: threading.Thread | None = None
        self._stop = False

    @abstractmethod
    def progress(self) -> None:
        """Lets the library do what there is to do."""

    def attend(self, on: bool) -> None:
        if on:
            self._stop = False
            self._attendant = threading.Thread(target=self._look, daemon=True)
            self._attendant.start()
        elif self._attendant is not None:
            self._stop = True
            self._attendant.join()
            self._attendant = None

    def _look(self) -> None:
        while not self._stop:
            self.progress()
            if not self._busy:
                time.sleep(_IDLE_S)
