"""The bytes of a pool's blocks, as buffers that a store reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.attention import KVSequence
from kvpool.errors import Busy, ClosedError, Error, ForkError, OutOfBlocks, StaleAddress, StateError, Unsupported
from kvpool.pool import Pool
from kvpool.storage.store import Content
from kvpool.types import DRAM, HBM, Medium, decode_address

__all__ = ["BlockMemory"]

_BATCH_BYTES: Final = 8 << 20  # that are copied out, or read, at a time


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

    @contextmanager
    def copied(
        self, tokens: npt.NDArray[np.int32] | npt.NDArray[np.int64], namespace: str, positions: Sequence[int]
    ) -> Iterator[dict[int, Content]]:
        """Copies of those blocks of a prompt that are cached, by their positions. Holds and pins nothing meanwhile.

        A copy is good if the index still has the block at the same address afterwards: a cached block never changes,
        and an address never names another one.

        Args:
            tokens: The prompt.
            namespace: Of the prompt.
            positions: Of the blocks; at most `batch_blocks`.
        """
        end = (max(positions) + 1) * self._pool.kv_layout.block_tokens
        addrs = self._pool.explain_match(tokens[:end], namespace).addrs
        cached = [position for position in positions if position < len(addrs)]
        found: dict[int, Content] = {}
        with self._filled(addrs, cached) as filled:
            direct = [at for at in filled if Medium(decode_address(addrs[at]).medium) in self._views]
            found |= self._copies(addrs, direct)
            now = self._pool.explain_match(tokens[:end], namespace).addrs
            found = {at: content for at, content in found.items() if at < len(now) and now[at] == addrs[at]}
        with self._staged(addrs, [at for at in filled if at not in direct]) as staged:
            yield {**found, **staged}

    def _copies(self, addrs: npt.NDArray[np.uint64], positions: Sequence[int]) -> dict[int, Content]:
        copies = np.empty((len(positions), self.block_bytes), np.uint8)
        for copy, position in zip(copies, positions, strict=True):
            at = 0
            for piece in self.content(int(addrs[position])):
                copy[at : at + piece.nbytes] = piece
                at += piece.nbytes
        return {position: [copy.data] for copy, position in zip(copies, positions, strict=True)}

    @contextmanager
    def _filled(self, addrs: npt.NDArray[np.uint64], positions: Sequence[int]) -> Iterator[list[int]]:
        """Those of the blocks whose content is there: `insert(filled=False)` caches blocks before it is.

        A sequence refuses such blocks, and keeps the others until it is closed. It knows no raw blocks, nor elements
        that attention cannot read: of those all count as filled.
        """
        held: list[KVSequence] = []
        try:
            yield self._hold(addrs, positions, held)
        finally:
            for sequence in held:
                sequence.close()

    def _hold(self, addrs: npt.NDArray[np.uint64], positions: Sequence[int], held: list[KVSequence]) -> list[int]:
        """Adds sequences to `held`; the positions of the blocks that count as filled."""
        if not positions:
            return []
        try:
            held.append(self._pool.sequence(addrs[list(positions)]))
        except Unsupported:
            return list(positions)
        except (Busy, StaleAddress, StateError):
            if len(positions) == 1:
                return []
            middle = len(positions) // 2
            return self._hold(addrs, positions[:middle], held) + self._hold(addrs, positions[middle:], held)
        return list(positions)

    @contextmanager
    def _staged(self, addrs: npt.NDArray[np.uint64], positions: Sequence[int]) -> Iterator[dict[int, Content]]:
        """Blocks that the CPU cannot read, of a GPU or of an engine, by way of blocks in DRAM."""
        into = self.alloc(len(positions)) if positions else np.empty(0, np.uint64)
        try:
            staged = {}
            for target, position in zip(into, positions, strict=False):
                with contextlib.suppress(Busy, StaleAddress, StateError):
                    self._pool.copy(addrs[position : position + 1], [int(target)])
                    staged[position] = self.content(int(target))
            yield staged
        finally:
            self.free(into)


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
