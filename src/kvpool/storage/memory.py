"""The bytes of a pool's blocks, as buffers that a store reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import Busy, ClosedError, Error, ForkError, OutOfBlocks, StaleAddress, StateError, Unsupported
from kvpool.pool import Pool
from kvpool.storage.store import Content
from kvpool.types import DRAM, HBM, Medium, decode_address

__all__ = ["BlockMemory", "Copies"]

_BATCH_BYTES: Final = 8 << 20  # that are copied out, or read, at a time


@dataclass(frozen=True)
class Copies:
    """Content of blocks, by their positions in the prompt.

    Attributes:
        found: Copies.
        unfilled: Positions of cached blocks whose content is still to come.
    """

    found: dict[int, Content]
    unfilled: list[int]


class BlockMemory:
    """Blocks of one pool. Thread-safe. Views keep the memory after the pool's end, so late readers write nowhere else.

    Attributes:
        block_bytes: Of one block.
        batch_blocks: How many blocks are moved at a time.
        medium: Where blocks from a store go.

    Raises:
        Unsupported: No memory of the pool can be read and written by the CPU: it needs blocks in DRAM.
        StateError: The memory is in ranks, which other processes have.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.block_bytes = pool.kv_layout.block_bytes
        self.batch_blocks = max(1, _BATCH_BYTES // self.block_bytes)
        self._views = {medium: view for medium in (DRAM, HBM) if (view := _view(pool, medium)) is not None}
        if not self._views:
            raise Unsupported("a store reads and writes memory of the CPU: give the pool dram_blocks")
        self.medium: Medium = DRAM if DRAM in self._views else HBM

    def content(self, address: int) -> Content:
        """The buffers of a block of a viewable medium, in the order of its pieces."""
        place = decode_address(address)
        return _pieces(self._views[Medium(place.medium)][place.block])

    def release(self) -> None:
        """Lets go of the pool's memory, but for buffers that are in use. `content` fails from now on."""
        self._views.clear()

    def alloc(self, blocks: int) -> npt.NDArray[np.uint64]:
        """Allocates that many blocks for content, or as many as there can be. They are the caller's."""
        while blocks:
            try:
                return self._pool.alloc(blocks, medium=self.medium)
            except OutOfBlocks as error:
                room = error.fields.get("free", 0) + error.fields.get("evictable", 0)
                blocks = room if room < blocks else blocks // 2
        return np.empty(0, np.uint64)

    def free(self, addrs: Sequence[int] | npt.NDArray[np.uint64]) -> None:
        """Frees what `alloc` gave. Nothing, if the pool has ended meanwhile."""
        if len(addrs):
            with contextlib.suppress(ClosedError, ForkError):
                self._pool.free(np.asarray(addrs, np.uint64))

    def copies(
        self, tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64], namespace: str, positions: Sequence[int]
    ) -> Copies:
        """Copies of those blocks of a prompt that are cached. Holds and pins nothing.

        A copy is good if the content was there before it was made, and the index still has the block at the same
        address afterwards: such a block does not change, and an address never names another one.

        Args:
            tokens: The prompt.
            namespace: Of the prompt.
            positions: Of the blocks; at most `batch_blocks`.
        """
        end = (max(positions) + 1) * self._pool.kv_layout.block_tokens
        addrs = self._pool.explain_match(tokens[:end], namespace).addrs
        direct: list[int] = []
        others: list[int] = []
        unfilled: list[int] = []
        found: dict[int, Content] = {}
        for at in positions:
            if at < len(addrs):
                viewed = Medium(decode_address(addrs[at]).medium) in self._views
                (direct if viewed else others).append(at)
        for at in direct:
            if self._is_unfilled(int(addrs[at])):
                unfilled.append(at)
            else:
                found[at] = self._copy_of(int(addrs[at]))
        now = self._pool.explain_match(tokens[:end], namespace).addrs
        found = {at: content for at, content in found.items() if at < len(now) and now[at] == addrs[at]}
        staged = self._by_way_of_dram(addrs, others)
        return Copies({**found, **staged.found}, [*unfilled, *staged.unfilled])

    def _is_unfilled(self, address: int) -> bool:
        """Whether the content of a cached block is still to come: `insert(filled=False)` caches blocks before it is.

        `filled` refuses a list that has a block twice, and changes nothing; at the second if the first is unfilled.
        """
        try:
            self._pool.filled([address, address])
        except (StaleAddress, StateError) as error:
            return error.fields.get("position") == 1
        raise AssertionError("a block was filled twice")

    def _copy_of(self, address: int) -> Content:
        copy = np.empty(self.block_bytes, np.uint8)
        at = 0
        for piece in self.content(address):
            copy[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return [copy.data]

    def _by_way_of_dram(self, addrs: npt.NDArray[np.uint64], positions: Sequence[int]) -> Copies:
        """Blocks that the CPU cannot read, of a GPU or of an engine, one after the other by way of a block in DRAM."""
        copies = Copies({}, [])
        into = self.alloc(1) if positions else np.empty(0, np.uint64)
        try:
            for position in positions if len(into) else []:
                try:
                    self._pool.copy(addrs[position : position + 1], into)
                except Busy:
                    copies.unfilled.append(position)
                except (StaleAddress, StateError):
                    continue
                else:
                    copies.found[position] = self._copy_of(int(into[0]))
        finally:
            self.free(into)
        return copies


def _view(pool: Pool, medium: Medium) -> npt.NDArray[Any] | None:
    """The memory of a medium as [block, ...], if it is the pool's and the CPU's."""
    stats = pool.stats()
    if not (stats.dram if medium == DRAM else stats.hbm).capacity:
        return None
    if medium == DRAM:
        return _dram_view(pool)
    try:
        view = pool.tensor(HBM)
    except Error:  # an engine's tensors
        return None
    return view.numpy() if view.device == "cpu" else None


def _dram_view(pool: Pool) -> npt.NDArray[Any]:
    view: npt.NDArray[Any] = pool.tensor(DRAM).numpy()
    segments = pool.kv_layout.segment_bytes
    if view.ndim > 2 or len(segments) == 1:
        return view
    # Beside adopted tensors the view is bytes. In a discrete layout each piece has a segment of all blocks.
    return view.reshape(len(segments), len(view), segments[0]).transpose(1, 0, 2)


def _pieces(block: npt.NDArray[Any]) -> list[memoryview]:
    """The contiguous parts of a block, in order."""
    if block.flags.c_contiguous:
        return [block.reshape(-1).view(np.uint8).data]
    return [piece for part in block for piece in _pieces(part)]
