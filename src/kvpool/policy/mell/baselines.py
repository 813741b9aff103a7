"""The schedulers that MELL is compared with (§VIII-B): best fit, worst fit, and load balancing as in Llumnix.

All three activate a GPU if none has room for a new request, and terminate an empty one. The paper does not say what
happens when a request outgrows its GPU. Here:

    BestFit, WorstFit   `Overflow.REDISPATCH`: the newest request of the GPU is stopped and dispatched again, and
                        prefilled there; repeated until the rest fits. (vLLM preempts the newest, too.)
                        `Overflow.RESERVE`: cannot happen, since each request takes the room of its final length from
                        the start. That length is unknown in practice; this is an oracle.
    LoadBalance         the smallest request whose leaving suffices, or else the largest and so on, migrates to the
                        GPU with the most room, or to a new one if none has room for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from kvpool.errors import ArgumentError
from kvpool.policy.mell.checks import check_batch, check_running, sizes_of, whole
from kvpool.policy.mell.ordered import Ordered
from kvpool.policy.mell.plan import Move, Place, Plan, RequestId

__all__ = ["BestFit", "LoadBalance", "Overflow", "WorstFit"]


class Overflow(Enum):
    """What happens when a request outgrows its GPU, under a scheduler that does not migrate."""

    REDISPATCH = "redispatch"
    RESERVE = "reserve"


class _Bins:
    """Requests on GPUs, newest last, and the GPUs by what is free."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, dict[RequestId, int]] = {}
        self.used: dict[int, int] = {}
        self.where: dict[RequestId, int] = {}
        self.free: Ordered[int] = Ordered(capacity)

    def put(self, request: RequestId, size: int, number: int) -> None:
        if number not in self.held:
            self.held[number] = {}
            self.used[number] = 0
            self.free.add(self.capacity, number)
        self.held[number][request] = size
        self.where[request] = number
        self._use(number, size)

    def take(self, request: RequestId) -> int:
        number = self.where.pop(request)
        size = self.held[number].pop(request)
        self._use(number, -size)
        if not self.held[number]:
            self.free.remove(self.capacity, number)
            del self.held[number], self.used[number]
        return size

    def resize(self, request: RequestId, size: int) -> None:
        """The size is written down, even where the GPU overflows by it: `overflow` says by how much."""
        number = self.where[request]
        self._use(number, size - self.held[number][request])
        self.held[number][request] = size

    def size_of(self, request: RequestId) -> int | None:
        """Its tokens; None if it does not run."""
        number = self.where.get(request)
        return None if number is None else self.held[number][request]

    def overflow(self, number: int) -> int:
        return self.used.get(number, 0) - self.capacity

    def vacant(self) -> int:
        number = 0
        while number in self.held:
            number += 1
        return number

    def _use(self, number: int, change: int) -> None:
        before = max(0, self.capacity - self.used[number])
        self.used[number] += change
        after = max(0, self.capacity - self.used[number])
        if before != after:
            self.free.remove(before, number)
            self.free.add(after, number)


