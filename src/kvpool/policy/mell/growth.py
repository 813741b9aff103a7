"""What happens to a placement when requests depart, and when they grow (Fig 10, Depart and Update).

Growth is reported before the tokens are written, so room is made first: a GPU never holds more than C.
"""

from __future__ import annotations

from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.gpu import FULL, TEES_OPEN, Gpu
from kvpool.policy.mell.mids import MidOperation
from kvpool.policy.mell.plan import RequestId

__all__ = ["GrowthOperation"]


class GrowthOperation(MidOperation):
    """An operation that also lets requests depart and grow; `restore` restores the properties afterwards."""

    def depart(self, request: RequestId) -> None:
        """Removes a request. `restore` repairs its GPU afterwards."""
        gpu = self.fleet.where[request]
        large = request in gpu.large
        self.fleet.take(request)
        if large:
            self.to_offer.update(dict.fromkeys(gpu.mids))
        if len(gpu):
            self.left_behind(gpu)

    def grow(self, request: RequestId, size: int) -> None:
        """A request has this size from now on, where it is or elsewhere."""
        fleet = self.fleet
        gpu, kind = fleet.where[request], fleet.class_of(size)
        if gpu.number == fleet.mixed:
            self._grow_mixed(gpu, request, size)
        elif kind <= Class.T:
            self._grow_tee(gpu, request, size)
        elif kind is fleet.class_of(fleet.sizes[request]):
            self._grow_within(gpu, request, size)
        elif kind is Class.L:
            self._grow_to_large(gpu, request, size)
        else:
            self._grow_to_mid(gpu, request, size)

    def _grow_mixed(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """On the mixed GPU all but an L may stay: a T that suffices makes room, or the request leaves."""
        kind = self.fleet.class_of(size)
        if kind is Class.L:
            self.place_large(request, size)
        elif kind <= Class.T:
            self._grow_tee(gpu, request, size)
        else:
            excess = gpu.used + size - self.fleet.sizes[request] - self.fleet.capacity
            enough = [unit for unit in self.units(gpu, excess, but=request) if unit.size >= excess]
            if excess > 0 and not enough:
                self.place_mid(request, size)
                return
            if excess > 0:
                self.send_away(gpu, min(enough, key=lambda unit: unit.size))
            self.fleet.resize(request, size)

    # ---- T and small requests

    def _grow_tee(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """What overflows makes the smallest sufficient T leave, or small requests, or this one."""
        excess = gpu.used + size - self.fleet.sizes[request] - self.fleet.capacity
        if excess > 0:
            wished = excess + self._slack
            others = [unit for unit in self.units(gpu, excess, but=request) if unit.size >= excess]
            others = [unit for unit in others if unit.size >= wished] or others
            unit = min(others, key=lambda unit: unit.size, default=None)
            if unit is None or unit.size > size:
                self._send_away_grown(gpu, request, size)
                return
            self.send_away(gpu, unit)
        self._stay(gpu, request, size)

    def _send_away_grown(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """A T or small request leaves its GPU, to where it has room for what it grows to."""
        was_held = gpu.held
        self.fleet.hold(gpu, True)
        small = self.fleet.class_of(size) is Class.SMALL
        self.leave(request, size, self.place_for_tee(size, small, gpu.number))
        self.fleet.hold(gpu, was_held)

    def _stay(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """A request grows where it is, where it has room."""
        self.fleet.resize(request, size)
        self.trim(gpu)

    # ---- S, M and L

    def _grow_within(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """The class is the same: T leave until it fits, but first an S or M that no longer fits beside its L."""
        if gpu.large and gpu.mids:
            mid = next(iter(gpu.mids))
            pair = {**gpu.large, **gpu.mids, request: size}
            if sum(pair.values()) > self.fleet.capacity:
                self.place_mid(mid, pair[mid])
                self.left_behind(gpu)
        if self.fleet.sizes[request] != size:
            self._make_room(gpu, request, size)

    def _make_room(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """T other than this request leave until it fits where it is, and it grows there."""
        fleet = self.fleet
        self.hold(gpu)
        self.evict(gpu, gpu.used + size - fleet.sizes[request] - fleet.capacity, but=request)
        self._stay(gpu, request, size)

    def _others(self, gpu: Gpu, request: RequestId) -> dict[RequestId, int]:
        """The S and M of a GPU without this request."""
        return {other: size for other, size in gpu.mids.items() if other != request}

    def _tees_beside(self, gpu: Gpu, request: RequestId) -> int:
        """As `Fleet.tee_count`, without this request."""
        return self.fleet.tee_count(gpu) - (request in gpu.tees)

    def _grow_to_mid(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """A request has become S or M: beside an L if one has room, else where it is if it suits, else elsewhere."""
        fleet = self.fleet
        others = self._others(gpu, request)
        if gpu.large:
            if not others and sum(gpu.large.values()) + size <= fleet.capacity:
                self._make_room(gpu, request, size)
            else:
                self._leave_mid(gpu, request, size)
            return
        offered = next(fleet.singles.at_least(size), None)
        if offered is None and self._suits(gpu, others, request, size):
            self._make_room(gpu, request, size)
        else:
            self._leave_mid(gpu, request, size)

    def _suits(self, gpu: Gpu, others: dict[RequestId, int], request: RequestId, size: int) -> bool:
        """Whether a GPU without L keeps a request that has become S or M."""
        fleet = self.fleet
        kind = fleet.class_of(size)
        if others:
            return len(others) < FULL[kind] and all(fleet.class_of(other) is kind for other in others.values())
        elsewhere = any(number != gpu.number for number in fleet.partial[kind])
        return not elsewhere and self._tees_beside(gpu, request) <= TEES_OPEN

    def _leave_mid(self, gpu: Gpu, request: RequestId, size: int) -> None:
        self.place_mid(request, size)
        if len(gpu):
            self.left_behind(gpu)

    def _grow_to_large(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """A request has become L: where it is if what is beside it fits, else its only S or M leaves, or it does."""
        fleet = self.fleet
        others = self._others(gpu, request)
        room = fleet.capacity - size
        if gpu.large or len(others) > 1:
            stays = False
        elif others:
            other, other_size = next(iter(others.items()))
            stays = other_size <= room or request in gpu.mids
            if other_size > room and stays:
                self.place_mid(other, other_size)
        elif request in gpu.mids:
            stays = True
        else:
            fits = gpu.used + size - fleet.sizes[request] <= fleet.capacity
            stays = fits and next(fleet.fillers.at_most(room), None) is None
        if stays:
            self._make_room(gpu, request, size)
        else:
            self.place_large(request, size)
        if len(gpu):
            self.left_behind(gpu)
