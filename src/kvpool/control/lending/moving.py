"""Moves blocks of a sequence to creditors and home: copies them, then switches; if that fails nothing has changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvpool.control.lending.pools import Addresses, LendingPool, LentSequence
from kvpool.errors import DeadlineExceeded, Error, NotOwner, StaleAddress
from kvpool.waiting.handles import carry_out

__all__ = ["Deadline", "Part", "bring", "give_up", "send"]


class Deadline:
    """When a call of several steps must be done."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

    def within(self, seconds: float) -> Deadline:
        """This one, or that which ends in so many seconds if that is earlier."""
        return min(self, Deadline(seconds), key=lambda each: each._until)

    def left(self, what: str) -> float:
        """The seconds that are left. Raises DeadlineExceeded if none are."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"lending: there was no time left to {what}")
        return left


@dataclass(frozen=True)
class Part:
    """Blocks of a sequence from `first` on: where they are, where they are to be, and the member at the other end."""

    first: int
    old: Addresses
    new: Addresses
    member: str


def send(pool: LendingPool, sequence: LentSequence, parts: Sequence[Part], set_backs: int, deadline: Deadline) -> None:
    """Sends parts to blocks that were borrowed, and switches to them: all of them or none.

    `set_backs`: of the sequence, before the parts were made.
    """
    left_s = deadline.left("send blocks")
    carry_out([partial(pool.transfer, part.member, part.old, to=part.new, timeout=left_s) for part in parts])
    _switch(sequence, parts, set_backs, deadline)


def bring(pool: LendingPool, sequence: LentSequence, part: Part, set_backs: int, deadline: Deadline) -> None:
    """Fetches a part into blocks of this pool, and switches to them."""
    left_s = deadline.left("fetch blocks")
    carry_out([partial(pool.fetch, None, part.old, to=part.new, timeout=left_s)])
    _switch(sequence, [part], set_backs, deadline)


def give_up(pool: LendingPool, addrs: Addresses) -> None:
    """Frees blocks that no sequence uses, whatever has failed before; those that are not ours any more are left out.

    A creditor that has gone, or recalled them, has them back already.
    """
    try:
        pool.free(addrs)
    except (StaleAddress, NotOwner):  # of some: then none was freed
        if len(addrs) > 1:
            give_up(pool, addrs[: len(addrs) // 2])
            give_up(pool, addrs[len(addrs) // 2 :])
    except Error:
        pass


def _switch(sequence: LentSequence, parts: Sequence[Part], set_backs: int, deadline: Deadline) -> None:
    ordered = sorted(parts, key=lambda part: part.first)
    blocks = [part.first + i for part in ordered for i in range(len(part.old))]
    old = np.concatenate([part.old for part in ordered])
    new = np.concatenate([part.new for part in ordered])
    sequence._switch(blocks, old, new, set_backs, deadline.left("switch to the new blocks"))
