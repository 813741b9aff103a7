"""Blocks of a sequence that move to a peer, and come home: `KVSequence.offload` and `KVSequence.bring_home`.

C++ defines KVSequence, whose `replace` switches from old blocks to new ones at once. This adds what goes before: room,
and the content. The package adds the two methods when it is imported.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool._core import KVSequence, Pool
from kvpool.errors import ArgumentError, Busy, Error, OutOfBlocks, PeerLost, StateError, Unsupported
from kvpool.types import DRAM

__all__ = ["bring_home", "offload"]

_Addresses: TypeAlias = npt.NDArray[np.uint64]
_Positions: TypeAlias = npt.NDArray[np.intp]

_REFUSALS = (OutOfBlocks, Busy, PeerLost, Unsupported)  # another peer may have room


def offload(
    sequence: KVSequence, blocks: int, to: str | None = None, *, medium: int = DRAM, timeout: float | None = None
) -> _Addresses:
    """Moves the oldest blocks of this pool to a peer, which then computes their part of the attention.

    Borrows blocks there, sends the content, and switches when all of it has arrived; attention goes on meanwhile. The
    block with the newest token never moves. Blocks that the peer must not change, such as cached ones, may move: they
    are copied. Results keep their bits when the blocks are whole leaves: multiples of 1,024 tokens, from such a
    multiple on.

    Args:
        sequence: The sequence itself.
        blocks: How many.
        to: The peer; None: the first connected peer, in random order, that lends so many.
        medium: Where the peer is to have them: kvpool.DRAM, or kvpool.HBM of a pool without GPU.
        timeout: Seconds for each of the steps; None: the setting ``timeout_s``.

    Returns:
        uint64 array with the addresses that the sequence no longer needs: free them. The lent ones in their place,
        which `addrs` has, are freed the same way when the sequence has ended.

    Raises:
        ArgumentError: The pool has fewer blocks of the sequence that may move; or there is no peer.
        OutOfBlocks, Busy, PeerLost: The peer has no room, too much to do, or is gone.
        DeadlineExceeded: A step was not done in time.
        StateError: The sequence is closed, or others changed these blocks meanwhile.
        In all cases the sequence is as before.
    """
    pool, addrs, owners = sequence._pool, sequence.addrs, sequence.instances
    last = max(sequence.tokens - 1, 0) // sequence._block_tokens
    own = np.flatnonzero(owners[: len(addrs)] == 0)
    moving = _some(own[own < last], blocks, "in this pool that may move", first=True)
    peer, lent = _borrow(pool, len(moving), _lenders(pool, to), medium, timeout)
    with _freed_on_error(pool, lent):
        pool.transfer(peer, addrs[moving], to=lent, timeout=timeout).wait()
        return _switch(sequence, moving, addrs[moving], lent, timeout)


def bring_home(sequence: KVSequence, blocks: int, *, medium: int = DRAM, timeout: float | None = None) -> _Addresses:
    """Brings the newest of the blocks that lie with peers into this pool.

    Allocates blocks here, fetches the content, and switches when all of it has arrived; attention goes on meanwhile.

    Args:
        sequence: The sequence itself.
        blocks: How many.
        medium: Where to have them here.
        timeout: Seconds for each of the steps; None: the setting ``timeout_s``.

    Returns:
        uint64 array with the peers' addresses that the sequence no longer needs: free them, which gives them back.

    Raises:
        ArgumentError: Fewer blocks of the sequence lie with peers.
        OutOfBlocks: This pool has no room.
        PeerLost, DeadlineExceeded, Busy: A peer is gone, was too late, or has too much to do.
        StateError: The sequence is closed, or others changed these blocks meanwhile.
        In all cases the sequence is as before.
    """
    pool, owners, addrs = sequence._pool, sequence.instances, sequence.addrs
    moving = _some(np.flatnonzero(owners), blocks, "with peers", first=False)
    home = pool.alloc(len(moving), medium)
    with _freed_on_error(pool, home):
        away = addrs[moving]
        groups = _groups(owners[moving])
        fetches = [pool.fetch(None, away[at], to=home[at], timeout=timeout) for at in groups]
        failures = [failure for failure in [fetch.exception() for fetch in fetches] if failure is not None]
        if failures:
            raise failures[0]
        return _switch(sequence, moving, away, home, timeout)


def _some(positions: _Positions, blocks: int, where: str, *, first: bool) -> _Positions:
    if blocks < 1 or blocks > len(positions):
        message = f"{blocks} blocks: the sequence has {len(positions)} {where}"
        raise ArgumentError(message, blocks=len(positions), requested=blocks)
    return positions[:blocks] if first else positions[-blocks:]


def _lenders(pool: Pool, to: str | None) -> Sequence[str]:
    if to is not None:
        return [to]
    names: list[Any] = [peer["name"] for peer in pool._peers()] if pool._name() is not None else []
    if not names:
        raise ArgumentError("the pool has no peers: connect to one, or name a member of the cluster")
    random.shuffle(names)
    return names


def _borrow(
    pool: Pool, blocks: int, peers: Sequence[str], medium: int, timeout: float | None
) -> tuple[str, _Addresses]:
    for peer in peers[:-1]:
        with contextlib.suppress(*_REFUSALS):
            return peer, pool.alloc(blocks, medium, instance=peer, timeout=timeout)
    return peers[-1], pool.alloc(blocks, medium, instance=peers[-1], timeout=timeout)


@contextlib.contextmanager
def _freed_on_error(pool: Pool, addrs: _Addresses) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(Error):  # a peer that is gone has them back
            pool.free(addrs)
        raise


def _groups(owners: npt.NDArray[np.int64]) -> Iterator[_Positions]:
    for owner in np.unique(owners):
        yield np.flatnonzero(owners == owner)


def _runs(positions: _Positions) -> Iterable[_Positions]:
    """Indices into `positions`, for each run of positions that follow each other."""
    return np.split(np.arange(len(positions)), np.flatnonzero(np.diff(positions) != 1) + 1)


def _switch(
    sequence: KVSequence, positions: _Positions, old: _Addresses, new: _Addresses, timeout: float | None
) -> _Addresses:
    """Puts the new blocks in the place of the old ones: all of them or none."""
    done: list[_Positions] = []
    try:
        for run in _runs(positions):
            was = sequence.replace(int(positions[run[0]]), new[run], timeout=timeout)
            done.append(run)
            if not np.array_equal(was, old[run]):
                sequence.replace(int(positions[run[0]]), was, timeout=timeout)
                done.pop()
                raise StateError("blocks of the sequence were replaced while their content was being copied")
    except BaseException:
        for run in done:
            with contextlib.suppress(Error):
                sequence.replace(int(positions[run[0]]), old[run], timeout=timeout)
        raise
    return old


KVSequence.offload = offload  # type: ignore[method-assign, assignment]
KVSequence.bring_home = bring_home  # type: ignore[method-assign, assignment]
