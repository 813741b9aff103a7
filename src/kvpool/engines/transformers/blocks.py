"""Copies between a pool's blocks and the tensors of a cache: [head, token, dim] of each layer, K and V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.alloc import block_ids
from kvpool.engines.transformers.layouts import memory_of
from kvpool.pool import Pool
from kvpool.types import DRAM, HBM, KVLayout, Medium, media

__all__ = ["Blocks"]


class Blocks:
    """A pool's blocks, read and written by address. Thread-safe, if no two calls name the same block.

    Args:
        pool: With memory in this process.
        layout: Its layout.
    """

    def __init__(self, pool: Pool, layout: KVLayout) -> None:
        stats = pool.stats()
        sizes = ((HBM, stats.hbm.capacity), (DRAM, stats.dram.capacity))
        self._memory = {int(medium): memory_of(pool, medium) for medium, blocks in sizes if blocks}
        self._size = layout.block_tokens
        self.medium: Medium = HBM if stats.hbm.capacity else DRAM
        """Where new blocks are allocated."""

    def read(self, addrs: npt.NDArray[np.uint64], layer: int, part: int, into: torch.Tensor) -> None:
        """Copies the first tokens of the blocks to `into`.

        Args:
            addrs: Blocks [0, n) of a prompt.
            layer: Its number.
            part: 0 for K, 1 for V.
            into: [head, token, dim], of at most n blocks' tokens, on any device.
        """
        tokens = into.shape[1]
        whole = tokens // self._size * self._size
        for memory, ids, at in self._runs(addrs[: whole // self._size], part):
            pages = memory[ids, layer]  # [block, head, token, dim]
            self._cut(into[:, :whole])[:, at] = pages.transpose(0, 1).to(into.device)
        if whole < tokens:
            last = addrs[whole // self._size : whole // self._size + 1]
            for memory, ids, _ in self._runs(last, part):
                into[:, whole:] = memory[ids[0], layer, :, : tokens - whole]

    def write(self, addrs: npt.NDArray[np.uint64], layer: int, part: int, content: torch.Tensor) -> None:
        """Fills blocks that nobody reads yet.

        Args:
            addrs: Blocks.
            layer: Its number.
            part: 0 for K, 1 for V.
            content: [head, token, dim], of all their tokens.
        """
        pages = self._cut(content).transpose(0, 1)
        for memory, ids, at in self._runs(addrs, part):
            memory[ids, layer] = pages[at].to(memory.device)

    def wait(self, *others: torch.Tensor) -> None:
        """Returns when the GPUs' current streams have made all copies so far. On the CPU they are made already."""
        for device in {tensor.device for tensor in (*(keys for keys, _ in self._memory.values()), *others)}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _cut(self, content: torch.Tensor) -> torch.Tensor:
        """A view of [head, token, dim] as [head, block, token, dim]."""
        heads, _, dim = content.shape
        return content.view(heads, -1, self._size, dim)

    def _runs(
        self, addrs: npt.NDArray[np.uint64], part: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each medium: its memory of K or V, the numbers of the blocks there, and their positions in `addrs`."""
        where = media(addrs)
        for medium, parts in self._memory.items():
            memory = parts[part]
            at = np.flatnonzero(where == medium)
            if len(at):
                yield memory, _indices(block_ids(addrs[at]), memory), torch.from_numpy(at)


def _indices(ids: Sequence[int] | npt.NDArray[np.int64], memory: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.ascontiguousarray(ids, np.int64)).to(memory.device)
