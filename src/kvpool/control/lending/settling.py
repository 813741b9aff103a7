"""Settles cycles of debts with other members: this member's part, from what they say to blocks that come home."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from kvpool.control.lending.home import Homecoming
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.moving import Deadline
from kvpool.control.lending.publisher import Publisher
from kvpool.control.lending.sequences import Borrowing
from kvpool.policy import lending as policy

__all__ = ["Settling"]

_log = logging.getLogger("kvpool.lending")

_PART_OF_FREEZE: Final = 0.1  # three heartbeats: so long a stopped creditor holds up other calls that move blocks
_PART_S_MIN: Final = 1.0  # a busy machine takes as long for a leaf, whatever the heartbeat is


class Settling:
    """Takes turns in settlements. One thread at a time calls `turn`; any may ask what is frozen.

    Args:
        settler: Decides.
        members: What others publish.
        own: Publishes what this member says, and knows its room.
        borrowing: The sequences of this member.
        home: Brings their blocks home.
        leaf: Blocks of a leaf.
        lock: Of the members and the settler.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        settler: policy.Settler,
        members: LendingMembers,
        own: Publisher,
        borrowing: Borrowing,
        home: Homecoming,
        leaf: int,
        lock: threading.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settler = settler
        self._members = members
        self._own = own
        self._borrowing = borrowing
        self._home = home
        self._leaf = leaf
        self._lock = lock
        self._clock = clock
        self._part_s = max(_PART_S_MIN, _PART_OF_FREEZE * settler.freeze_s)
        self._recalls = 0  # that wait for this member's turn

    def turn(self, deadline: Deadline) -> int:
        """Answers and calls, and brings home what is due and has room; how many blocks have come home.

        A creditor that is stopped is waited for until the deadline, for three heartbeats, or a second if that is more,
        and not beyond the freeze.
        """
        with self._lock:
            self._own.note_turn()
            self._members.apply()
            debts = self._settler.look(self._clock())
        found = () if debts is None else self._settler.search(debts)  # without the lock: it may take long
        with self._lock:
            self._members.apply()
            now = self._clock()
            due = self._settler.turn(now, self._able, self._own.room, found)
            for note in self._settler.notes():
                _log.info("%s", note)
        if due is None:
            return 0
        deadline = deadline.within(due.expires - now)
        return self._home.bring(self._parts(due), deadline, lambda n: self._note(due, n), self._part_s)

    @contextlib.contextmanager
    def recall(self) -> Iterator[None]:
        """While this is open a turn begins with no further part: a recall waits only for that which is under way."""
        with self._lock:
            self._recalls += 1
        try:
            yield
        finally:
            with self._lock:
                self._recalls -= 1

    @property
    def has_news(self) -> bool:
        """Whether others wait for what this member says now."""
        return self._settler.news

    def payable(self, loans: Iterable[policy.Loan]) -> tuple[policy.Loan, ...]:
        """What may be paid back otherwise now: the loans without blocks that are frozen."""
        found = list(loans)
        with self._lock:
            now = self._clock()
            frozen = {creditor: self._settler.frozen(creditor, now) for creditor in {loan.creditor for loan in found}}
        return policy.payable(found, frozen)

    def room(self) -> int:
        """Free blocks beyond the reserve that no round needs now."""
        with self._lock:
            due = self._settler.due(self._clock())
        return max(0, self._own.room() - (0 if due is None else due.blocks))

    def _able(self, creditor: int) -> int:
        return sum(loan.blocks for loan in self._borrowing.loans() if loan.creditor == creditor)

    def _parts(self, due: policy.Due) -> Iterator[policy.Payback]:
        """What comes home of that which is due, as long as its freeze counts and its coordinator calls."""
        portion = due.portion(self._own.room())
        for leaf in (self._leaf, 1):  # a loan may end within a leaf: the room for the rest of a unit is used up, too
            loans = [loan for loan in self._borrowing.loans() if loan.creditor == due.creditor]
            for part in self._leaves(policy.plan_payback(loans, portion, leaf=leaf)):
                with self._lock:
                    self._members.apply()
                    now_due = None if self._recalls else self._settler.due(self._clock())
                if now_due is None or (now_due.coordinator, now_due.key) != (due.coordinator, due.key):
                    return
                portion -= part.blocks
                yield part

    def _leaves(self, plan: Iterable[policy.Payback]) -> Iterator[policy.Payback]:
        """The parts, the last blocks first, and none longer than a leaf: none takes long."""
        for part in plan:
            end = part.first + part.blocks
            while end > part.first:
                first = max(part.first, (end - 1) // self._leaf * self._leaf)
                yield replace(part, first=first, blocks=end - first)
                end = first

    def _note(self, due: policy.Due, blocks: int) -> None:
        with self._lock:
            self._settler.brought(due, blocks)
