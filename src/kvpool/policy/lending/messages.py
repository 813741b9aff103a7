"""What members that settle debts tell each other: each says all of it in its record, and others read its latest.

So nothing is lost or doubled by a record that is read late, twice, or not at all because a later one took its place: a
message is what a member says now, numbers only grow, and `due` and `home` count from the beginning of a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of, seconds_of
from kvpool.policy.lending.ledger import BLOCKS_MAX
from kvpool.policy.lending.settle import Settlement

__all__ = ["ANSWERS_MAX", "FREEZE_S_MAX", "MEMBERS_MAX", "Answer", "AnswerState", "Call", "Said"]

AnswerState = Literal["agreed", "refused", "ended"]

# A member answers so many coordinators at a time; to others its silence is a refusal. A record has a limited length.
ANSWERS_MAX: Final = 32

# A call names so many members: a record has a limited length, and room goes round a larger circle slowly.
MEMBERS_MAX: Final = 64

# One call cannot freeze debts for longer, whatever another machine says. A coordinator may call anew when it is over.
FREEZE_S_MAX: Final = 600.0


@dataclass(frozen=True)
class Call:
    """What the coordinator of a cycle asks of its members.

    Attributes:
        settlement: The cycle, and how many blocks of each debt are frozen.
        terms: Of the members, in their order, as the coordinator knows them.
        number: Counts the coordinator's calls in its term.
        seconds: So long after a member has agreed its freeze ends, on the member's clock.
        due: So many blocks each member is to have brought home by now; 0 until all have agreed.
        unit: Blocks come home in whole groups of so many, so that no leaf is cut that need not be.
    """

    settlement: Settlement
    terms: tuple[int, ...]
    number: int
    seconds: float
    due: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        """Raises ArgumentError for a call that no coordinator makes."""
        if len(self.terms) != len(self.settlement.members):
            raise ArgumentError(f"{len(self.terms)} terms for {len(self.settlement.members)} members")
        if len(self.terms) > MEMBERS_MAX:
            raise ArgumentError(f"a call names {len(self.terms)} members; {MEMBERS_MAX} are allowed")
        for term in self.terms:
            count_of(term, "the term of a member", 0)
        count_of(self.number, "the number of a call", 0)
        if seconds_of(self.seconds, "how long a call freezes debts") > FREEZE_S_MAX:
            raise ArgumentError(f"a call freezes debts for {self.seconds} s; {FREEZE_S_MAX:g} are allowed")
        count_of(self.unit, "the blocks of a unit", 1)
        if not count_of(self.due, "the blocks that are due", 0) <= self.settlement.blocks <= BLOCKS_MAX:
            raise ArgumentError(f"{self.due} blocks are due of {self.settlement.blocks}, at most {BLOCKS_MAX}")

    @property
    def key(self) -> tuple[int, int]:
        """Tells it from every other call of its coordinator, and orders them: term and number."""
        return self.terms[0], self.number


@dataclass(frozen=True)
class Answer:
    """What a member of the cycle says to a call.

    Attributes:
        term: Of the coordinator.
        number: Of the call.
        state: "agreed": its debt is frozen. "refused": another freeze counts, or this one is void. "ended": it had
            agreed; its freeze is void, or it has no more blocks to bring home.
        able: So many blocks of the debt it could bring home when it agreed.
        room: So many free blocks it had for them.
        home: So many have come home since.
    """

    term: int
    number: int
    state: AnswerState
    able: int = 0
    room: int = 0
    home: int = 0

    def __post_init__(self) -> None:
        """Raises ArgumentError for an answer that no member gives."""
        for name in ("term", "number", "able", "room", "home"):
            count_of(getattr(self, name), f"{name} in an answer", 0)
        if self.state not in get_args(AnswerState):
            raise ArgumentError(f"an answer is {self.state!r}; it must be one of {', '.join(get_args(AnswerState))}")

    @property
    def key(self) -> tuple[int, int]:
        """Which call of the coordinator it answers."""
        return self.term, self.number


@dataclass(frozen=True)
class Said:
    """All that a member says at a time.

    Attributes:
        call: As a coordinator.
        answers: As a member of cycles, by coordinator.
    """

    call: Call | None = None
    answers: Mapping[int, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ArgumentError for more answers than a record has room for."""
        if len(self.answers) > ANSWERS_MAX:
            raise ArgumentError(f"{len(self.answers)} answers; {ANSWERS_MAX} are allowed")
        for coordinator in self.answers:
            count_of(coordinator, "a coordinator", 1)
        object.__setattr__(self, "answers", MappingProxyType(dict(self.answers)))
