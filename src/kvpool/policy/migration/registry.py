"""All migrations of one incarnation, and what it answers about those that it no longer knows.

Two rules:

    R1  A number that a source has used is used up: a destination that does not know it has failed it, for ever.
R2  A source forgets only what has ended, and remembers which of these it took back by proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from kvpool.policy.migration.destination import Destination
from kvpool.policy.migration.messages import DestinationSays, MigrationId, SourceSays
from kvpool.policy.migration.source import Source

__all__ = ["Arrivals", "Departures"]

_ANSWERS: Final = 1 << 62  # above the numbers of a migration's own messages


class Departures:
    """The requests that leave this incarnation. Not thread-safe.

    Args:
        incarnation: This one.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._answers = itertools.count(_ANSWERS)
        self._under_way: dict[MigrationId, Source] = {}
        self._taken_back: set[MigrationId] = set()

    def next_id(self, destination: int) -> MigrationId:
        """The name of a migration that begins."""
        return MigrationId(self._incarnation, destination, next(self._numbers))

    def begin(self, source: Source) -> None:
        """A migration is under way."""
        self._under_way[source.id] = source

    def end(self, source: Source) -> None:
        """It has ended here."""
        self._under_way.pop(source.id, None)
        if source.by_proof:
            self._taken_back.add(source.id)

    def find(self, id: MigrationId) -> Source | None:
        """A migration that is under way."""
        return self._under_way.get(id)

    def answer(self, said: DestinationSays) -> SourceSays | None:
        """What to say about a migration that is not under way any more; None: nothing."""
        if said.id.source != self._incarnation or said.phase == "failed":
            return None
        if said.phase == "moving":
            return SourceSays(said.id, next(self._answers), "cancelled")
        return SourceSays(said.id, next(self._answers), "revoked" if said.id in self._taken_back else "released")


class Arrivals:
    """The requests that come to this incarnation. Not thread-safe.

    Args:
        incarnation: This one.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._under_way: dict[MigrationId, Destination] = {}
        self._highest: dict[int, int] = {}  # number of each source
        self._kept: dict[MigrationId, Destination] = {}  # decoded here, their sources fenced

    def next_number(self) -> int:
        """Of a message: above those of all earlier ones."""
        return next(self._numbers)

    def is_new(self, said: SourceSays) -> bool:
        """Whether this offers a request that was never heard of."""
        return (
            said.id.destination == self._incarnation
            and said.phase == "offered"
            and said.id.number > self._highest.get(said.id.source, 0)
        )

    def begin(self, offer: SourceSays, make: Callable[[SourceSays], Destination]) -> Destination:
        """Takes an offer that is new: its number is used up, whatever becomes of it."""
        self._highest[offer.id.source] = offer.id.number
        self._under_way[offer.id] = made = make(offer)
        return made

    def refuse(self, offer: SourceSays, why: str, *, full: bool = False) -> DestinationSays:
        """Refuses an offer that is new: its number is used up. What to say."""
        self._highest[offer.id.source] = offer.id.number
        return DestinationSays(offer.id, self.next_number(), "failed", full=full, why=why)

    def end(self, destination: Destination) -> None:
        """It has ended here."""
        self._under_way.pop(destination.id, None)
        if destination.by_proof:
            self._kept[destination.id] = destination
        else:
            self._kept.pop(destination.id, None)

    def find(self, id: MigrationId) -> Destination | None:
        """A migration that is under way, or that ended here by a proof that may turn out wrong."""
        return self._under_way.get(id) or self._kept.get(id)

    @property
    def kept(self) -> tuple[Destination, ...]:
        """Those whose source was fenced before it said `released`. It is to be told of them when it is there again."""
        return tuple(self._kept.values())

    def holds_back(self, request: str) -> bool:
        """Whether a request that is decoded here must not migrate on yet: its source may ask for it, or has."""
        return any(
            each.request == request and (each.state in ("decoding", "revoked") or each.by_proof)
            for each in (*self._under_way.values(), *self._kept.values())
        )

    def __iter__(self) -> Iterator[Destination]:
        """Those that are under way."""
        return iter(list(self._under_way.values()))

    def answer(self, said: SourceSays) -> DestinationSays | None:
        """What to say about a migration that is not under way, and was not offered just now; None: nothing."""
        if said.id.destination != self._incarnation or said.phase in ("cancelled", "released", "revoked"):
            return None
        self._highest[said.id.source] = max(said.id.number, self._highest.get(said.id.source, 0))
        return DestinationSays(said.id, self.next_number(), "failed", why="the destination does not know it any more")
