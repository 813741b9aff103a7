"""Sends blocks of sequences to creditors, and makes room for prompts: all that was asked for, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvpool.control.lending.creditors import Creditors
from kvpool.control.lending.members import LendingMembers
from kvpool.control.lending.moving import Deadline, Part, give_up, send
from kvpool.control.lending.pools import Addresses, LendingPool, LentSequence, counts_of
from kvpool.control.lending.sequences import Borrowing
from kvpool.errors import ArgumentError, OutOfBlocks
from kvpool.policy import lending as policy
from kvpool.types import Medium

__all__ = ["Outgoing", "PrefillRoom"]


@dataclass(frozen=True)
class PrefillRoom:
    """The blocks for a prompt.

    Attributes:
        plan: Which of its blocks stay.
        home: Here: for the blocks that stay, then for chunks on their way.
        lent: By creditor.
        names: Of the creditors.
    """

    plan: policy.PrefillPlan
    home: Addresses
    lent: dict[int, Addresses]
    names: dict[int, str]


class Outgoing:
    """What goes to creditors. One thread at a time may call.

    Args:
        pool: That borrows.
        medium: Of the blocks.
        leaf: Blocks of a leaf.
        tail: So many last blocks of each sequence stay.
        borrowing: Is told of sequences that have borrowed.
        creditors: Are asked.
        members: Their names.
        lock: Of the members.
    """

    def __init__(
        self,
        pool: LendingPool,
        medium: Medium,
        leaf: int,
        tail: int,
        borrowing: Borrowing,
        creditors: Creditors,
        members: LendingMembers,
        lock: threading.Lock,
    ) -> None:
        self._pool = pool
        self._medium = medium
        self._leaf = leaf
        self._tail = tail
        self._borrowing = borrowing
        self._creditors = creditors
        self._members = members
        self._lock = lock

    def send(self, sequence: LentSequence, blocks: int, deadline: Deadline) -> int:
        """Sends the oldest blocks of a sequence, and frees them here; how many. Raises what `Lending.offload` does."""
        set_backs = sequence._set_backs
        held = self._borrowing.held(sequence)
        able = policy.plan_offload(
            [held], blocks, {0: counts_of(self._pool, self._medium).capacity}, self._leaf, self._tail
        )
        if able.missing:
            has = blocks - able.missing
            raise ArgumentError(f"offload: {blocks} blocks; {has} lie here and may go", requested=blocks, blocks=has)
        lent = self._creditors.borrow(sum(move.blocks for move in able.moves), deadline)
        try:
            room = {creditor: len(addrs) for creditor, addrs in lent.items()}
            plan = policy.plan_offload([held], blocks, room, self._leaf, self._tail)
            if plan.missing:
                raise OutOfBlocks(
                    "offload: what the members lend is in too small parts",
                    requested=blocks,
                    free=blocks - plan.missing,
                )
            parts = self._parts(sequence, plan, lent)
            send(self._pool, sequence, parts, set_backs, deadline)
        except BaseException:
            self._give_up(lent)
            raise
        gone = dict.fromkeys(lent, 0)
        for move in plan.moves:
            gone[move.creditor] += move.blocks
        for creditor, addrs in lent.items():
            if gone[creditor] < len(addrs):  # a plan for the real rooms may need fewer
                give_up(self._pool, addrs[gone[creditor] :])
        self._borrowing.note(sequence)
        self._pool.free(np.concatenate([part.old for part in parts]))
        return sum(gone.values())

    def room(self, blocks: int, chunk: int, deadline: Deadline) -> PrefillRoom:
        """Blocks for a prompt, and for two chunks that are on their way. Raises what `Lending.prefill` does."""
        stats = counts_of(self._pool, self._medium)
        free = stats.free + stats.evictable

        def plan(lent: Mapping[int, int]) -> policy.PrefillPlan:
            made = policy.plan_prefill(blocks, free, lent, chunk, self._leaf, self._tail)
            if made.missing:
                raise OutOfBlocks(
                    f"prefill: {made.missing} blocks too few are free here and at the members, for {blocks} of the "
                    f"prompt and {made.staging} for chunks on their way",
                    requested=blocks,
                    free=max(0, blocks - made.missing),
                )
            return made

        lent = self._creditors.borrow(blocks - plan({0: blocks}).home, deadline)
        try:
            made = plan({creditor: len(addrs) for creditor, addrs in lent.items()})
            with self._lock:
                names = {creditor: self._members.name(creditor) for creditor in lent}
            left_s = deadline.left("make room")
            home = self._pool.alloc(made.home + made.staging, self._medium, True, timeout=left_s)
        except BaseException:
            self._give_up(lent)
            raise
        return PrefillRoom(made, home, lent, names)

    def _parts(self, sequence: LentSequence, plan: policy.OffloadPlan, lent: dict[int, Addresses]) -> list[Part]:
        addrs, used = sequence.addrs, dict.fromkeys(lent, 0)
        parts = []
        for move in plan.moves:
            begin = used[move.creditor]
            used[move.creditor] = end = begin + move.blocks
            with self._lock:
                name = self._members.name(move.creditor)
            parts.append(
                Part(move.first, addrs[move.first : move.first + move.blocks], lent[move.creditor][begin:end], name)
            )
        return parts

    def _give_up(self, lent: dict[int, Addresses]) -> None:
        for addrs in lent.values():
            give_up(self._pool, addrs)
