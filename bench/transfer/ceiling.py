"""memcpy from one process into memory that it shares with another: the ceiling of every transfer on one host.

The memory is that of two pools, so it is of the same kind as kvpool's: a memfd each, in huge pages where the machine
gives them, mapped by the sender at a huge page's boundary. The copying is a loop in C++, called once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvpool
from bench.transfer.build import build
from bench.transfer.side import Side, region, scattered

_NUMBER = ctypes.c_uint64


class Subject(Side):
    """See bench/transfer/side.py. Sender and receiver."""

    def __init__(self) -> None:
        self._library = build(Path(__file__).with_name("copy_pieces.cpp"), "-pthread")
        self._library.map_shared.restype = _NUMBER
        self._mapped: tuple[ctypes.c_uint64, ctypes.c_uint64] | None = None

    def version(self) -> str:
        return "memcpy"

    def receive(self, count: int, size: int) -> dict[str, Any]:
        base = self._make(2 * count, size)
        return {"file": f"/proc/{os.getpid()}/fd/{_descriptor(base)}", "bytes": 2 * count * size}

    def send(self, count: int, size: int, target: dict[str, Any]) -> list[int]:
        base = self._make(2 * count, size)
        mapped = self._library.map_shared(target["file"].encode(), _NUMBER(target["bytes"]))
        if not mapped:
            raise RuntimeError("the receiver's memory cannot be mapped")
        self._mapped = (_NUMBER(mapped), _NUMBER(target["bytes"]))
        self._order = scattered(count, 1)
        slots = scattered(count, 2)
        self._lists = [
            np.asarray(order * size, np.uint64) + np.uint64(start)
            for order, start in ((self._order, base), (slots, mapped))
        ]
        pointers = [ctypes.c_void_p(addresses.ctypes.data) for addresses in self._lists]
        copy = partial(self._library.copy_pieces, *pointers, _NUMBER(count), _NUMBER(size))
        self._calls = {f"threads={threads}": partial(copy, _NUMBER(threads)) for threads in (1, 2)}
        return [int(slot) for slot in slots]

    def end(self) -> None:
        if self._mapped is not None:
            self._library.unmap_shared(*self._mapped)
        self._mapped = None
        self._calls = {}
        self._region = np.empty((0, 1), np.uint64)
        self._pool.close()
        del self._pool

    def _make(self, slots: int, size: int) -> int:
        self._pool = kvpool.Pool(kvpool.RawLayout(block_bytes=size), dram_blocks=slots)
        memory = self._pool.tensor(kvpool.DRAM).numpy()
        self._region = region(memory, size)
        return int(memory.ctypes.data)


def _descriptor(base: int) -> int:
    """The open file that is mapped at this address of this process."""
    wanted = next(inode for start, end, inode in _mappings() if start <= base < end)
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.fstat(int(number)).st_ino == wanted:
                return int(number)
        except OSError:
            continue  # the listing's own
    raise RuntimeError("the pool's memory has no descriptor")


def _mappings() -> Iterator[tuple[int, int, int]]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, inode, *_ = line.split()
            start, _, end = span.partition("-")
            yield int(start, 16), int(end, 16), int(inode)
