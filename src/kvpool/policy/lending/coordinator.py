"""A coordinator of settlements: asks the members of a cycle for a freeze, and calls the rounds.

In a round each member brings `chunk` blocks home, as soon as it has room for them. The room goes round the cycle by
itself: blocks that a debtor brings home become free at its creditor, which is a debtor, too. So a round costs one
message of the coordinator and one of each member, however many steps it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kvpool.policy.fields import count_of
from kvpool.policy.lending.freeze import Freeze, freeze_of
from kvpool.policy.lending.ledger import Debts, Ledger
from kvpool.policy.lending.messages import MEMBERS_MAX, Answer, Call, Said
from kvpool.policy.lending.settle import Settlement, settle

__all__ = ["Coordinator", "SettlementRules"]

_PAUSES_MAX: Final = 32  # what fails again and again is not tried for so many pauses
_RESTING_MAX: Final = 64  # so many circles that have failed are remembered
_TRIPS: Final = 8  # so often the room goes round the circle in a round, so that a round takes but a part of the freeze


@dataclass(frozen=True)
class SettlementRules:
    """How a member takes part in settlements.

    Attributes:
        least: Cycles whose smallest debt is less are not settled.
        chunk: Blocks of a round.
        leaf: Blocks of a leaf, a power of two. No leaf is cut if a member has room for one.
        freeze_s: Seconds for which a freeze counts.
        pause_s: Seconds between two looks for cycles. All members must have agreed in this time, too.
    """

    least: int
    chunk: int
    leaf: int
    freeze_s: float
    pause_s: float

    def __post_init__(self) -> None:
        """Raises ArgumentError for a number that is out of range."""
        count_of(self.least, "the least number of blocks", 1)
        count_of(self.chunk, "the blocks of a round", 1)


class Coordinator:
    """The part of a member that coordinates: one cycle at a time.

    Nothing that it does has to be taken back: when it ends, at whatever moment, freezes end with their time, and what
    came home stays home. Not thread-safe.

    Attributes:
        call: What it asks now, or None.
        notes: What has happened, for a log. The caller clears it.

    Args:
        member: This member.
        ledger: Its ledger.
        rules: Of its settlements.
        number: Of the first call: above those of earlier ones of the term.
        seed: Of the dice by which two coordinators get out of each other's way.
    """

    def __init__(self, member: int, ledger: Ledger, rules: SettlementRules, number: int, seed: int) -> None:
        self.call: Call | None = None
        self.notes: list[str] = []
        self._member = member
        self._ledger = ledger
        self._rules = rules
        self._number = number
        self._dice = Random(seed)
        self._freeze: Freeze | None = None  # of the call, on this member's clock
        self._blocks = 0  # so many come home in all, when every member has agreed
        self._look_at = 0.0  # not earlier
        self._waits = False  # for settlements that go before this member's
        self._has_waited = False  # for them, since the look before this one
        self._agree_by = 0.0  # all members
        self._left_out: dict[int, float] = {}  # members that have failed, until when
        self._pauses: dict[int, float] = {}  # for how many pauses
        self._resting: dict[tuple[int, ...], tuple[float, float]] = {}  # circles that failed by no other: as both above
        self._round = 0  # blocks of each round of the call
        self._round_at = 0.0  # when the present one was called
        self._due_before = 0  # so much was due in the one before

    def advance(self, said: Mapping[int, Said], now: float) -> bool:
        """Ends the call, or calls the next round, by what the members say. Whether the call has changed."""
        call = self.call
        if call is None or self._freeze is None:
            return False
        answers = _answers(call, said)
        is_home = len(answers) == len(call.terms) and all(answer.home >= call.due for answer in answers.values())
        if is_home and 0 < self._blocks <= call.due:
            self._complete(call, now)
        elif failure := self._failure(call, self._freeze, answers, said, now):
            has_moved = any(answer.home for answer in answers.values())
            self._end(call, f"stops: {failure[0]}", now, failure[1], has_moved)
        elif is_home and call.due and 2 * now - self._round_at > self._freeze.expires:
            self._complete(call, now)  # so far: another round, as long as this one, would be cut
        elif is_home:
            self._next_round(call, answers, now)
        return self.call != call

    def look(self, said: Mapping[int, Said], now: float) -> dict[tuple[int, int], int] | None:
        """The debts among which this member is to look for cycles; None if it has looked just now, or is on none.

        Args:
            said: What each member says that takes part, this one included.
            now: On the clock of this member.
        """
        if self.call is not None or now < self._look_at:
            return None
        self._look_at = now + self._rules.pause_s
        self._has_waited, self._waits = self._waits, False
        members = {member for member in said if self._left_out.get(member, now) <= now}
        debts = {
            (debtor, creditor): blocks
            for (debtor, creditor), blocks in self._ledger.debts().items()
            if debtor in members and creditor in members
        }
        is_between = all(any(pair[end] == self._member for pair in debts) for end in (0, 1))
        return debts if is_between else None  # else it borrows nothing, or lends nothing

    def search(self, debts: Debts) -> list[list[Settlement]]:
        """The settlements of the debts. It takes long if they are many, and touches nothing: any thread."""
        return settle(debts, self._rules.least)

    def propose(self, found: Iterable[Iterable[Settlement]], said: Mapping[int, Said], now: float) -> bool:
        """Calls one of the settlements that were found, if this member coordinates one. Whether it calls.

        Settlements that go before this member's, because they are larger and share a member with it, have until the
        next look to begin.
        """
        settlement = None if self.call is not None else self._choose(found, said, now)
        if settlement is None:
            return False
        self._number += 1
        self._blocks = self._due_before = 0
        self._agree_by = now + self._rules.pause_s
        self._freeze = freeze_of(settlement, self._ledger, self._number, now + self._rules.freeze_s)
        self.call = Call(settlement, self._freeze.terms, self._number, self._rules.freeze_s)
        self.notes.append(f"settlement {self._number}: {settlement.blocks} blocks each of members {settlement.members}")
        return True

    def _choose(self, found: Iterable[Iterable[Settlement]], said: Mapping[int, Said], now: float) -> Settlement | None:
        """The first of the settlements that this member may call now."""
        here = {member for member in said if member in self._ledger} - _busy(said)  # some may have left since the look
        for at, settlements in enumerate(found):
            for settlement in settlements:
                if here.issuperset(settlement.members) and self._may_call(settlement, now):
                    if at == 0 or self._has_waited:
                        return settlement
                    self._waits = True
                    return None
        return None

    def _may_call(self, settlement: Settlement, now: float) -> bool:
        """Whether this member coordinates it, a record has room for it, and the circle has not failed just now."""
        return (
            settlement.coordinator == self._member
            and len(settlement.members) <= MEMBERS_MAX
            and self._resting.get(settlement.members, (now, 0.0))[0] <= now
        )

    def _failure(
        self, call: Call, freeze: Freeze, answers: Mapping[int, Answer], said: Mapping[int, Said], now: float
    ) -> tuple[str, list[int]] | None:
        """Why the settlement cannot go on, and by which members; None while it can."""
        members = call.settlement.members
        if why := freeze.void(self._ledger, now):
            home = {member: answer.home for member, answer in answers.items()}
            least = min(call.due, self._due_before + 1)  # who brings anything home in a round is not stopped
            return why, [member for member in members if home.get(member, -1) < least]
        if gone := [member for member in members if member not in said]:
            return f"member {gone[0]} takes no part any more", gone
        if refused := [member for member, answer in answers.items() if answer.state == "refused"]:
            for member in refused:  # it is in another settlement: that speaks for it
                self._pauses.pop(member, None)
            return f"member {refused[0]} has refused", refused
        if ended := [member for member, answer in answers.items() if answer.state == "ended"]:
            return f"member {ended[0]} has ended its freeze", ended
        if now >= self._agree_by and (silent := [member for member in members if member not in answers]):
            return f"member {silent[0]} does not answer", silent
        return None

    def _next_round(self, call: Call, answers: Mapping[int, Answer], now: float) -> None:
        """All have agreed, or have brought home what was due."""
        if not call.due:
            self._blocks = min(call.settlement.blocks, *(answer.able for answer in answers.values()))
            if self._blocks < self._rules.least:
                short = [member for member, answer in answers.items() if answer.able < self._rules.least]
                self._end(call, "stops: the debts are smaller than the rows say", now, short)
                return
            room = max(answer.room for answer in answers.values())
            if not room:
                self._end(call, "stops: no member has room", now)
                return
            unit = 1 << min(room, self._rules.leaf, self._rules.chunk, self._blocks).bit_length() - 1
            if self._blocks - self._blocks % unit >= self._rules.least:
                self._blocks -= self._blocks % unit
            call = replace(call, unit=unit)
            self._round = min(self._rules.chunk, _TRIPS * room)
            self._round -= self._round % unit
        self._round_at = now
        self._due_before = call.due
        self.call = replace(call, due=min(call.due + self._round, self._blocks))

    def _complete(self, call: Call, now: float) -> None:
        self._end(
            call, f"is complete{' so far' * (call.due < self._blocks)}: {call.due} blocks each", now, has_moved=True
        )
        self._look_at = now + self._rules.pause_s / 5  # when the rows have arrived

    def _end(self, call: Call, why: str, now: float, by: Collection[int] = (), has_moved: bool = False) -> None:
        """Ends the call. The members by whom are left out for a while: for longer each time, and never equally long.

        If blocks have come home, earlier failures are forgotten. If none have, by no other member, the circle rests.
        """
        self.notes.append(f"settlement {self._number} {why}")
        self.call = self._freeze = None
        self._look_at = now + self._rules.pause_s * self._dice.uniform(0.5, 1.5)
        members = call.settlement.members
        if has_moved:
            self._resting.pop(members, None)
            for member in members:
                self._pauses.pop(member, None)
        others = [member for member in by if member != self._member]
        for member in others:
            self._pauses[member] = pause = min(2 * self._pauses.get(member, 0.5), _PAUSES_MAX)
            self._left_out[member] = now + pause * self._rules.pause_s * self._dice.uniform(1, 2)
        if not others and not has_moved:
            self._rest(members, now)

    def _rest(self, circle: tuple[int, ...], now: float) -> None:
        """Does not call a circle for a while, and longer each time: others of this member have their turn."""
        pause = min(2 * self._resting.pop(circle, (now, 0.5))[1], _PAUSES_MAX)
        if len(self._resting) == _RESTING_MAX:
            del self._resting[next(iter(self._resting))]  # the one that failed first
        self._resting[circle] = now + pause * self._rules.pause_s, pause


def _answers(call: Call, said: Mapping[int, Said]) -> dict[int, Answer]:
    """What the members say to this call, as far as they have read it."""
    found = {}
    for member in call.settlement.members:
        answer = said[member].answers.get(call.settlement.coordinator) if member in said else None
        if answer is not None and answer.key == call.key:
            found[member] = answer
    return found


def _busy(said: Mapping[int, Said]) -> set[int]:
    """The members that have agreed to a call that goes on, and have not brought all of it home."""
    return {
        member
        for each in said.values()
        if each.call is not None
        for member, answer in _answers(each.call, said).items()
        if answer.state == "agreed" and answer.home < each.call.settlement.blocks
    }
