"""Pools over memory of an engine that unmaps it: whatever still touches it then crashes."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
from kit import BLOCK, prompt

import kvpool
from kvpool import HBM, Pool

BLOCKS = 8
_PROTECT = ctypes.CDLL(None, use_errno=True).mprotect


class Unmappable:
    """Tensors [block, k/v, head, token, dim], a tensor a layer, that nobody may touch while they are unmapped."""

    def __init__(self) -> None:
        self._maps = [mmap.mmap(-1, max(mmap.PAGESIZE, BLOCKS * 2 * 2 * BLOCK * 4 * 4)) for _ in range(2)]
        self.tensors = [np.frombuffer(each, np.float32)[: BLOCKS * 16 * BLOCK].reshape(BLOCKS, 2, 2, BLOCK, 4)
                        for each in self._maps]  # fmt: skip

    def unmap(self) -> None:
        self._protect(0)

    def map(self) -> None:
        """With other content, as an allocator gives it."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        for tensor in self.tensors:
            tensor[:] = np.nan

    def _protect(self, how: int) -> None:
        for each in self._maps:
            size = -(-len(each) // mmap.PAGESIZE) * mmap.PAGESIZE
            address = ctypes.addressof(ctypes.c_char.from_buffer(each))
            assert _PROTECT(ctypes.c_void_p(address), ctypes.c_size_t(size), how) == 0


@dataclass
class Adopted:
    pool: Pool
    memory: Unmappable

    def write(self, addrs: Any, value: float) -> None:
        for tensor in self.memory.tensors:
            tensor[kvpool.block_ids(addrs)] = value

    def store(self, blocks: int, name: int) -> np.ndarray:
        addrs = self.pool.alloc(blocks)
        self.write(addrs, name)
        with self.pool.insert(prompt(blocks, name), addrs):
            return addrs

    def sleep(self, **how: Any) -> int:
        moved = self.pool.suspend(timeout=0, **how)
        self.memory.unmap()
        return moved

    def wake(self) -> None:
        self.memory.map()
        self.pool.resume()

    def read(self, name: int, blocks: int) -> list[float]:
        """What is cached of a prompt, brought to HBM."""
        with self.pool.match(prompt(blocks, name), into=HBM) as hit:
            ids = kvpool.block_ids(hit.addrs)
            return [float(np.unique([tensor[block] for tensor in self.memory.tensors]).item()) for block in ids]
