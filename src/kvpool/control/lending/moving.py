"""Moves blocks of a sequence to creditors and home: copies them, then switches; if that fails nothing has changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool.control.lending.pools import Addresses, Handle, LendingPool, LentSequence
from kvpool.errors import DeadlineExceeded, Error, StateError

__all__ = ["Deadline", "Part", "bring", "give_up", "send"]


class Deadline:
    """When a call of several steps must be done."""

    def __init__(self, timeout_s: float) -> None:
        self._until = time.monotonic() + timeout_s

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


def send(pool: LendingPool, sequence: LentSequence, parts: Sequence[Part], deadline: Deadline) -> None:
    """Sends parts to blocks that were borrowed, and switches to them: all of them or none."""
    left_s = deadline.left("send blocks")
    _wait_for([pool.transfer(part.member, part.old, to=part.new, timeout=left_s) for part in parts])
    _switch(sequence, parts, deadline)


def bring(pool: LendingPool, sequence: LentSequence, part: Part, deadline: Deadline) -> None:
    """Fetches a part into blocks of this pool, and switches to them."""
    _wait_for([pool.fetch(None, part.old, to=part.new, timeout=deadline.left("fetch blocks"))])
    _switch(sequence, [part], deadline)


def give_up(pool: LendingPool, addrs: Addresses) -> None:
    """Frees blocks that no sequence uses, whatever has failed before.

    A creditor that has gone, or recalled them, has them back already.
    """
    with contextlib.suppress(Error):
        pool.free(addrs)


def _wait_for(handles: list[Handle]) -> None:
    """Waits for all, even if one has failed: its blocks may be freed only when nothing is written to them."""
    failures = [failure for failure in [handle.exception() for handle in handles] if failure is not None]
    if failures:
        raise failures[0]


def _switch(sequence: LentSequence, parts: Sequence[Part], deadline: Deadline) -> None:
    switched: list[Part] = []
    try:
        for part in parts:
            was = sequence.replace(part.first, part.new, timeout=deadline.left("switch to the new blocks"))
            if not np.array_equal(was, part.old):
                sequence.replace(part.first, was)
                raise StateError("blocks of the sequence were replaced while they were copied")
            switched.append(part)
    except BaseException:
        for part in switched:
            with contextlib.suppress(Error):
                sequence.replace(part.first, part.old)
        raise
