"""All migrations of one incarnation, and what it answers about those that it no longer knows.

Two rules:

R1  A number that a destination has heard of is used up: if it does not know what became of it, it has failed it, for
    ever, or until thousands of other incarnations have been heard since its source was. It never forgets what is
    decoded here before its source has let it go, or was proved to be gone.
R2  A source forgets only what has ended. Of these it remembers the ones that it took back from an incarnation that may
    wake up and ask, until that one has confirmed that it has dropped the request. Beyond thousands of them it forgets
    the earliest, and says nothing any more about migrations up to those: the destination keeps what it has, in a term
    that readers drop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from kvpool.policy.migration.destination import Destination
from kvpool.policy.migration.messages import DestinationSays, MigrationId, SourceSays
from kvpool.policy.migration.recent import Recent
from kvpool.policy.migration.source import Source

__all__ = ["Arrivals", "Departures"]

_ANSWERS: Final = 1 << 62  # above the numbers of a migration's own messages
_SOURCES_MAX: Final = 4096  # whose numbers are remembered: those that were heard last
_TAKEN_BACK_MAX: Final = 4096  # that are remembered: those that were taken back last
_WINDOW: Final = 256  # offers of one source may overtake each other by so many numbers


class _Used:
    """The numbers of one source that are used up: those that were heard of, and all that are far below them."""

    def __init__(self) -> None:
        self._heard: set[int] = set()
        self._floor = 0  # up to here all are used up

    def __contains__(self, number: int) -> bool:
        return number <= self._floor or number in self._heard

    def add(self, number: int) -> None:
        """This one is used up."""
        self._heard.add(number)
        floor = max(self._heard) - _WINDOW
        if floor > self._floor:
            self._floor = floor
            self._heard = {each for each in self._heard if each > floor}


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
        self._taken_back: Recent[MigrationId, None] = Recent(_TAKEN_BACK_MAX)  # a destination that wakes asks
        self._silent_to = 0  # the highest number of those that were forgotten

    def next_id(self, destination: int) -> MigrationId:
        """The name of a migration that begins."""
        return MigrationId(self._incarnation, destination, next(self._numbers))

    def begin(self, source: Source) -> None:
        """A migration is under way."""
        self._under_way[source.id] = source

    def end(self, source: Source) -> None:
        """Nothing is done for it any more. One that has not ended was handed over: only its destination knows more."""
        if source.ended:
            self._under_way.pop(source.id, None)
        if source.by_proof:
            forgotten = self._taken_back.put(source.id, None)
            if forgotten is not None:
                self._silent_to = max(self._silent_to, forgotten.number)

    def find(self, id: MigrationId) -> Source | None:
        """A migration that is under way."""
        return self._under_way.get(id)

    def answer(self, said: DestinationSays) -> SourceSays | None:
        """What to say about a migration that is not under way any more; None: nothing."""
        if said.id.source != self._incarnation or said.id in self._under_way:
            return None
        if said.phase == "failed":  # for ever: it does not ask again
            self._taken_back.discard(said.id)
            return None
        if said.phase == "moving":
            return SourceSays(said.id, next(self._answers), "cancelled")
        if said.id in self._taken_back:
            return SourceSays(said.id, next(self._answers), "revoked")
        if said.id.number <= self._silent_to:  # to let it go would be wrong if it was taken back
            return None
        return SourceSays(said.id, next(self._answers), "released")


class Arrivals:
    """The requests that come to this incarnation. Not thread-safe.

    Args:
        incarnation: This one.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self._numbers = itertools.count(1)
        self._under_way: dict[MigrationId, Destination] = {}
        self._used: Recent[int, _Used] = Recent(_SOURCES_MAX)  # numbers of each source
        self._kept: dict[MigrationId, Destination] = {}  # decoded here; their sources have not let them go

    def next_number(self) -> int:
        """Of a message: above those of all earlier ones."""
        return next(self._numbers)

    def is_new(self, said: SourceSays) -> bool:
        """Whether this offers a request that was never heard of."""
        return (
            said.id.destination == self._incarnation
            and said.phase == "offered"
            and said.id.number not in self._used_of(said.id.source)
        )

    def _used_of(self, source: int) -> _Used:
        """The numbers of a source, which is the latest heard. What thousands of others have followed is gone by now."""
        found = self._used.get(source) or _Used()
        self._used.put(source, found)
        return found

    def begin(self, offer: SourceSays, make: Callable[[SourceSays], Destination]) -> Destination:
        """Takes an offer that is new: its number is used up, whatever becomes of it."""
        self._used_of(offer.id.source).add(offer.id.number)
        self._under_way[offer.id] = made = make(offer)
        return made

    def refuse(self, offer: SourceSays, why: str, *, full: bool = False) -> DestinationSays:
        """Refuses an offer that is new: its number is used up. What to say."""
        self._used_of(offer.id.source).add(offer.id.number)
        return DestinationSays(offer.id, self.next_number(), "failed", full=full, why=why)

    def end(self, destination: Destination) -> None:
        """Nothing is done for it any more. It is kept if it is decoded here and its source has not let it go."""
        self._under_way.pop(destination.id, None)
        if destination.state == "decoding" or destination.by_proof:
            self._kept[destination.id] = destination
        else:
            self._kept.pop(destination.id, None)

    def find(self, id: MigrationId) -> Destination | None:
        """A migration that is under way, or that is kept."""
        return self._under_way.get(id) or self._kept.get(id)

    @property
    def kept(self) -> tuple[Destination, ...]:
        """Those whose source has not said `released`: it is fenced, or silent. It is to be asked until it does."""
        return tuple(self._kept.values())

    def holds_back(self, request: str) -> bool:
        """Whether a request must not migrate on yet: it is being adopted here, or its source may ask for it, or has."""
        return any(
            each.request == request and (each.ready or each.state in ("decoding", "revoked") or each.by_proof)
            for each in (*self._under_way.values(), *self._kept.values())
        )

    def __iter__(self) -> Iterator[Destination]:
        """Those that are under way."""
        return iter(list(self._under_way.values()))

    def answer(self, said: SourceSays) -> DestinationSays | None:
        """What to say about a migration that is not under way, and was not offered just now; None: nothing."""
        if said.id.destination != self._incarnation or said.phase in ("cancelled", "released", "revoked"):
            return None
        self._used_of(said.id.source).add(said.id.number)
        return DestinationSays(said.id, self.next_number(), "failed", why="the destination does not know it any more")
