"""An operation under way: what has moved so far, and the placing of T and small requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, permutations
from typing import NamedTuple

from kvpool.policy.mell.fleet import Fleet
from kvpool.policy.mell.gpu import Gpu
from kvpool.policy.mell.ordered import Ordered
from kvpool.policy.mell.plan import Move, RequestId
from kvpool.policy.mell.settings import Settings

__all__ = ["Operation", "Unit"]

_LOOK = 4  # how many T-GPUs below 75 % are compared; a batch may leave many


class Unit(NamedTuple):
    """An item that moves at once: a T, or a group of small requests of at most C/4 together."""

    requests: tuple[RequestId, ...]
    size: int
    small: bool


class Operation:
    """Moves items of a fleet, one after the other, each to where it has room at once, and keeps the list.

    A GPU that will change further in this operation is *held*: T that must leave another GPU are not put there, or they
    would have to move again.

    Attributes:
        fleet: The placement, which every call changes.
        settings: The scheduler's.
        moves: The moves so far, in order.
        new: Requests that arrive in this operation: placing them again is no move.
        before: The sizes that growing requests had before: the tokens that move if they do.
        to_refill: L-GPUs that may have room for an S or M beside their L.
        to_offer: S and M that an L-GPU might have room for.
    """

    def __init__(self, fleet: Fleet, settings: Settings, before: Mapping[RequestId, int]) -> None:
        self.fleet = fleet
        self.settings = settings
        self._slack = settings.slack_of(fleet.capacity)
        self.moves: list[Move] = []
        self.new: dict[RequestId, None] = {}
        self.before = before
        self.to_refill: dict[int, None] = {}
        self.to_offer: dict[RequestId, None] = {}
        self._held: list[Gpu] = []

    # ---- holding

    def hold(self, gpu: Gpu) -> None:
        """Keeps T away from a GPU until `release_all`."""
        if not gpu.held:
            self.fleet.hold(gpu, True)
            self._held.append(gpu)

    def release_all(self) -> None:
        """Allows T again on all GPUs that were held."""
        for gpu in self._held:
            self.fleet.hold(gpu, False)
        self._held.clear()

    # ---- moving

    def relocate(self, requests: Iterable[RequestId], number: int, size: int | None = None) -> None:
        """Moves requests of one GPU to another. With `size`, one request, which has that size from then on."""
        fleet = self.fleet
        requests = tuple(requests)
        source = fleet.where[requests[0]].number
        tokens = 0
        for request in requests:
            before = fleet.take(request)
            tokens += self.before.get(request, before)
            fleet.put(request, before if size is None else size, number)
        if any(request not in self.new for request in requests):
            self.moves.append(Move(requests, source, number, tokens))

    def begin(self, request: RequestId, size: int, number: int) -> None:
        """A new request is placed."""
        self.new[request] = None
        self.fleet.put(request, size, number)

    def leave(self, request: RequestId, size: int, number: int) -> None:
        """A request that grows, or that is new, begins to run with this size on a GPU where it is not."""
        if request in self.fleet.where:
            self.relocate((request,), number, size)
        else:
            self.begin(request, size, number)

    # ---- choosing

    def best(self, ordered: Ordered[int], need: int, source: int | None) -> int | None:
        """The GPU with the best priority among those with the least sufficient key."""
        weights, candidates = self.settings.weights, self.settings.candidates
        plain = weights.free > 0 and not weights.requests and not weights.distance
        chosen: int | None = None
        least = 0.0
        for seen, (key, number) in enumerate(ordered.at_least(need)):
            if plain:
                return number
            if seen == candidates:
                break
            score = weights.free * (key - need) / self.fleet.capacity
            score += weights.requests * len(self.fleet.gpus[number])
            if source is not None and weights.distance:
                score += weights.distance * self.settings.distance(source, number)
            if chosen is None or score < least:
                chosen, least = number, score
        return chosen

    def place_for_tee(self, size: int, small: bool, source: int | None) -> int:
        """The GPU for a T, or for small requests of this total; the number of a new one if no GPU has room.

        L-GPUs and M-GPUs below 75 % come first while there are T-GPUs (property 5), then the tightest fit that leaves
        `slack`, then any GPU below 75 %, which has room for every T.
        """
        fleet = self.fleet
        if fleet.low and fleet.tee_gpus:
            return next(number for _, number in fleet.low.at_most(fleet.capacity))
        found = self.best(fleet.small_room if small else fleet.tee_room, size + self._slack, source)
        if found is not None:
            return found
        for _, number in fleet.low.at_most(fleet.capacity):
            return number
        for used, number in fleet.tee_gpus.at_least(0):
            if not fleet.is_low(used):
                break
            if not fleet.gpus[number].held:
                return number
        return fleet.vacant()

    # ---- making room

    def group(self, gpu: Gpu, at_least: int, at_most: int, but: RequestId | None = None) -> Unit | None:
        """Small requests of a GPU, largest first, until their total is `at_least`; never more than `at_most`."""
        at_most = min(at_most, self.fleet.capacity // 4)
        members, total = [], 0
        for request, size in sorted(gpu.small.items(), key=lambda item: -item[1]):
            if total >= at_least:
                break
            if total + size <= at_most and request != but:
                members.append(request)
                total += size
        return Unit(tuple(members), total, True) if members else None

    def units(self, gpu: Gpu, excess: int, but: RequestId | None = None) -> list[Unit]:
        """The items that may leave: each T, each small request that suffices, a group of `excess` or the largest group.

        Args:
            gpu: The GPU that they leave.
            excess: Tokens to free.
            but: A request that stays.
        """
        found = [Unit((request,), size, False) for request, size in gpu.tees.items() if request != but]
        found += [Unit((name,), size, True) for name, size in gpu.small.items() if size >= excess and name != but]
        group = self.group(gpu, excess, self.fleet.capacity, but)
        return [*found, group] if group else found

    def evict(self, gpu: Gpu, excess: int, but: RequestId | None = None) -> None:
        """Moves T and small requests off a GPU until it has `excess` tokens less; at most `Fleet.tee_count` moves."""
        slack = self._slack
        while excess > 0:
            units = self.units(gpu, excess, but)
            enough = [unit for unit in units if unit.size >= excess + slack]
            enough = enough or [unit for unit in units if unit.size >= excess]
            unit = min(enough, key=_size) if enough else max(units, key=_size)
            self.send_away(gpu, unit)
            excess -= unit.size

    def send_away(self, gpu: Gpu, unit: Unit) -> None:
        """Moves one item off a GPU, to any GPU with room."""
        was_held = gpu.held
        self.fleet.hold(gpu, True)
        self.relocate(unit.requests, self.place_for_tee(unit.size, unit.small, gpu.number))
        self.fleet.hold(gpu, was_held)

    def trim(self, gpu: Gpu) -> None:
        """Moves T off a GPU, smallest first, until `Fleet.tee_limit` are left beside its S and M."""
        limit = self.fleet.tee_limit(gpu)
        while limit is not None and self.fleet.tee_count(gpu) > limit:
            self.send_away(gpu, min(self.units(gpu, self.fleet.capacity), key=_size))

    def evictions(self, gpu: Gpu, size: int) -> int:
        """About how many T would have to leave a GPU with S or M if one more S or M came to it."""
        excess = gpu.used + size - self.fleet.capacity
        count = self.fleet.tee_count(gpu)
        needed = 0
        if excess > 0:
            needed = 1 if any(unit.size >= excess for unit in self.units(gpu, excess)) else count
        return max(needed, count - self.fleet.tee_limit_beside(self.fleet.role(gpu), len(gpu.mids) + 1))

    # ---- restoring properties 3 and 5

    def restore_tees(self) -> None:
        """Fills L- and M-GPUs below 75 %, and all T-GPUs but one, from the emptiest T-GPU."""
        fleet = self.fleet
        while fleet.tee_gpus:
            lowest = [fleet.gpus[number] for _, number in islice(fleet.tee_gpus.at_least(0), _LOOK)]
            opened = [gpu for gpu in lowest if fleet.is_low(gpu.used)]
            needy = next((fleet.gpus[number] for _, number in fleet.low.at_most(fleet.capacity)), None)
            if needy is not None:
                self.pull(lowest[0], needy)
            elif len(opened) > 1:
                pairs = permutations(opened, 2)
                self.pull(*min(pairs, key=lambda pair: (self._pulls(*pair), -pair[1].used)))
            else:
                return

    def _pulls(self, source: Gpu, gpu: Gpu) -> int:
        """About how many moves fill one T-GPU from another: until it has 75 %, or the other is empty."""
        missing = 3 * self.fleet.capacity - 4 * gpu.used
        return min(self.fleet.tee_count(source), -(-2 * missing // self.fleet.capacity))

    def pull(self, source: Gpu, gpu: Gpu) -> None:
        """Moves the largest item that fits from a T-GPU to another GPU, which is below 75 %."""
        room = self.fleet.capacity - gpu.used
        units = [Unit((request,), size, False) for request, size in source.tees.items() if size <= room]
        group = self.group(source, room, room)
        self.relocate(max([*units, group] if group else units, key=_size).requests, gpu.number)


def _size(unit: Unit) -> int:
    return unit.size
