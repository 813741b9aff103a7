"""The scheduler of MELL: allocate, depart, grow, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvpool.errors import ArgumentError
from kvpool.policy.mell.adoption import adopted
from kvpool.policy.mell.checks import check_batch, check_running, sizes_of, whole
from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.consolidate import consolidate
from kvpool.policy.mell.fleet import Fleet
from kvpool.policy.mell.growth import GrowthOperation
from kvpool.policy.mell.netting import without_detours
from kvpool.policy.mell.plan import Move, Place, Plan, RequestId
from kvpool.policy.mell.properties import check
from kvpool.policy.mell.settings import MOVES_AN_OPERATION, Settings

__all__ = ["Mell"]


@dataclass(frozen=True)
class _Operations:
    """The operations of a batch: requests that are gone, that grow, and that arrive.

    Attributes:
        fallen: Requests of lost GPUs. They are removed first, before anything else is done.
        gone: The others that depart.
        grown: Requests and their new sizes.
        came: New requests and their sizes.
        before: The sizes that the first three had.
    """

    fallen: list[RequestId]
    gone: list[RequestId]
    grown: list[tuple[RequestId, int]]
    came: list[tuple[RequestId, int]]
    before: dict[RequestId, int]

    def __len__(self) -> int:
        return len(self.fallen) + len(self.gone) + len(self.grown) + len(self.came)

    def singly(self) -> Iterator[_Operations]:
        """One after the other."""
        if self.fallen:
            yield _Operations(self.fallen, [], [], [], self.before)
        for request in self.gone:
            yield _Operations([], [request], [], [], self.before)
        for entry in self.grown:
            yield _Operations([], [], [entry], [], self.before)
        for entry in self.came:
            yield _Operations([], [], [], [entry], self.before)


class Mell:
    """Packs requests, whose KV caches grow, onto as few GPUs as it can, with at most ten moves an operation (§VI).

    Between operations the five properties of Theorem 1 hold, one open GPU of each role apart, so there are never more
    GPUs than 4/3 of what the best packing needs, plus a constant. Each call takes a time that grows with the
    logarithm of the number of GPUs, and with the number of requests on the few GPUs that it touches.

    The scheduler only decides. Instances execute a plan before the next call is made; the same calls give the same
    plans.

    Not thread-safe.
    """

    def __init__(self, capacity: int, settings: Settings | None = None) -> None:
        """Makes a scheduler without GPUs.

        Args:
            capacity: C, tokens of KV cache on each GPU; 8 or more.
            settings: See `Settings`.

        Raises:
            ArgumentError: A capacity below 8, a slack below 0 or above C/4, a reserve below 0, or no candidate.
            ArgumentTypeError: One of these is no int.
        """
        capacity, self._settings = whole(capacity, "the capacity"), _checked(settings or Settings())
        if capacity < 8:
            raise ArgumentError(f"a GPU of {capacity} tokens has no classes; the capacity must be 8 or more")
        slack = self._settings.slack_of(capacity)
        if not 0 <= 4 * slack <= capacity:
            raise ArgumentError(f"a slack of {slack} tokens; it must be 0 to C/4, {capacity // 4}")
        self._fleet = Fleet(capacity)

    # ---- what is

    @property
    def capacity(self) -> int:
        """C: tokens of KV cache on each GPU."""
        return self._fleet.capacity

    @property
    def gpus(self) -> Mapping[int, int]:
        """Active GPUs, by number, and the tokens in use on each."""
        return {number: gpu.used for number, gpu in self._fleet.gpus.items()}

    @property
    def gpu_count(self) -> int:
        """How many GPUs are active."""
        return len(self._fleet.gpus)

    @property
    def sizes(self) -> Mapping[RequestId, int]:
        """Tokens of each request."""
        return self._fleet.sizes

    def where(self, request: RequestId) -> int:
        """The GPU of a request; KeyError where it does not run."""
        return self._fleet.where[request].number

    def requests(self, gpu: int) -> list[RequestId]:
        """The requests of an active GPU, largest class first."""
        return [request for request, _ in self._fleet.gpus[gpu].requests()]

    def role(self, gpu: int) -> Class:
        """The largest class that an active GPU has; T where all are small."""
        return self._fleet.role(self._fleet.gpus[gpu])

    def audit(self) -> None:
        """Checks all sums, ordered sets and the five properties; takes time in proportion to the number of requests.

        Raises:
            AuditError: Something is wrong.
        """
        check(self._fleet)

    # ---- taking over, tidying

    def adopt(self, running: Mapping[int, Mapping[RequestId, int]]) -> None:
        """Forgets all requests, and takes over these, which run already: instead of a scheduler that has died.

        Only the placement is state: one that a scheduler has made is taken over as it is. In any other one some
        requests are placed elsewhere, until the properties hold: compare `where` with what was given.

        Args:
            running: The requests of each GPU with their sizes. Those of one GPU may be more than C together.

        Raises:
            ArgumentError: A request is named twice, or its size is not from 1 to C; nothing has changed then.
            ArgumentTypeError: A size, or the number of a GPU, is no int; nothing has changed then.
        """
        self._fleet = adopted(self.capacity, self._settings, check_running(self.capacity, running))

    def tidy(self) -> list[Move]:
        """Empties GPUs into the room beside others, with at most ten moves: those that an operation has left.

        For a scheduler that has adopted its requests: it has not seen departures, and so has not used their moves.
        """
        operation = GrowthOperation(self._fleet, self._settings, {})
        consolidate(operation, MOVES_AN_OPERATION)
        self._fleet.was_active.clear()
        return without_detours(operation.moves)

    # ---- single operations

    def allocate(self, request: RequestId, size: int) -> Plan:
        """Places a new request of `size` tokens (its prompt, and the room for its next tokens).

        Raises:
            ArgumentError: It is longer than C, not positive, or runs already.
            ArgumentTypeError: Its size is no int.
        """
        return self.batch(arrivals={request: size}.items())

    def depart(self, request: RequestId) -> Plan:
        """Removes a request that is complete or was given up.

        Raises:
            ArgumentError: It does not run.
        """
        return self.batch(departures=(request,))

    def grow(self, request: RequestId, size: int) -> Plan:
        """Makes room for a request to have `size` tokens; call it before they are written.

        Raises:
            ArgumentError: It does not run, is to shrink, or would be longer than C.
            ArgumentTypeError: Its size is no int.
        """
        return self.batch(growths={request: size}.items())

    # ---- batches

    def batch(
        self,
        departures: Iterable[RequestId] = (),
        growths: Iterable[tuple[RequestId, int]] = (),
        arrivals: Iterable[tuple[RequestId, int]] = (),
        lost: Iterable[int] = (),
    ) -> Plan:
        """Does many operations at once and repairs the properties once at the end.

        Growth that changes only a size comes first, then departures, the other growth, and arrivals. It never takes
        more moves than the same operations one by one, in this order and from the same state (`Settings.never_more`).

        Args:
            departures: Requests that are gone.
            growths: Requests and their new sizes, each at most once; none of them departs.
            arrivals: New requests and their sizes. One that departs may arrive again.
            lost: GPUs that are gone with all their requests: these depart, named or not, and in this plan nothing moves
                there or from there. A later one may use the number for another GPU.

        Raises:
            ArgumentError: As the single operations; nothing has changed then.
            ArgumentTypeError: As the single operations, or a number of a GPU is no int; nothing has changed then.
        """
        fleet = self._fleet
        barred = {whole(number, "a lost GPU"): None for number in lost}
        fallen = [request for number in barred if number in fleet.gpus for request in self.requests(number)]
        gone, grown, came = list(departures), sizes_of(growths), sizes_of(arrivals)
        if fallen:
            named = set(gone)
            gone += [request for request in fallen if request not in named]
        check_batch(fleet.capacity, fleet.sizes.get, gone, grown, came)
        fleet.was_active.clear()
        fleet.bar(barred)
        before = {request: fleet.sizes[request] for request in [*gone, *(request for request, _ in grown)]}
        others = [request for request in gone if fleet.where[request].number not in barred]
        operations = _Operations(fallen, others, self._grow_freely(grown), came, before)
        moves = (
            self._fewest(operations)
            if len(operations) > 1 and self._settings.never_more
            else self._together(operations)
        )
        absent = {*gone, *(request for request, _ in came)}
        moves = [kept for move in moves if (kept := self._without(absent, before, move))]
        return self._plan(moves, [Place(request, fleet.where[request].number, size) for request, size in came])

    def _fewest(self, operations: _Operations) -> list[Move]:
        """Together, or one by one where that takes fewer moves."""
        fleet = self._fleet
        mark = fleet.mark()
        single = self._one_by_one(operations)
        fleet.rollback(mark)
        mark = fleet.mark()
        moves = self._together(operations)
        if len(single) < len(moves):
            fleet.rollback(mark)
            return self._one_by_one(operations)
        fleet.forget(mark)
        return moves

    def _one_by_one(self, operations: _Operations) -> list[Move]:
        return [move for operation in operations.singly() for move in self._together(operation)]

    def _together(self, operations: _Operations) -> list[Move]:
        """Misfits go first, so that what comes after finds the room; S, M and L before T, largest first."""
        fleet = self._fleet
        operation = GrowthOperation(fleet, self._settings, operations.before)
        for request in [*operations.fallen, *operations.gone]:
            operation.depart(request)
        for request, size in sorted(operations.grown, key=_size, reverse=True):
            if fleet.class_of(size) > Class.T:
                operation.grow(request, size)
        arriving = sorted(operations.came, key=_size, reverse=True)
        for request, size in arriving:
            kind = fleet.class_of(size)
            if kind is Class.L:
                operation.place_large(request, size)
            elif kind > Class.T:
                operation.place_mid(request, size)
        operation.restore_mids()
        operation.release_all()
        for request, size in operations.grown:
            if fleet.class_of(size) <= Class.T:
                operation.grow(request, size)
        for request, size in arriving:
            kind = fleet.class_of(size)
            if kind <= Class.T:
                operation.begin(request, size, operation.place_for_tee(size, kind is Class.SMALL, None))
        operation.restore()
        if self._settings.consolidate:
            consolidate(operation, MOVES_AN_OPERATION * len(operations))
        return without_detours(operation.moves)

    def _grow_freely(self, grown: list[tuple[RequestId, int]]) -> list[tuple[RequestId, int]]:
        """Lets requests grow that stay in their class if nothing else changes; returns the others."""
        fleet = self._fleet
        freely, bound = [], []
        rooms: dict[int, tuple[int, int]] = {}  # the free tokens of each GPU, and the room of its small requests
        for request, size in grown:
            gpu, before = fleet.where[request], fleet.sizes[request]
            room, small = rooms.get(gpu.number) or fleet.rooms_to_grow(gpu)
            kind = fleet.class_of(size)
            room -= size - before
            small -= size - before if kind is Class.SMALL else 0
            if room < 0 or small < 0 or kind is not fleet.class_of(before):
                bound.append((request, size))
            else:
                freely.append((request, size))
                rooms[gpu.number] = room, small
        fleet.resize_all(freely)
        return bound

    def _plan(self, moves: list[Move], placed: list[Place]) -> Plan:
        fleet = self._fleet
        touched = {move.destination for move in moves} | {place.gpu for place in placed}
        activated, terminated = [], []
        for number, was in fleet.was_active.items():
            active = number in fleet.gpus
            if not was and (active or number in touched):
                activated.append(number)
            if not active and (was or number in touched):
                terminated.append(number)
        return Plan(moves, placed, tuple(sorted(activated)), tuple(sorted(terminated)))

    def _without(self, absent: set[RequestId], before: Mapping[RequestId, int], move: Move) -> Move | None:
        """A move without the requests that are gone before it or begin after it; None where nothing else moves."""
        left = tuple(request for request in move.requests if request not in absent)
        if len(left) == len(move.requests):
            return move
        sizes = self._fleet.sizes
        tokens = sum(before[request] if request in before else sizes[request] for request in left)
        return Move(left, move.source, move.destination, tokens) if left else None


def _checked(settings: Settings) -> Settings:
    """The settings, checked. Raises ArgumentError for one that is too small, and ArgumentTypeError for no int."""
    reserve, candidates = whole(settings.reserve, "reserve"), whole(settings.candidates, "candidates")
    if reserve < 0 or candidates < 1:
        raise ArgumentError(f"reserve {reserve} must be 0 tokens or more, and candidates {candidates} 1 or more")
    slack = None if settings.slack is None else whole(settings.slack, "slack")
    return replace(settings, slack=slack, reserve=reserve, candidates=candidates)


def _size(entry: tuple[RequestId, int]) -> int:
    return entry[1]
