"""The placing of L, M and S, and what restores properties 1, 2 and 4 after it."""

from __future__ import annotations

from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.gpu import FULL, TEES_OPEN, Gpu
from kvpool.policy.mell.operation import Operation
from kvpool.policy.mell.plan import RequestId

__all__ = ["MidOperation"]

_LOOK = 6  # how many incomplete GPUs are compared; a batch may leave many


class MidOperation(Operation):
    """An operation that also places and repairs L, M and S."""

    # ---- placing (Fig 10, Allocate)

    def admit(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """An L, M or S enters a GPU, from which T leave that no longer fit."""
        self.hold(gpu)
        self.evict(gpu, gpu.used + size - self.fleet.capacity)
        self._leave_for(request, size, gpu.number)
        self.trim(gpu)

    def place_mid(self, request: RequestId, size: int) -> None:
        """An S or M goes beside an L, else to its class's open GPU, else to a T-GPU with few T, else to a new one."""
        fleet = self.fleet
        source = self._source(request)
        number = self.best(fleet.singles, size, source)
        if number is None:
            number = self._partial_for(request, size)
        if number is None:
            number = self._convertible(request, size)
        if number is None:
            number = fleet.vacant()
        if number in fleet.gpus:
            self.admit(fleet.gpus[number], request, size)
        else:
            self._leave_for(request, size, number)

    def place_large(self, request: RequestId, size: int) -> None:
        """An L goes to a lone S or M that has room, else, if no other S or M fits, to a T-GPU, else to a new one."""
        fleet = self.fleet
        room = fleet.capacity - size
        hosts = [gpu for gpu in self._partials() if len(gpu.mids) == 1 and _only(gpu.mids)[1] <= room]
        hosts = [gpu for gpu in hosts if gpu is not fleet.where.get(request)]
        if hosts:
            self.admit(max(hosts, key=lambda gpu: _only(gpu.mids)[1]), request, size)
            return
        number = fleet.vacant()
        tee_gpu = fleet.lowest_tee_gpu()
        lonely = next(fleet.fillers.at_most(room), None) is None
        if tee_gpu and lonely and tee_gpu.used <= room and tee_gpu is not fleet.where.get(request):
            number = tee_gpu.number
        self._leave_for(request, size, number)
        self.to_refill[number] = None

    def _leave_for(self, request: RequestId, size: int, number: int) -> None:
        """As `leave`, and notes what the request leaves behind."""
        source = self.fleet.where.get(request)
        self.leave(request, size, number)
        if source is not None and len(source):
            self.left_behind(source)

    def left_behind(self, gpu: Gpu) -> None:
        """Notes that an L, M or S has left this GPU, or has become another class on it."""
        if gpu.number == self.fleet.mixed:
            return
        if gpu.large:
            if not gpu.mids:
                self.hold(gpu)
                self.to_refill[gpu.number] = None
        elif gpu.mids and len(gpu.mids) < FULL[self.fleet.role(gpu)]:
            self.hold(gpu)

    def _source(self, request: RequestId) -> int | None:
        gpu = self.fleet.where.get(request)
        return None if gpu is None else gpu.number

    def _partials(self) -> list[Gpu]:
        return [self.fleet.gpus[number] for role in (Class.M, Class.S) for number in self.fleet.partial[role]]

    def _partial_for(self, request: RequestId, size: int) -> int | None:
        """The incomplete GPU of this class that an S or M enters with the fewest evictions; fuller ones first."""
        fleet = self.fleet
        role = fleet.class_of(size)
        chosen, least = None, (0, 0)
        for number in list(fleet.partial[role])[:_LOOK]:
            gpu = fleet.gpus[number]
            if request not in gpu.mids:
                cost = (-len(gpu.mids), self.evictions(gpu, size))
                if chosen is None or cost < least:
                    chosen, least = number, cost
        return chosen

    def _convertible(self, request: RequestId, size: int) -> int | None:
        """The T-GPU that has least, where it may become the open GPU of a class as it stands."""
        gpu = self.fleet.lowest_tee_gpu()
        if gpu is None or gpu is self.fleet.where.get(request):
            return None
        fits = gpu.used + size <= self.fleet.capacity and self.fleet.tee_count(gpu) <= TEES_OPEN
        return gpu.number if fits else None

    # ---- restoring property 4: an L stands without S or M only where none fits

    def restore_offers(self) -> None:
        """S and M that are new on S- and M-GPUs go beside an L that has room."""
        for request in self.to_offer:
            gpu = self.fleet.where.get(request)
            if gpu is None or gpu.large or request not in gpu.mids:
                continue
            size = gpu.mids[request]
            number = self.best(self.fleet.singles, size, gpu.number)
            if number is not None:
                self.admit(self.fleet.gpus[number], request, size)
        self.to_offer.clear()

    def restore_refills(self) -> None:
        """L-GPUs without S or M get the largest that fits, those with the least room first."""
        fleet = self.fleet
        singles = [fleet.gpus[number] for number in self.to_refill if number in fleet.gpus]
        singles = [gpu for gpu in singles if gpu.large and not gpu.mids]
        self.to_refill.clear()
        several = len(singles) > 1
        for gpu in sorted(singles, key=lambda gpu: fleet.capacity - _only(gpu.large)[1]):
            self._refill(gpu, several)

    def _refill(self, gpu: Gpu, several: bool) -> None:
        """The largest S or M that fits: first of those whose GPU is incomplete already, and no other becomes so.

        Where several L-GPUs are refilled at once, an S comes before an M: two that leave GPUs of one class are repaired
        together, in fewer moves.
        """
        fleet = self.fleet
        room = fleet.capacity - _only(gpu.large)[1]
        near = [entry for other in self._partials() for entry in other.mids.items() if entry[1] <= room]
        if several:
            near = [entry for entry in near if fleet.class_of(entry[1]) is Class.S] or near
        if near and not (several and fleet.class_of(near[0][1]) is Class.M and self._has_s(room)):
            request, size = max(near, key=lambda entry: entry[1])
        else:
            found = next(fleet.fillers.at_most(room), None)
            if several:
                found = next(fleet.fillers.at_most(min(room, fleet.capacity // 3)), None) or found
            if found is None:
                return
            size, request = found
        self.admit(gpu, request, size)

    def _has_s(self, room: int) -> bool:
        """Whether an S that could come beside an L fits into this room."""
        fleet = self.fleet
        return next(fleet.fillers.at_most(min(room, fleet.capacity // 3)), None) is not None

    # ---- restoring properties 1 and 2: at most one incomplete GPU of S and one of M

    def restore_partials(self) -> None:
        """Leaves at most one incomplete GPU of each role."""
        for role in (Class.M, Class.S):
            while len(self.fleet.partial[role]) > 1:
                self._merge(role)

    def _merge(self, role: Class) -> None:
        """One S or M goes from an incomplete GPU that has fewest to one that has most: the pair with fewest moves."""
        fleet = self.fleet
        gpus = [fleet.gpus[number] for number in list(fleet.partial[role])[:_LOOK]]
        fewest, most = min(len(gpu.mids) for gpu in gpus), max(len(gpu.mids) for gpu in gpus)
        pairs = [
            (source, gpu)
            for source in gpus
            for gpu in gpus
            if source is not gpu and len(source.mids) == fewest and len(gpu.mids) == most
        ]
        source, gpu = min(pairs, key=lambda pair: self._merge_cost(*pair))
        request, size = min(source.mids.items(), key=lambda entry: entry[1])
        self.admit(gpu, request, size)

    def _merge_cost(self, source: Gpu, gpu: Gpu) -> int:
        """About how many T would have to move: from the one, and from the other if nothing else is left on it."""
        stranded = self.fleet.tee_count(source) if len(source.mids) == 1 else 0
        return self.evictions(gpu, min(source.mids.values())) + stranded

    # ---- all of it

    def restore(self) -> None:
        """Restores the five properties of Theorem 1."""
        self.restore_mids()
        self.release_all()
        self.restore_tees()

    def restore_mids(self) -> None:
        """Restores properties 1, 2 and 4, which T have no part in."""
        self.restore_offers()
        while self.to_refill or any(len(partial) > 1 for partial in self.fleet.partial.values()):
            self.restore_refills()
            self.restore_partials()


def _only(holder: dict[RequestId, int]) -> tuple[RequestId, int]:
    """The only entry."""
    return next(iter(holder.items()))
