"""The messages of the dispatcher and an instance, over the pipe between them. KV never takes that way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvpool.control.migration import MigrationTotals
from kvpool.policy.migration import Term
from migration.engine import Request

__all__ = [
    "Begin", "Cancel", "End", "Ending", "FromInstance", "Joined", "More", "Refused", "Send", "Stopping", "Submit",
    "ToInstance", "Token", "Totals",
]  # fmt: skip


@dataclass(frozen=True)
class Submit:
    """A new request: the next plan places it."""

    request: Request


@dataclass(frozen=True)
class Begin:
    """A plan has placed it here."""

    request: Request


@dataclass(frozen=True)
class Cancel:
    """Nobody wants it any more, wherever it is."""

    name: str


@dataclass(frozen=True)
class End:
    """The run is over."""


ToInstance: TypeAlias = Submit | Begin | Cancel | End


@dataclass(frozen=True)
class Joined:
    """It serves."""


@dataclass(frozen=True)
class Token:
    """A token of an answer."""

    name: str
    term: Term
    position: int
    token: int


@dataclass(frozen=True)
class Send:
    """A plan has placed a request that waited here at this member."""

    request: Request
    to: str


@dataclass(frozen=True)
class Refused:
    """There is no room for it."""

    request: Request


@dataclass(frozen=True)
class Stopping:
    """A request is stopped, and is handed over to a member."""

    name: str
    to: str


@dataclass(frozen=True)
class More:
    """The planner needs so many more instances than are members."""

    instances: int


@dataclass(frozen=True)
class Ending:
    """It takes nothing more, and ends when it has nothing left."""


@dataclass(frozen=True)
class Totals:
    """What became of its migrations so far."""

    migrations: MigrationTotals
    plans_made: int
    moves: dict[str, int]


FromInstance: TypeAlias = Joined | Token | Send | Refused | Stopping | More | Ending | Totals
