"""How members settle cycles of debts together, by nothing but what each says in its own record.

A coordinator calls; each member of the cycle answers. When all have agreed, rounds follow, in each of which every
member brings some blocks home. docs/internals/lending.md says why each of them may be lost at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvpool.policy.fields import count_of
from kvpool.policy.lending.coordinator import Coordinator, SettlementRules
from kvpool.policy.lending.freeze import Freeze, Freezes
from kvpool.policy.lending.ledger import Debts, Ledger
from kvpool.policy.lending.messages import ANSWERS_MAX, Answer, Call, Said
from kvpool.policy.lending.settle import Settlement

__all__ = ["Due", "Settler"]


@dataclass(frozen=True)
class Due:
    """So many blocks are to come home from a creditor now, as far as there is room.

    Attributes:
        creditor: Has them.
        blocks: How many.
        coordinator: Of the cycle.
        key: Of its call.
        unit: Of its call.
        expires: When the freeze ends, on the clock of this member.
    """

    creditor: int
    blocks: int
    coordinator: int
    key: tuple[int, int]
    unit: int
    expires: float

    def portion(self, room: int) -> int:
        """How many of the blocks come home into so much room: all, or as many whole units as there is room for."""
        return self.blocks if room >= self.blocks else room - room % self.unit


class Settler:
    """One member's part in settlements: it answers coordinators, and coordinates where its id is the smallest.

    The caller passes on what other members say (`hear`), takes a `turn` now and then, moves what is due, says what has
    come home (`brought`), and publishes `said` when there is `news`. Freezes end without a turn.

    Not thread-safe.

    Attributes:
        ledger: Of this member. The caller keeps it.
        news: Whether another member waits for what this one says now. The caller clears it.
        freeze_s: Seconds for which its freezes count: a member that takes no turn for as long has ceased to take part.

    Args:
        member: This member.
        ledger: Its ledger.
        rules: Of its settlements.
        number: Above the numbers of all calls that this member has made in its term.
        seed: Of the dice by which two coordinators get out of each other's way.
    """

    def __init__(self, member: int, ledger: Ledger, rules: SettlementRules, *, number: int = 0, seed: int = 0) -> None:
        self.ledger = ledger
        self.news = False
        self.freeze_s = rules.freeze_s
        self._member = member
        self._coordinator = Coordinator(member, ledger, rules, number, seed)
        self._freezes = Freezes(member)
        self._said: dict[int, Said] = {}  # by members that take part
        self._calls: dict[int, Call] = {}  # those of cycles that this member is on, by coordinator
        self._answers: dict[int, Answer] = {}  # by coordinator

    def hear(self, member: int, said: Said | None) -> None:
        """Takes what another member says now; None: it takes no part, or has left."""
        if member == self._member:
            return
        self._calls.pop(member, None)
        if said is None:
            self._said.pop(member, None)
        else:
            self._said[member] = said
            call = said.call
            if call is not None and call.settlement.coordinator == member and self._member in call.settlement.members:
                self._calls[member] = call
        self._forget_old(member, self._calls.get(member))

    @property
    def said(self) -> Said:
        """What this member says."""
        return Said(self._coordinator.call, self._answers)

    def notes(self) -> Iterator[str]:
        """What has happened since the last time, for a log."""
        notes, self._coordinator.notes = self._coordinator.notes, []
        yield from notes

    def look(self, now: float) -> Debts | None:
        """The debts in which cycles are to be looked for now, for `search`; None if none are."""
        self._said[self._member] = self.said
        return None if self._freezes.current(self.ledger, now) is not None else self._coordinator.look(self._said, now)

    def search(self, debts: Debts) -> list[list[Settlement]]:
        """The settlements of the debts, for `turn`. It takes long if they are many; any thread may call it."""
        return self._coordinator.search(debts)

    def turn(
        self,
        now: float,
        able: Callable[[int], int],
        room: Callable[[], int],
        found: Iterable[Iterable[Settlement]] | None = None,
    ) -> Due | None:
        """Does what is to be done by what all members say now.

        Args:
            now: On this member's clock.
            able: How many blocks this member can bring home from a creditor, if it has room.
            room: How many free blocks it has for them.
            found: What `search` has found in what `look` gave; None: both are done here.

        Returns:
            What is due now.
        """
        self._said[self._member] = self.said
        self.news |= self._coordinator.advance(self._said, now)
        self._forget_old(self._member, self._coordinator.call)
        if self._freezes.current(self.ledger, now) is None:
            if found is None:
                debts = self.look(now)
                found = () if debts is None else self.search(debts)
            self.news |= self._coordinator.propose(found, self._said, now)
        calls = self._all_calls()
        for coordinator in sorted(calls):
            if coordinator in self._answers:
                self._check(coordinator, calls[coordinator], able, now)
            elif len(self._answers) < ANSWERS_MAX:
                self._answers[coordinator] = self._answer(calls[coordinator], able, room, now)
                self.news = True
        return self.due(now)

    def due(self, now: float) -> Due | None:
        """What is to come home now: nothing without a freeze that counts."""
        held = self._freezes.current(self.ledger, now)
        if held is None:
            return None
        coordinator = held.settlement.coordinator
        call, answer = self._all_calls().get(coordinator), self._answers.get(coordinator)
        if call is None or answer is None or not call.key == answer.key == (held.terms[0], held.number):
            return None
        if answer.state != "agreed" or answer.home >= call.due:
            return None
        return Due(self._creditor(call), call.due - answer.home, coordinator, call.key, call.unit, held.expires)

    def brought(self, due: Due, blocks: int) -> None:
        """Notes that so many of the blocks that were due have come home."""
        count_of(blocks, "the blocks that came home", 0)
        answer = self._answers.get(due.coordinator)
        if answer is None or answer.key != due.key:
            return
        self._answers[due.coordinator] = replace(answer, home=answer.home + blocks)
        self._freezes.brought(due.coordinator, due.key[1], blocks)
        call = self._all_calls().get(due.coordinator)
        is_home = call is not None and call.key == due.key and answer.home + blocks >= call.due
        self.news |= is_home and due.coordinator != self._member

    def frozen(self, creditor: int, now: float) -> int:
        """How many blocks of this member's debt to a creditor come home in no other way now."""
        return self._freezes.frozen(self._member, creditor, self.ledger, now)

    def _all_calls(self) -> dict[int, Call]:
        own = self._coordinator.call
        return self._calls if own is None else self._calls | {self._member: own}

    def _forget_old(self, coordinator: int, call: Call | None) -> None:
        """Ends the freeze of the coordinator's call that was answered, and its answer, when that call has ended."""
        answer = self._answers.get(coordinator)
        if answer is not None and (call is None or call.key != answer.key):
            self._freezes.lift(coordinator, answer.number)
            del self._answers[coordinator]

    def _answer(self, call: Call, able: Callable[[int], int], room: Callable[[], int], now: float) -> Answer:
        if call.due:  # an earlier one of this member has agreed: what it brought home is not known here
            return Answer(*call.key, "refused")
        freeze = Freeze(call.settlement, call.terms, call.number, now + call.seconds)
        if not self._freezes.agree(freeze, self.ledger, now):
            return Answer(*call.key, "refused")
        return Answer(*call.key, "agreed", able(self._creditor(call)), room())

    def _check(self, coordinator: int, call: Call, able: Callable[[int], int], now: float) -> None:
        """Ends the freeze of a call that this member has agreed to, when it is void or there is nothing to bring."""
        answer = self._answers[coordinator]
        if answer.state != "agreed" or answer.home >= call.settlement.blocks:
            return
        held = self._freezes.current(self.ledger, now)
        is_held = held is not None and held.settlement.coordinator == coordinator
        if is_held and (answer.home >= call.due or able(self._creditor(call))):
            return
        self._freezes.lift(coordinator, call.number)
        self._answers[coordinator] = replace(answer, state="ended")
        self.news = True

    def _creditor(self, call: Call) -> int:
        return dict(call.settlement.debts)[self._member]
