"""Brings blocks of lent sequences home, part by part: what has come home stays, whatever happens to the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvpool.control.lending.moving import Deadline, Part, bring, give_up
from kvpool.control.lending.pools import LendingPool
from kvpool.control.lending.sequences import Borrowing
from kvpool.errors import ClosedError, DeadlineExceeded, Error, OutOfBlocks
from kvpool.policy import lending as policy
from kvpool.types import Medium

__all__ = ["Homecoming"]

_log = logging.getLogger("kvpool.lending")


class Homecoming:
    """Carries out plans of what comes home. One thread at a time may call.

    Args:
        pool: Whose sequences.
        medium: Where the blocks come to.
        borrowing: The sequences.
    """

    def __init__(self, pool: LendingPool, medium: Medium, borrowing: Borrowing) -> None:
        self._pool = pool
        self._medium = medium
        self._borrowing = borrowing

    def bring(
        self,
        plan: Iterable[policy.Payback],
        deadline: Deadline,
        note: Callable[[int], object] | None = None,
        part_s: float | None = None,
    ) -> int:
        """How many blocks have come home; what a creditor does not give up now stays there.

        `note`: is told of each part that has come home, at once. `part_s`: at most so long a part takes.
        """
        home = 0
        for part in plan:
            try:
                self._bring(part, deadline if part_s is None else deadline.within(part_s))
            except (OutOfBlocks, DeadlineExceeded):  # others took the room, or there is no time for more
                break
            except ClosedError:
                raise
            except Error as error:
                _log.info("%d blocks stay with member %d: %s", part.blocks, part.creditor, error)
            else:
                home += part.blocks
                if note is not None:
                    note(part.blocks)
        return home

    def _bring(self, plan: policy.Payback, deadline: Deadline) -> None:
        sequence = self._borrowing.sequence(plan.sequence)
        set_backs = sequence._set_backs
        old = sequence.addrs[plan.first : plan.first + plan.blocks]
        home = self._pool.alloc(plan.blocks, self._medium, False, timeout=deadline.left("bring blocks home"))
        try:
            bring(self._pool, sequence, Part(plan.first, old, home, ""), set_backs, deadline)
        except BaseException:
            give_up(self._pool, home)
            raise
        give_up(self._pool, old)