class _Baseline(ABC):
    """The common base of the three."""

    def __init__(self, capacity: int) -> None:
        """Makes a scheduler without GPUs of `capacity` tokens each.

        Raises:
            ArgumentError: A capacity below 1.
            ArgumentTypeError: It is no int.
        """
        capacity = whole(capacity, "the capacity")
        if capacity < 1:
            raise ArgumentError(f"a capacity of {capacity} tokens; it must be 1 or more")
        self._bins = _Bins(capacity)

    @property
    def capacity(self) -> int:
        """C: tokens of KV cache on each GPU."""
        return self._bins.capacity

    @property
    def gpus(self) -> Mapping[int, int]:
        """Active GPUs, by number, and the tokens that are taken on each."""
        return self._bins.used

    def requests(self, gpu: int) -> list[RequestId]:
        """The requests of an active GPU, oldest first."""
        return list(self._bins.held[gpu])

    @property
    def gpu_count(self) -> int:
        """How many GPUs are active."""
        return len(self._bins.held)

    def batch(
        self,
        departures: Iterable[RequestId] = (),
        growths: Iterable[tuple[RequestId, int]] = (),
        arrivals: Iterable[tuple[RequestId, int]] = (),
    ) -> Plan:
        """Departures, growth and arrivals, as `Mell.batch`.

        Raises:
            ArgumentError: As `Mell.batch`; nothing has changed then.
            ArgumentTypeError: As `Mell.batch`; nothing has changed then.
        """
        bins = self._bins
        gone, came = list(departures), sizes_of(arrivals)
        growing = sizes_of(growths)
        check_batch(bins.capacity, lambda each: 0 if each in bins.where else None, gone, growing, came)
        grown_rooms, rooms = self._rooms(growing), self._rooms(came)
        check_batch(bins.capacity, bins.size_of, gone, grown_rooms, rooms)
        active = set(bins.held)
        for request in gone:
            bins.take(request)
        grown: dict[int, None] = {}
        for request, room in grown_rooms:
            bins.resize(request, room)
            grown[bins.where[request]] = None
        moves: list[Move] = []
        again: list[Move] = []
        for number in grown:
            while bins.overflow(number) > 0:
                self._relieve(number, moves, again)
        placed = []
        for (request, size), (_, room) in zip(came, rooms, strict=True):
            bins.put(request, room, self._dispatch(room))
            placed.append(Place(request, bins.where[request], size))
        self._rebalance(moves)
        touched = {move.destination for move in [*moves, *again]} | {place.gpu for place in placed}
        left = set(bins.held)
        return Plan(moves, placed, tuple(sorted(touched - active)), tuple(sorted((active | touched) - left)), again)

    def _rooms(self, entries: Iterable[tuple[RequestId, int]]) -> list[tuple[RequestId, int]]:
        return sizes_of((request, self._room_of(request, size)) for request, size in entries)

    def _room_of(self, request: RequestId, size: int) -> int:
        """The room that a request takes when it has `size` tokens."""
        return size

    def adopt(self, running: Mapping[int, Mapping[RequestId, int]]) -> None:
        """Forgets all requests, and takes over these, which run already, oldest first: see `Mell.adopt`.

        They stay where they are. A GPU that has more than C is relieved when one of its requests grows next.

        Raises:
            ArgumentError: As `Mell.adopt`; nothing has changed then.
            ArgumentTypeError: As `Mell.adopt`; nothing has changed then.
        """
        found = check_running(self.capacity, running)
        self._bins = _Bins(self.capacity)
        for number, requests in sorted(found.items()):
            for request, size in requests.items():
                self._bins.put(request, size, number)

    def where(self, request: RequestId) -> int:
        """The GPU of a request; KeyError where it does not run."""
        return self._bins.where[request]

    def tidy(self) -> list[Move]:
        """Moves nothing: `batch` has done all that these schedulers do."""
        return []

    @abstractmethod
    def _dispatch(self, size: int) -> int:
        """The GPU that a new request goes to."""

    def _relieve(self, number: int, moves: list[Move], again: list[Move]) -> None:
        """One request leaves a GPU that overflows."""
        bins = self._bins
        newest = next(reversed(bins.held[number]))
        size = bins.take(newest)
        bins.put(newest, size, self._dispatch(size))
        again.append(Move((newest,), number, bins.where[newest], size))

    def _rebalance(self, moves: list[Move]) -> None:  # noqa: B027 - most do nothing
        """Called once an epoch."""

    def _emptiest(self, size: int, but: int | None = None) -> int | None:
        """The GPU with the most room, if that is enough."""
        for free, number in self._bins.free.at_most(self._bins.capacity):
            if free < size:
                break
            if number != but:
                return number
        return None


