"""Who borrows from whom in a simulated fleet: the policies of a live one, over rows that are a heartbeat old.

Every member has a ledger that it reads alone. Rows go out at heartbeats, those that moved enough; a refusal corrects a
row until the next. Copies hold up the step of the member that they come from or go to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from kvpool.policy import lending
from kvpool.sim.lending_memory import Memory

__all__ = ["Market", "Rules"]

_FORGIVEN: Final = 10  # heartbeats after which refusals are forgotten, and rows go out however little they moved


@dataclass(frozen=True)
class Rules:
    """How members lend.

    Attributes:
        lend_part: A member lends at most this part of its blocks.
        reserve_part: It keeps this part of them free of loans.
        leaf: Blocks of a leaf, a power of two.
        chunk: Blocks of a prompt that are computed at a time; two chunks are staged while blocks go out.
        payback: Whether debts come home while there is room.
        settle_every: Heartbeats from one settlement of cycles to the next; 0: none.
        settle_least: Blocks below which a cycle is left alone.
        borrowers_lend: Whether a member is asked to lend while it borrows (the paper's Fig 4).
    """

    lend_part: float = 0.9
    reserve_part: float = 0.02
    leaf: int = lending.LEAF_BLOCKS
    chunk: int = 2 * lending.LEAF_BLOCKS
    payback: bool = True
    settle_every: int = 10
    settle_least: int = lending.LEAF_BLOCKS
    borrowers_lend: bool = False


class Market:
    """All members' ledgers, and what they decide.

    Args:
        memories: By member.
        rules: Of all.
        seed: Of the searches.
        copied: Called with member, creditor and blocks of each copy between the two.

    Attributes:
        borrowed: Blocks lent, over all time.
        refusals: Requests that a creditor refused.
        came_home: Blocks that came home by payback.
        settled: Blocks that came home by settlements.
        cycles: Cycles that were settled.
        rows: Rows that went out.
    """

    def __init__(
        self, memories: Mapping[int, Memory], rules: Rules, seed: int, copied: Callable[[int, int, int], None]
    ) -> None:
        self.borrowed = self.refusals = self.came_home = self.settled = self.cycles = self.rows = 0
        self._memories, self._rules, self._copied = memories, rules, copied
        self._seed, self._searches, self._beats = seed, 0, 0
        self._ledgers = {member: lending.Ledger(borrowers_lend=rules.borrowers_lend) for member in memories}
        self._last: dict[int, lending.Row] = {}
        self._publish(everything=True)

    # ---- borrowing

    def place(self, member: int, name: int, blocks: int, keep: int) -> bool:
        """Gives a new sequence its blocks; later ones lie with creditors where they have no room at home.

        They are not written yet, so nothing is copied: chunk after chunk goes out through blocks that are staged.

        Args:
            member: Whose sequence it is.
            name: The sequence's.
            blocks: That it needs.
            keep: Free blocks that stay at home.
        """
        memory = self._memories[member]
        free, leaf, chunk = max(0, memory.free - keep), self._rules.leaf, self._rules.chunk
        plan = lending.plan_prefill(blocks, free, {}, chunk, leaf, leaf)
        if plan.missing:
            lent = self.borrow(member, plan.missing)
            if lent is None:
                return False
            plan = lending.plan_prefill(blocks, free, lent, chunk, leaf, leaf)
            for part in plan.away:
                lent[part.creditor] -= 0 if plan.missing else part.blocks
            self._return(member, lent)
            if plan.missing:
                return False
        memory.grow(name, blocks, [lending.Offload(name, part.first, part.blocks, part.creditor) for part in plan.away])
        memory.stage(name, plan.staging)
        return True

    def make_room(self, member: int, blocks: int) -> bool:
        """Sends blocks to creditors, so that so many become free at home, or up to a leaf more. All or nothing."""
        memory = self._memories[member]
        moves = self._plan(memory, blocks)
        if moves is None:
            return False
        for creditor, copied in memory.move(moves).items():
            if copied:
                self._copied(member, creditor, copied)
        return True

    def _plan(self, memory: Memory, need: int) -> tuple[lending.Offload, ...] | None:
        """Which blocks go where, into room that is lent for exactly these; None if no members lend so much."""
        held = [stored.held() for stored in memory.sequences.values()]
        leaf = self._rules.leaf
        for blocks in dict.fromkeys((-(-need // leaf) * leaf, need)):
            lent = self.borrow(memory.member, blocks)
            if lent is None:
                continue
            moves = lending.plan_offload(held, blocks, lent, leaf, leaf).moves
            for move in moves:
                lent[move.creditor] -= move.blocks
            if sum(move.blocks for move in moves) >= need:
                self._return(memory.member, lent)
                return moves
            for move in moves:
                lent[move.creditor] += move.blocks
            self._return(memory.member, lent)
        return None

    def borrow(self, member: int, blocks: int) -> dict[int, int] | None:
        """Room by creditor: all at one, or else parts of a half, and so on. None, and nothing lent, if it lacks."""
        ledger = self._ledgers[member]
        if sum(ledger.lendable(other) for other in self._memories if other != member) < blocks:
            return None
        lent: dict[int, int] = {}
        size = left = blocks
        while left:
            size = min(size, left)
            creditor = self._ask(member, size)
            if creditor is not None:
                lent[creditor] = lent.get(creditor, 0) + size
                left -= size
            elif size > 1:
                size = 1 << (size - 1).bit_length() - 1
            else:
                self._return(member, lent)
                return None
        self.borrowed += blocks
        return lent

    def _ask(self, member: int, blocks: int) -> int | None:
        ledger = self._ledgers[member]
        self._searches += 1
        search = lending.Search(member, blocks, self._seed + self._searches)
        while proposed := search.propose(ledger):
            for creditor in proposed:
                memory = self._memories[creditor]
                if memory.lend(member, blocks):
                    ledger.correct(creditor, max(0, ledger.lendable(creditor) - blocks))
                    return creditor
                self.refusals += 1
                search.refuse(ledger, creditor, min(memory.can_lend, blocks - 1))
        return None

    def _return(self, member: int, lent: Mapping[int, int]) -> None:
        for creditor, blocks in lent.items():
            if blocks:
                self._memories[creditor].returned(member, blocks)

    # ---- heartbeats

    def beat(self, waiting: bool) -> bool:
        """A heartbeat: debts come home, rows go out, cycles are settled.

        Args:
            waiting: Whether requests wait for memory: then only what creditors want comes home.

        Returns:
            Whether that changed what members know of each other, so that it is worth asking again.
        """
        self._beats += 1
        rows = self.rows
        if self._rules.payback:
            for memory in self._memories.values():
                if memory.debts:
                    self._pay_back(memory, waiting)
        everything = self._beats % _FORGIVEN == 0
        if everything:
            for ledger in self._ledgers.values():
                for member in self._memories:
                    ledger.forgive(member)
        self._publish(everything)
        if self._rules.settle_every and self._beats % self._rules.settle_every == 0:
            self.run_settlement()
        return everything or self.rows != rows

    def _pay_back(self, memory: Memory, waiting: bool) -> None:
        ledger = self._ledgers[memory.member]
        wanted = {creditor: row.wants for creditor in memory.debts if (row := ledger.get(creditor)) and row.wants}
        room = max(0, memory.free - memory.reserve)
        if waiting:
            room = min(room, sum(min(wants, memory.debts[creditor]) for creditor, wants in wanted.items()))
        if room:
            for back in lending.plan_payback(memory.loans(), room, wanted, self._rules.leaf):
                self._come_home(memory, back)
                self.came_home += back.blocks

    def _come_home(self, memory: Memory, back: lending.Payback) -> None:
        memory.come(back)
        self._memories[back.creditor].returned(memory.member, back.blocks)
        self._copied(memory.member, back.creditor, back.blocks)

    def _publish(self, everything: bool) -> None:
        for member, memory in self._memories.items():
            last = self._last.get(member)
            if last is not None and memory.stands_as(last):
                continue
            row = memory.row()
            if last is not None and not lending.worth_publishing(
                last, row, 0.0 if everything else lending.PUBLISHED_PART
            ):
                continue
            self._last[member] = row
            self.rows += 1
            for ledger in self._ledgers.values():
                ledger.take(row)

    # ---- settlement

    def run_settlement(self) -> None:
        """Settles the cycles of the debts as they are, at the members that have the memory for it."""
        debts = {
            (member, creditor): blocks
            for member, memory in self._memories.items()
            for creditor, blocks in memory.debts.items()
        }
        for settlements in lending.settle(debts, self._rules.settle_least):
            for settlement in settlements:
                free = {member: self._memories[member].free for member in settlement.members}
                if max(free.values()) < 1:
                    continue
                self.cycles += 1
                for step in lending.steps(settlement, free, settlement.blocks):
                    self._step(step)

    def _step(self, step: lending.Step) -> None:
        memory = self._memories[step.debtor]
        loans = [loan for loan in memory.loans() if loan.creditor == step.creditor]
        for back in lending.plan_payback(loans, step.blocks, leaf=1):
            self._come_home(memory, back)
            self.settled += back.blocks
