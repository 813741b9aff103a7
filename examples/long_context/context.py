"""The K and V of one sequence, in blocks of this pool and of peers: all that the example needs of kvpool.

The newest tokens are here. When the pool runs short of blocks, the oldest leaf (1,024 tokens) goes to a creditor: a
peer that lends blocks. Attention does not notice: `Pool.attend` sends the queries to where the blocks are. When a
creditor dies, the tokens that it had are computed again, in blocks of this pool, and lent out once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

import kvpool
from long_context.model import Floats

BLOCK: Final = 16  # tokens
LEAF: Final = 1024  # tokens: what is moved together, so that attention gives the same bits wherever they are
LEAF_BLOCKS: Final = LEAF // BLOCK

Range = tuple[int, int]  # of tokens: the first, and the one behind the last


@dataclass(frozen=True)
class Creditor:
    """A peer that lends blocks.

    Attributes:
        name: Its name, as a peer.
        blocks: So many it lends, at most.
    """

    name: str
    blocks: int


class PagedKV:
    """A sequence from its first token on, to write to and to attend to. It holds its blocks, and owns none."""

    def __init__(self, pool: kvpool.Pool, addrs: npt.NDArray[np.uint64]) -> None:
        self.seq = pool.sequence(addrs)
        self._pool = pool
        self._kv = pool.tensor(kvpool.HBM).numpy()  # [block, layer, k/v, head, token, dim]

    def write(self, layer: int, first: int, k: Floats, v: Floats) -> None:
        """Stores K and V, [token, head, dim], of the tokens from `first` on.

        REQUIRES: they are in one block, which is this pool's.
        """
        block = self._kv[kvpool.decode_address(self.seq.addrs[first // BLOCK]).block, layer]
        begin = first % BLOCK
        block[0, :, begin : begin + len(k)] = k.swapaxes(0, 1)
        block[1, :, begin : begin + len(v)] = v.swapaxes(0, 1)

    def attend(self, layer: int, q: Floats, end: int) -> Floats:
        """Attention of the last tokens before `end`, whose queries these are: [token, head, dim].

        Raises:
            PeerLost: A creditor that has some of the tokens is gone.
        """
        self.seq.tokens = end
        result: Floats = self._pool.attend(layer, q, [self.seq], query_tokens=[len(q)]).wait().finish()
        return result


class Context:
    """The blocks of a sequence that grows.

    Attributes:
        tokens: So many have all their K and V. The engine counts them.
    """

    def __init__(self, pool: kvpool.Pool, creditors: Sequence[Creditor] = ()) -> None:
        """Begins with one block. The first creditor that has room is asked, in this order."""
        self.tokens = 0
        self._pool = pool
        self._creditors = creditors
        self._holders: dict[int, str] = {}  # of each leaf that was lent out: its creditor, dead or alive
        self._whole = PagedKV(pool, pool.alloc(1))

    def close(self) -> None:
        """Frees its own blocks, and gives back those that it borrowed."""
        addrs = self.addrs
        self._whole.seq.close()
        self._pool.free(addrs)

    def with_room_for(self, tokens: int) -> PagedKV:
        """The whole sequence, with blocks for so many tokens.

        Raises:
            OutOfBlocks: Neither the pool nor a creditor has room.
            PeerLost: A creditor died while a leaf was sent to it. The leaf is here still.
        """
        missing = -(-tokens // BLOCK) - len(self.addrs)
        if missing > 0:
            self._whole.seq.append(self._pool.alloc(missing), tokens)
            self._keep_a_leaf_free()
        return self._whole

    @property
    def addrs(self) -> npt.NDArray[np.uint64]:
        """Of all blocks, in the order of their tokens, own and borrowed ones."""
        return self._whole.seq.addrs

    @property
    def blocks_here(self) -> int:
        """How many blocks of the sequence are in this pool."""
        return len(self.addrs) - LEAF_BLOCKS * len(self._holders)

    def blocks_lent_by(self, creditor: str) -> int:
        """How many blocks of the sequence are there, and not lost."""
        lost = set(self._lost_leaves())
        return LEAF_BLOCKS * sum(name == creditor and leaf not in lost for leaf, name in self._holders.items())

    @property
    def lost(self) -> list[Range]:
        """The tokens whose creditor is gone."""
        return self._whole.seq.lost

    def first_lost_leaf(self) -> Range | None:
        leaf = next(self._lost_leaves(), None)
        return None if leaf is None else (leaf * LEAF, (leaf + 1) * LEAF)

    @contextmanager
    def rebuilding(self, leaf: Range) -> Iterator[PagedKV]:
        """The sequence up to the end of a lost leaf, with fresh blocks for that leaf, to be filled inside the `with`.

        Then they take the place of the lost ones. They go to a creditor when the pool runs short, as any leaf.

        Raises:
            OutOfBlocks, PeerLost: As with_room_for.
        """
        first = leaf[0] // BLOCK
        self._keep_a_leaf_free()
        fresh = self._pool.alloc(LEAF_BLOCKS)
        try:
            kv = PagedKV(self._pool, np.concatenate([self.addrs[:first], fresh]))
            with kv.seq:
                yield kv
            gone = self._whole.seq.replace(first, fresh)
        except BaseException:
            self._pool.free(fresh)
            raise
        self._pool.free(gone)
        self._holders.pop(leaf[0] // LEAF, None)
        self._keep_a_leaf_free()

    def _keep_a_leaf_free(self) -> None:
        """Lends leaves out, the oldest first, until the pool has room for a leaf, or nobody has room for more.

        So there is room for the tokens that come next, and to compute again what a creditor loses.
        """
        while self._pool.stats().hbm.free < LEAF_BLOCKS:
            leaf = next(leaf for leaf in range(len(self._holders) + 1) if leaf not in self._holders)
            creditor = self._creditor_with_room()
            if creditor is None or (leaf + 1) * LEAF_BLOCKS >= len(self.addrs):
                return
            self._pool.free(self._whole.seq.offload(LEAF_BLOCKS, to=creditor, medium=kvpool.HBM))
            self._holders[leaf] = creditor

    def _creditor_with_room(self) -> str | None:
        names = (c.name for c in self._creditors if self.blocks_lent_by(c.name) + LEAF_BLOCKS <= c.blocks)
        return next(names, None)

    def _lost_leaves(self) -> Iterator[int]:
        """Only whole leaves are lent out, so only whole leaves are lost."""
        for begin, end in self._whole.seq.lost:
            yield from range(begin // LEAF, end // LEAF)
