"""What is fetched from another engine: whole prompts, and the tails of groups with windows."""

from __future__ import annotations

import contextlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.vllm.groups import Groups, Named
from kvpool.engines.vllm.requests import Digests
from kvpool.errors import Error
from kvpool.pool import Pool
from kvpool.transfer import TransferStats
from kvpool.types import DRAM

__all__ = ["Fetch", "TailFetch", "begin_fetch"]


class Fetch(Protocol):
    """A fetch that caches what it brings."""

    @property
    def stats(self) -> TransferStats:
        """Of the transfer. REQUIRES: it has ended."""

    def done(self) -> bool:
        """Whether it has ended."""

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Why it has failed; None: it has not. REQUIRES: it has ended."""

    def cancel(self) -> bool:
        """It shall end soon."""


class TailFetch:
    """Fetches blocks by their addresses, and caches them as a tail. Not thread-safe.

    When it has ended, the engine's thread must call `take` or `exception`, which cache them, or `drop`.
    """

    def __init__(self, pool: Pool, transfer: _core.Transfer, tail: Named) -> None:
        self._pool = pool
        self._transfer = transfer
        self._tail = tail
        self._taken = False
        self._error: Exception | None = None

    @property
    def stats(self) -> TransferStats:
        """Of the transfer."""
        return self._transfer.stats

    def done(self) -> bool:
        """Whether the blocks are here, or never will be."""
        return self._transfer.done()

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Why it has failed, after `take`; the same at every call. REQUIRES: it has ended."""
        self.take(timeout)
        return self._error

    def take(self, timeout: float | None = None) -> None:
        """Caches the tail, if it has come. Only the first call does anything. REQUIRES: it has ended."""
        if self._taken:
            return
        self._error = self._transfer.exception(timeout)
        self._taken = True
        if self._error is not None:
            return
        addrs = self._transfer.addrs
        try:
            self._pool.insert(self._tail.tokens, addrs, self._tail.namespace, free_duplicates=True).close()
        except Error as refused:
            self._error = refused
            self._free()

    def cancel(self) -> bool:
        """It shall end soon."""
        return self._transfer.cancel()

    def drop(self) -> None:
        """Nobody wants it any more. REQUIRES: it has ended."""
        if self._taken:
            return
        self._error = self._transfer.exception(0)
        self._taken = True
        if self._error is None:
            self._free()

    def _free(self) -> None:
        with contextlib.suppress(Error):  # a pool that has lost a worker gives out no blocks any more, either
            self._pool.free(self._transfer.addrs)


def begin_fetch(
    pool: Pool,
    found: _core.PeerMatch,
    groups: Groups,
    group: int,
    namespace: str,
    tokens: npt.NDArray[np.int32],
    timeout_s: float,
    digests: Digests | None = None,
) -> Fetch | None:
    """Begins to fetch what one group needs of a prompt. Raises what `Pool.fetch_with_insert` and `Pool.fetch` raise.

    A group with a window gets its tail alone, unless the blocks before it are here.

    Args:
        pool: Of this engine.
        found: What a connected peer has of the group's whole prompt, and holds: at least as much as `tokens`.
        groups: Of the model.
        group: Which one.
        namespace: Of the request.
        tokens: Of the prompt, in whole blocks.
        timeout_s: Seconds.
        digests: As for `Groups.part`.

    Returns:
        None: the tail is here.
    """
    whole = groups.part(group, namespace, tokens, 0)
    first = groups.first_needed(group, len(tokens) // groups.block_tokens)
    if first and _cached(pool, whole) < first * groups.block_tokens:
        tail = groups.part(group, namespace, tokens, first, digests)
        if _cached(pool, tail) == len(tail.tokens):
            return None
        addrs = found.addrs[first : first + len(tail.tokens) // groups.block_tokens]
        return TailFetch(pool, pool.fetch(found.peer, addrs, medium=DRAM, timeout=timeout_s), tail)
    return pool.fetch_with_insert(found.peer, whole.tokens, namespace=whole.namespace, medium=DRAM, timeout=timeout_s)


def _cached(pool: Pool, part: Named) -> int:
    with pool.match(part.tokens, part.namespace) as hit:
        return hit.tokens
