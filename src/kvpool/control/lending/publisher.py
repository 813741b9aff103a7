"""Publishes what a member has free, lends and owes, and what it says of settlements."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from kvpool.cluster import Registration
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.pools import LendingPool, counts_of
from kvpool.control.lending.records import row_json, said_json, this_host
from kvpool.errors import ClosedError, Error, StateError
from kvpool.policy import lending as policy
from kvpool.types import DRAM, HBM, Medium

__all__ = ["Publisher", "publish_until"]

_log = logging.getLogger("kvpool.lending")


class Publisher:
    """What one member publishes. Any thread may call.

    Attributes:
        row: That was published last.

    Args:
        pool: Whose blocks.
        registration: Of the pool.
        medium: That it lends and borrows.
        reserve: So many free blocks are not offered.
        members: What others publish.
        settler: Its part in settlements.
        lock: Of the members, the settler and the row; held briefly.
        stop: Set when nothing is to be published any more.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        pool: LendingPool,
        registration: Registration,
        medium: Medium,
        reserve: int,
        members: LendingMembers,
        settler: policy.Settler,
        lock: threading.Lock,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.row: policy.Row | None = None
        self._pool = pool
        self._registration = registration
        self._medium = medium
        self._reserve = reserve
        self._members = members
        self._settler = settler
        self._lock = lock
        self._stop = stop
        self._clock = clock
        self._turn_at: float | None = None  # the latest turn in settlements; None: it takes no part in them
        self._version = time.monotonic_ns()  # goes on where an earlier one of this process ended

    def publish(self) -> bool:
        """Publishes the row if it has moved enough, or others wait for what is said. Whether it did.

        Raises:
            ClosedError: This is closed, or the pool.
        """
        with self._lock:
            self.check_open()
            self._members.apply()
            self._cease()
            row = self._row()
            if not self._settler.news and not policy.worth_publishing(self.row, row):
                return False
            said = said_json(self._settler.said) if self._turn_at is not None else {}
            self._registration.publish(lending=row_json(row) | said)
            self._settler.news = False
            self.row = row
            self._version = row.version
            self._members.ledger.take(row)
            return True

    def note_turn(self) -> None:
        """Notes that the engine takes a turn in settlements, with the lock held: it takes part from now on."""
        self._settler.news |= self._turn_at is None
        self._turn_at = self._clock()

    def tell(self) -> None:
        """Publishes after blocks have moved. They have, even if this fails."""
        try:
            self.publish()
        except Error as error:
            _log.info("the row was not published: %s", error)

    def close(self) -> bool:
        """Publishes nothing more. Whether it was open."""
        with self._lock:
            if self._stop.is_set():
                return False
            self._stop.set()
            with contextlib.suppress(Error):  # the member has left
                self._registration.publish(lending={})
            return True

    def check_open(self) -> None:
        """Raises ClosedError if this is closed, or the pool."""
        if self._stop.is_set():
            raise ClosedError("lending was closed")
        if self._pool.closed:
            raise ClosedError("the pool is closed")

    def stats(self) -> Any:
        """Of the medium: its capacity, and how many blocks are free and lent."""
        return counts_of(self._pool, self._medium)

    def room(self) -> int:
        """Free blocks beyond the reserve."""
        free: int = self.stats().free
        return max(0, free - self._reserve)

    def _cease(self) -> None:
        """An engine that takes no turns any more takes no part: others would wait for it again and again."""
        if self._turn_at is not None and self._clock() >= self._turn_at + self._settler.freeze_s:
            self._turn_at = None
            self._settler.news = True

    def _row(self) -> policy.Row:
        stats, record = self.stats(), self._registration.record
        lend_max = stats.capacity
        if (limit := self._pool.peers.lend_max) is not None:  # of all media
            elsewhere = counts_of(self._pool, DRAM if self._medium == HBM else HBM).lent
            lend_max = max(0, min(limit - elsewhere, lend_max))
        debts = {
            peer.instance: peer.borrowed_blocks for peer in self._pool.peers if peer.instance and peer.borrowed_blocks
        }
        return policy.Row(
            record.instance,
            record.term,
            self._version + 1,
            this_host(),
            stats.capacity,
            {self._medium: max(0, stats.free - self._reserve)},
            lend_max,
            stats.lent,
            debts,
            min(stats.lent, max(0, stats.lent - lend_max, self._reserve - stats.free)),
        )


def publish_until(stop: threading.Event, heartbeat_s: float, publish: weakref.WeakMethod[Callable[[], bool]]) -> None:
    """Publishes once a heartbeat, until it is to stop or its owner is gone. For a thread."""
    while not stop.wait(heartbeat_s):
        strong = publish()
        if strong is None:
            return
        try:
            strong()
        except ClosedError:
            return
        except StateError as error:  # another incarnation has the name
            _log.info("the row was not published: %s", error)
        except Exception:
            _log.exception("publishing what this member lends has failed; it is tried again")
        del strong
