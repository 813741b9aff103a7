"""Borrows blocks: asks members that have room until enough are lent."""

from __future__ import annotations

import logging
import threading
from typing import Final

import numpy as np

from kvpool.cluster import Registration
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.moving import Deadline, give_up
from kvpool.control.lending.pools import Addresses, LendingPool
from kvpool.errors import Busy, DeadlineExceeded, Error, OutOfBlocks, PeerLost, Unsupported
from kvpool.policy import lending as policy
from kvpool.types import Medium

__all__ = ["Creditors"]

_log = logging.getLogger("kvpool.lending")

_REFUSALS: Final = (OutOfBlocks, Busy, PeerLost, Unsupported, DeadlineExceeded)


class Creditors:
    """Borrows for one pool. One thread at a time may call.

    Args:
        pool: That borrows.
        registration: Of the pool.
        medium: That creditors lend.
        members: Their rows.
        lock: Of the members.
    """

    def __init__(
        self,
        pool: LendingPool,
        registration: Registration,
        medium: Medium,
        members: LendingMembers,
        lock: threading.Lock,
    ) -> None:
        self._pool = pool
        self._instance = registration.instance
        self._medium = medium
        self._members = members
        self._lock = lock
        self._seed = registration.record.incarnation  # differs from member to member: they draw different creditors
        self._searches = 0

    def borrow(self, blocks: int, deadline: Deadline) -> dict[int, Addresses]:
        """Blocks by creditor: all from one, or else parts of a half, and so on. All of them or none."""
        lent: dict[int, Addresses] = {}
        size, left = blocks, blocks
        try:
            while left:
                size = min(size, left)
                found = self._ask(size, deadline)
                if found is not None:
                    creditor, addrs = found
                    lent[creditor] = np.concatenate([lent[creditor], addrs]) if creditor in lent else addrs
                    left -= size
                elif size > 1:
                    size = 1 << (size - 1).bit_length() - 1  # parts of a leaf are powers of two
                else:
                    raise OutOfBlocks(
                        f"the members lend {blocks - left} of {blocks} blocks",
                        requested=blocks,
                        free=blocks - left,
                    )
        except BaseException:
            for addrs in lent.values():
                give_up(self._pool, addrs)
            raise
        return lent

    def _ask(self, blocks: int, deadline: Deadline) -> tuple[int, Addresses] | None:
        """A creditor that lends so many, and its blocks; None if no member does."""
        self._searches += 1
        search = policy.Search(self._instance, blocks, self._seed + self._searches)
        while True:
            with self._lock:
                self._members.apply()
                proposed = search.propose(self._members.ledger, self._members.no_creditors())
            if not proposed:
                return None
            for creditor in proposed:
                left_s = deadline.left("borrow blocks")
                try:
                    with self._lock:
                        name = self._members.name(creditor)
                    addrs = self._pool.alloc(blocks, self._medium, False, instance=name, timeout=left_s)
                except _REFUSALS as error:
                    _log.info("member %d lends no %d blocks: %s", creditor, blocks, error)
                    with self._lock:
                        lendable = _lendable(error, blocks)
                        search.refuse(self._members.ledger, creditor, lendable)
                        self._members.correct(creditor, lendable)
                else:
                    with self._lock:
                        self._members.correct(creditor, max(0, self._members.ledger.lendable(creditor) - blocks))
                    return creditor, addrs


def _lendable(error: Error, blocks: int) -> int:
    """What a refusal says that the member can lend: less than it was asked for."""
    free = getattr(error, "free", 0) if isinstance(error, OutOfBlocks | Busy) else 0
    return min(max(0, free or 0), blocks - 1)
