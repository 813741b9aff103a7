"""Which request runs on which GPU, and the ordered sets that decisions look it up in.

Only the placement is state: roles, open GPUs, groups and all ordered sets follow from it, GPU by GPU (`Fleet._index`).
So putting requests back where they were undoes any change (`Fleet.rollback`).

Invariants:
    1  used = the sum of the sizes of its requests, at most C, after every call
    2  a GPU without requests is in no set and is not counted
    3  a GPU with an L has at most one S or M beside it; a GPU without one has M or S, never both, except the mixed one
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from kvpool.policy.mell.classes import Class, groups_at_most
from kvpool.policy.mell.gpu import FULL, NO_KEYS, TEES_COMBINED, TEES_COMPLETE, TEES_OPEN, Gpu
from kvpool.policy.mell.ordered import Ordered
from kvpool.policy.mell.plan import RequestId

__all__ = ["Fleet"]

_SMALL, _T, _S, _M, _L = Class

_NOTHING: dict[RequestId, int] = {}


class Fleet:
    """The placement of all requests on GPUs of one capacity.

    Attributes:
        capacity: C, tokens of KV cache that a GPU has room for.
        gpus: The GPUs that run something, by number.
        where: The GPU of each request.
        sizes: Tokens of each request.
        used: Tokens of all requests.
        mixed: The one GPU that may have S, M and T in any number, an open GPU like those of the roles: made when the
            requests of several open GPUs fit on one. It is in `tee_room` and `small_room` only, and its S and M are not
            in `fillers`.
        singles: GPUs with an L and neither S nor M, by the room beside the L.
        fillers: S and M on GPUs without L, by size: they could move beside an L.
        partial: GPUs by role S and M that are not complete. At most one of each between operations: the open ones.
        tee_room: GPUs by the largest T that they take.
        small_room: GPUs by how many tokens of small requests they take.
        low: L-GPUs and complete M-GPUs below 75 %, by use.
        ordered: singles, tee_room, small_room, low and tee_gpus, in the order of `keys_of`.
        was_active: GPUs that became active or empty, and whether they were active before; cleared by the scheduler.
        tee_gpus: GPUs with T and small requests only, by use. Between operations at most one is below 75 %: the open
            one.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._three_quarters = -(-3 * capacity // 4)
        self._bounds = (capacity // 8, capacity // 4, capacity // 3, capacity // 2)
        self.gpus: dict[int, Gpu] = {}
        self.where: dict[RequestId, Gpu] = {}
        self.sizes: dict[RequestId, int] = {}
        self.used = 0
        self.mixed: int | None = None
        self.singles: Ordered[int] = Ordered(capacity)
        self.fillers: Ordered[RequestId] = Ordered(capacity)
        self.partial: dict[Class, dict[int, None]] = {Class.S: {}, Class.M: {}}
        self.tee_room: Ordered[int] = Ordered(capacity)
        self.small_room: Ordered[int] = Ordered(capacity)
        self.low: Ordered[int] = Ordered(capacity)
        self.tee_gpus: Ordered[int] = Ordered(capacity)
        self.ordered = (self.singles, self.tee_room, self.small_room, self.low, self.tee_gpus)
        self._vacant: list[int] = []  # numbers below len(ever made); some may be in use again
        self._ever = 0
        self._barred: frozenset[int] = frozenset()
        self.was_active: dict[int, bool] = {}
        self._journal: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self._marks = 0

    # ---- what is

    def class_of(self, size: int) -> Class:
        """As `classes.class_of` for this capacity."""
        eighth, quarter, third, half = self._bounds
        if size <= quarter:
            return _T if size > eighth else _SMALL
        if size <= third:
            return _S
        return _M if size <= half else _L

    def is_low(self, used: int) -> bool:
        """Below 75 % of C."""
        return used < self._three_quarters

    def role(self, gpu: Gpu) -> Class:
        """The largest class on it; T where all are small."""
        if gpu.large:
            return _L
        if gpu.mids:
            return self.class_of(next(iter(gpu.mids.values())))
        return _T

    def tee_count(self, gpu: Gpu) -> int:
        """How many moves take all T and small requests away, at most."""
        return len(gpu.tees) + groups_at_most(gpu.small_total, self.capacity)

    def tee_limit(self, gpu: Gpu) -> int | None:
        """How many T, groups included, may stand on it; None where the capacity alone limits them."""
        if gpu.number == self.mixed:
            return None
        if gpu.large:
            return TEES_COMBINED if gpu.mids else None
        return self.tee_limit_beside(self.role(gpu), len(gpu.mids)) if gpu.mids else None

    def tee_limit_beside(self, role: Class, count: int) -> int:
        """How many T may stand beside this many S, or M."""
        return TEES_COMPLETE[role] if count == FULL[role] else TEES_OPEN

    def lowest_tee_gpu(self) -> Gpu | None:
        """The T-GPU that has least."""
        return next((self.gpus[number] for _, number in self.tee_gpus.at_least(0)), None)

    def rooms_to_grow(self, gpu: Gpu) -> tuple[int, int]:
        """How many tokens its requests may grow by, and how many its small ones, before something must leave."""
        free = self.capacity - gpu.used
        limit = self.tee_limit(gpu)
        if limit is None:
            return free, free
        return free, (limit - len(gpu.tees) + 1) * self.capacity // 8 - gpu.small_total

    # ---- what changes

    def put(self, request: RequestId, size: int, number: int) -> None:
        """A request that runs nowhere begins on a GPU; one that is not active becomes so."""
        self._undo_by(self._take, request)
        self._put(request, size, number)

    def take(self, request: RequestId) -> int:
        """A request leaves its GPU; returns its size."""
        size, gpu = self.sizes[request], self.where[request]
        self._undo_by(self._put, request, size, gpu.number)
        self._take(request)
        if gpu.number == self.mixed and not len(gpu):
            self.mix(None)
        return size

    def resize(self, request: RequestId, size: int) -> None:
        """A request on its GPU has this size from now on, and the class that goes with it."""
        self._undo_by(self._resize, request, self.sizes[request])
        self._resize(request, size)

    def resize_all(self, sizes: Iterable[tuple[RequestId, int]]) -> None:
        """Many requests grow where they are, each within its class and all within their GPUs; not to be undone."""
        touched: dict[int, Gpu] = {}
        for request, size in sizes:
            gpu = self.where[request]
            self._stretch(gpu, request, size)
            touched[gpu.number] = gpu
        for gpu in touched.values():
            self._index(gpu)

    def mix(self, number: int | None) -> None:
        """Makes a GPU without L the mixed one; None for that none is."""
        self._undo_by(self._mix, self.mixed)
        self._mix(number)

    def hold(self, gpu: Gpu, held: bool) -> None:
        """Whether T are kept away from a GPU that may have been emptied meanwhile."""
        if gpu.held != held:
            gpu.held = held
            if self.gpus.get(gpu.number) is gpu:
                self._index(gpu)

    def vacant(self) -> int:
        """The lowest number that no active GPU has, and that is not barred."""
        while self._vacant:
            number = self._vacant[0]
            if number not in self.gpus and number not in self._barred:
                return number
            heapq.heappop(self._vacant)
        number = self._ever
        while number in self._barred:
            number += 1
        return number

    def bar(self, numbers: Iterable[int]) -> None:
        """Keeps numbers from being `vacant`, whatever leaves them, until the next call."""
        for number in self._barred:
            if number < self._ever:
                heapq.heappush(self._vacant, number)
        self._barred = frozenset(numbers)

    # ---- undoing

    def mark(self) -> int:
        """Begins to write down what changes; `forget` or `rollback` ends it. Marks nest."""
        self._marks += 1
        return len(self._journal)

    def forget(self, mark: int) -> None:
        """Keeps what has changed since the mark."""
        self._marks -= 1
        if not self._marks:
            self._journal.clear()

    def rollback(self, mark: int) -> None:
        """Undoes what has changed since the mark."""
        while len(self._journal) > mark:
            undo, arguments = self._journal.pop()
            undo(*arguments)
        self.forget(mark)

    def _undo_by(self, undo: Callable[..., object], *arguments: object) -> None:
        """Writes down the call that undoes what is done next."""
        if self._marks:
            self._journal.append((undo, arguments))

    # ---- the same without the journal

    def _put(self, request: RequestId, size: int, number: int) -> None:
        gpu = self.gpus.get(number)
        if gpu is None:
            gpu = self.gpus[number] = Gpu(number)
            self.was_active.setdefault(number, False)
            self._vacate_below(number)
        self._enter(gpu, request, size)
        self.where[request] = gpu
        self._index(gpu)

    def _take(self, request: RequestId) -> None:
        gpu = self.where.pop(request)
        self._leave(gpu, request, self.sizes.pop(request))
        self._index(gpu)

    def _resize(self, request: RequestId, size: int) -> None:
        gpu = self.where[request]
        before = self.sizes[request]
        if self.class_of(before) is self.class_of(size):  # the order of requests stays
            self._stretch(gpu, request, size)
        else:
            self._leave(gpu, request, before)
            self._enter(gpu, request, size)
        self._index(gpu)

    def _mix(self, number: int | None) -> None:
        for changed in (self.mixed, number):
            self.mixed = number
            if changed in self.gpus:
                self._index(self.gpus[changed])

    def _holder(self, gpu: Gpu, size: int) -> dict[RequestId, int]:
        """Where a GPU keeps requests of this size."""
        kind = self.class_of(size)
        if kind is _SMALL:
            return gpu.small
        if kind is _T:
            return gpu.tees
        return gpu.large if kind is _L else gpu.mids

    def _enter(self, gpu: Gpu, request: RequestId, size: int) -> None:
        holder = self._holder(gpu, size)
        holder[request] = size
        if holder is gpu.small:
            gpu.small_total += size
        gpu.used += size
        self.used += size
        self.sizes[request] = size

    def _leave(self, gpu: Gpu, request: RequestId, size: int) -> None:
        holder = self._holder(gpu, size)
        del holder[request]
        if holder is gpu.small:
            gpu.small_total -= size
        gpu.used -= size
        self.used -= size

    def _stretch(self, gpu: Gpu, request: RequestId, size: int) -> None:
        """Another size of the same class."""
        holder = self._holder(gpu, size)
        change = size - holder[request]
        holder[request] = size
        if holder is gpu.small:
            gpu.small_total += change
        gpu.used += change
        self.used += change
        self.sizes[request] = size

    def _vacate_below(self, number: int) -> None:
        """All numbers below one that is used, and were never used, are vacant."""
        while self._ever < number:
            heapq.heappush(self._vacant, self._ever)
            self._ever += 1
        self._ever = max(self._ever, number + 1)

    # ---- the ordered sets

    def _index(self, gpu: Gpu) -> None:
        """Puts a GPU into the sets where it belongs now."""
        number = gpu.number
        apart = number == self.mixed
        role = self.role(gpu)
        keys = self.keys_of(gpu, role, apart)
        if keys != gpu.keys:
            for ordered, old, new in zip(self.ordered, gpu.keys, keys, strict=True):
                if old != new:
                    if old is not None:
                        ordered.remove(old, number)
                    if new is not None:
                        ordered.add(new, number)
            gpu.keys = keys
        listed = _NOTHING if apart or role is _L else gpu.mids
        if listed != gpu.listed:
            for request, size in gpu.listed.items():
                self.fillers.remove(size, request)
            for request, size in listed.items():
                self.fillers.add(size, request)
            gpu.listed = dict(listed)
        partial = role if role in FULL and len(gpu.mids) < FULL[role] and not apart else None
        if partial is not gpu.partial:
            if gpu.partial is not None:
                del self.partial[gpu.partial][number]
            if partial is not None:
                self.partial[partial][number] = None
            gpu.partial = partial
        if not gpu.used:
            del self.gpus[number]
            self.was_active.setdefault(number, True)
            heapq.heappush(self._vacant, number)

    def keys_of(self, gpu: Gpu, role: Class, apart: bool) -> tuple[int | None, ...]:
        """Its keys in singles, tee_room, small_room, low and tee_gpus."""
        used = gpu.used
        if not used:
            return NO_KEYS
        free = self.capacity - used
        if apart:
            return (None, free, free, None, None) if free and not gpu.held else NO_KEYS
        single = None
        if role is _L and not gpu.mids:
            single = self.capacity - next(iter(gpu.large.values()))
        alone = used if role is _T else None
        if gpu.held:
            return single, None, None, None, alone
        low = None
        if used < self._three_quarters and (role is _L or (role is _M and len(gpu.mids) == FULL[_M])):
            low = used
        if not free:
            return single, None, None, low, alone
        if single is not None or alone is not None:
            return single, free, free, low, alone
        return None, *self._rooms(gpu, free), low, None

    def _rooms(self, gpu: Gpu, free: int) -> tuple[int | None, int | None]:
        """The largest T that a GPU with S or M takes, and how many tokens of small requests; None for none."""
        limit = self.tee_limit(gpu) or 0
        tee = free if self.tee_count(gpu) < limit else None
        if len(gpu.tees) >= limit:
            return tee, None
        small = min(self.rooms_to_grow(gpu))
        return tee, small if small > 0 else None