class _NoMigration(_Baseline):
    def __init__(
        self,
        capacity: int,
        overflow: Overflow = Overflow.REDISPATCH,
        final: Callable[[RequestId], int] | None = None,
    ) -> None:
        """Makes a scheduler without GPUs.

        Args:
            capacity: C, tokens of KV cache on each GPU.
            overflow: What happens when a request outgrows its GPU.
            final: The final length of a request; `Overflow.RESERVE` needs it.
        """
        super().__init__(capacity)
        if (overflow is Overflow.RESERVE) != (final is not None):
            raise ArgumentError("final lengths are needed to reserve them, and for nothing else")
        self._final = final

    def _room_of(self, request: RequestId, size: int) -> int:
        return size if self._final is None else max(size, self._final(request))


class BestFit(_NoMigration):
    """BF: a new request goes to the GPU with the least sufficient room, and stays."""

    def _dispatch(self, size: int) -> int:
        found = next(self._bins.free.at_least(size), None)
        return self._bins.vacant() if found is None else found[1]


class WorstFit(_NoMigration):
    """WF: a new request goes to the GPU with the least use, and stays."""

    def _dispatch(self, size: int) -> int:
        found = self._emptiest(size)
        return self._bins.vacant() if found is None else found


class LoadBalance(_Baseline):
    """LB: worst fit, and once an epoch requests migrate from the fullest to the emptiest GPUs, as in Llumnix.

    A pair whose use differs by more than `gap` of C exchanges one request, of at most half the difference. Where all
    requests would use at most `scale_in` of the GPUs without one, the GPU with the least use is drained: what it has
    migrates to the emptiest others, if all of it has room there.
    """

    def __init__(self, capacity: int, gap: float = 0.25, scale_in: float = 0.8, pairs: int = 1) -> None:
        """Makes a scheduler without GPUs.

        Args:
            capacity: C, tokens of KV cache on each GPU.
            gap: Difference of use, as a part of C, from which on a pair is balanced.
            scale_in: Use of the other GPUs, as a part of their capacity, up to which one is drained.
            pairs: How many pairs are balanced in an epoch.
        """
        super().__init__(capacity)
        self._gap = gap
        self._scale_in = scale_in
        self._pairs = pairs

    def _dispatch(self, size: int) -> int:
        found = self._emptiest(size)
        return self._bins.vacant() if found is None else found

    def _relieve(self, number: int, moves: list[Move], again: list[Move]) -> None:
        bins = self._bins
        excess = bins.overflow(number)
        held = bins.held[number]
        enough = [request for request, size in held.items() if size >= excess]
        request = min(enough, key=lambda each: held[each]) if enough else max(held, key=lambda each: held[each])
        found = self._emptiest(held[request], but=number)
        self._migrate(request, bins.vacant() if found is None else found, moves)

    def _rebalance(self, moves: list[Move]) -> None:
        self._drain(moves)
        for _ in range(self._pairs):
            if not self._level(moves):
                return

    def _migrate(self, request: RequestId, number: int, moves: list[Move]) -> None:
        source = self._bins.where[request]
        size = self._bins.take(request)
        self._bins.put(request, size, number)
        moves.append(Move((request,), source, number, size))

    def _level(self, moves: list[Move]) -> bool:
        bins = self._bins
        fullest = next((number for _, number in bins.free.at_least(0)), None)
        emptiest = self._emptiest(1)
        if fullest is None or emptiest is None:
            return False
        difference = bins.used[fullest] - bins.used[emptiest]
        if difference <= self._gap * bins.capacity:
            return False
        able = {request: size for request, size in bins.held[fullest].items() if 2 * size <= difference}
        if not able:
            return False
        self._migrate(max(able, key=lambda request: able[request]), emptiest, moves)
        return True

    def _drain(self, moves: list[Move]) -> None:
        bins = self._bins
        others = len(bins.held) - 1
        if others < 1 or sum(bins.used.values()) > self._scale_in * others * bins.capacity:
            return
        number = min(bins.used, key=lambda number: bins.used[number])
        started = len(moves)
        for request, size in sorted(bins.held[number].items(), key=lambda entry: -entry[1]):
            found = self._emptiest(size, but=number)
            if found is None:
                for move in reversed(moves[started:]):
                    bins.put(move.requests[0], bins.take(move.requests[0]), number)
                del moves[started:]
                return
            self._migrate(request, found, moves)
