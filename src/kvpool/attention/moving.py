"""Blocks of a sequence that move to a peer, and come home: `KVSequence.offload` and `KVSequence.bring_home`.

C++ defines KVSequence, which switches from old blocks to new ones at once. This adds what goes before: room, and the
content. The package adds the two methods when it is imported.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool._core import KVSequence, Pool, Transfer
from kvpool.errors import ArgumentError, Busy, DeadlineExceeded, Error, OutOfBlocks, PeerLost, Unsupported
from kvpool.types import DRAM, MediumChoice
from kvpool.waiting.handles import carry_out

__all__ = ["bring_home", "offload"]

_Addresses: TypeAlias = npt.NDArray[np.uint64]
_Blocks: TypeAlias = npt.NDArray[np.intp]

_REFUSALS = (OutOfBlocks, Busy, PeerLost, Unsupported, DeadlineExceeded)  # another peer may have room


def offload(
    sequence: KVSequence,
    blocks: int,
    to: str | None = None,
    *,
    medium: MediumChoice = DRAM,
    timeout: float | None = None,
) -> _Addresses:
    """Moves the oldest blocks of this pool to a peer, which then computes their part of the attention.

    Borrows blocks there, sends the content, and switches when all of it has arrived; attention goes on meanwhile. The
    block with the newest token never moves. Blocks that the peer must not change, such as cached ones, may move: they
    are copied. Results keep their bits when the blocks are whole leaves: multiples of 1,024 tokens, from such a
    multiple on.

    Args:
        sequence: The sequence itself.
        blocks: How many.
        to: The peer; None: the first connected peer, in random order, that takes so many.
        medium: Where the peer is to have them: kvpool.DRAM, or kvpool.HBM.
        timeout: Seconds for each of the steps; None: the setting ``timeout_s``.

    Returns:
        uint64 array with the addresses that the sequence no longer needs: free them. The lent ones in their place,
        which `addrs` has, are freed the same way when the sequence has ended.

    Raises:
        ArgumentError: The pool has fewer blocks of the sequence that may move; or there is no peer.
        OutOfBlocks, Busy, PeerLost: The peer has no room, too much to do, or is gone.
        Unsupported: The peer computes no attention for others.
        DeadlineExceeded: A step was not done in time.
        StateError: The sequence is closed; or the blocks were replaced meanwhile, or tokens in them were taken back.
        In all cases the sequence is as before.
    """
    pool, set_backs = sequence._pool, sequence._set_backs
    addrs, owners = sequence.addrs, sequence.instances
    last = max(sequence.tokens - 1, 0) // sequence._block_tokens
    own = np.flatnonzero(owners[: len(addrs)] == 0)
    moving = _some(own[own < last], blocks, "in this pool that may move", first=True)
    old = addrs[moving]
    for peer in _takers(pool, to):
        with contextlib.suppress(*_REFUSALS) if peer.may_fail else contextlib.nullcontext():
            _send(sequence, peer.name, moving, old, set_backs, medium, timeout)
            return old
    raise AssertionError("the last peer either takes the blocks or says why not")


def _send(
    sequence: KVSequence,
    peer: str,
    moving: _Blocks,
    old: _Addresses,
    set_backs: int,
    medium: MediumChoice,
    timeout: float | None,
) -> None:
    pool = sequence._pool
    lent = pool.alloc(len(moving), medium, instance=peer, timeout=timeout)
    try:
        carry_out([partial(pool.transfer, peer, old, to=lent, timeout=timeout)])
        sequence._switch(moving.tolist(), old, lent, set_backs, timeout)
    except BaseException:
        with contextlib.suppress(Error):  # a peer that is gone has its blocks back
            pool.free(lent)
        raise


def bring_home(
    sequence: KVSequence, blocks: int, *, medium: MediumChoice = DRAM, timeout: float | None = None
) -> _Addresses:
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
        StateError: The sequence is closed, or the blocks were replaced meanwhile.
        In all cases the sequence is as before.
    """
    pool, set_backs = sequence._pool, sequence._set_backs
    owners, addrs = sequence.instances, sequence.addrs
    moving = _some(np.flatnonzero(owners), blocks, "with peers", first=False)
    old, owners = addrs[moving], owners[moving]
    groups = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
    fetches: list[Transfer] = []  # begun; one that fails frees its blocks itself

    def fetch(group: _Blocks) -> Transfer:
        fetches.append(pool.fetch(None, old[group], medium=medium, timeout=timeout))
        return fetches[-1]

    try:
        carry_out([partial(fetch, group) for group in groups])
        new = np.empty_like(old)
        for group, fetched in zip(groups, fetches, strict=True):
            new[group] = fetched.addrs
        sequence._switch(moving.tolist(), old, new, set_backs, timeout)
    except BaseException:
        for fetched in fetches:
            if fetched.exception() is None:
                pool.free(fetched.addrs)
        raise
    return old


def _some(positions: _Blocks, blocks: int, where: str, *, first: bool) -> _Blocks:
    if blocks < 1 or blocks > len(positions):
        message = f"{blocks} blocks: the sequence has {len(positions)} {where}"
        raise ArgumentError(message, blocks=len(positions), requested=blocks)
    return positions[:blocks] if first else positions[-blocks:]


class _Taker:
    def __init__(self, name: str, *, may_fail: bool) -> None:
        self.name = name
        self.may_fail = may_fail  # others come behind it


def _takers(pool: Pool, to: str | None) -> Iterator[_Taker]:
    names: Sequence[Any] = [to]
    if to is None:
        names = [peer["name"] for peer in pool._peers()] if pool._name() is not None else []
        if not names:
            raise ArgumentError("the pool has no peers: connect to one, or name a member of the cluster")
        random.shuffle(names)
    for i, name in enumerate(names, 1):
        yield _Taker(name, may_fail=i < len(names))


KVSequence.offload = offload  # type: ignore[method-assign, assignment]
KVSequence.bring_home = bring_home  # type: ignore[method-assign, assignment]
