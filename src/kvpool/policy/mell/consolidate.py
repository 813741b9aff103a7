"""Emptying GPUs with the moves that an operation has left.

The properties allow one open GPU of each role. In a small fleet these are a large part of all GPUs, so the requests of
several of them are put on one, the *mixed* GPU, as long as they fit. It counts as one more open GPU: everything else
goes on as if it were not there, and its requests go back to the other GPUs as soon as these have room for all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.gpu import Gpu
from kvpool.policy.mell.mids import MidOperation
from kvpool.policy.mell.operation import Unit

__all__ = ["consolidate"]


def consolidate(operation: MidOperation, budget: int) -> None:
    """Saves GPUs, one after the other, as long as one can be emptied whole with the moves that are left."""
    fleet = operation.fleet
    while True:
        left = budget - len(operation.moves)
        free = len(fleet.gpus) * fleet.capacity - fleet.used
        if left <= 0 or free < fleet.capacity + (len(fleet.gpus) - 1) * operation.settings.reserve:
            return
        saved = (
            _attempt(operation, fleet.lowest_tee_gpu(), budget, _spread)
            or _attempt(operation, fleet.gpus.get(_number(fleet.mixed)), budget, _dissolve)
            or _merge(operation, budget)
        )
        if not saved:
            return


def _number(mixed: int | None) -> int:
    return -1 if mixed is None else mixed


def _attempt(
    operation: MidOperation, gpu: Gpu | None, budget: int, empty: Callable[[MidOperation, Gpu, int], bool]
) -> bool:
    """Empties a GPU; undone if it did not succeed, took too many moves, or saved no GPU."""
    fleet = operation.fleet
    if gpu is None or fleet.tee_count(gpu) + len(gpu.mids) > budget - len(operation.moves):
        return False
    mark, moves, count = fleet.mark(), len(operation.moves), len(fleet.gpus)
    operation.hold(gpu)
    if empty(operation, gpu, budget):
        operation.restore()
        if len(operation.moves) <= budget and len(fleet.gpus) < count:
            fleet.forget(mark)
            return True
    fleet.rollback(mark)
    del operation.moves[moves:]
    operation.to_refill.clear()
    operation.release_all()
    return False


# ---- emptying a T-GPU into the room beside others


def _spread(operation: MidOperation, gpu: Gpu, budget: int) -> bool:
    """Moves T and small requests to GPUs with room, the largest first; returns whether it moved all of them."""
    fleet = operation.fleet
    for request, size in sorted(gpu.tees.items(), key=lambda entry: -entry[1]):
        found = operation.best(fleet.tee_room, size, gpu.number)
        if found is None or len(operation.moves) >= budget:
            return False
        operation.relocate((request,), found)
    while gpu.small:
        if len(operation.moves) >= budget:
            return False
        unit, found = _group_that_fits(operation, gpu)
        if unit is None or found is None:
            return False
        operation.relocate(unit.requests, found)
    return True


def _group_that_fits(operation: MidOperation, gpu: Gpu) -> tuple[Unit | None, int | None]:
    """All small requests and the GPU where they just fit, or as many as fit on the GPU with the most room."""
    fleet = operation.fleet
    whole = operation.group(gpu, fleet.capacity, fleet.capacity)
    if whole is not None:
        found = operation.best(fleet.small_room, whole.size, gpu.number)
        if found is not None:
            return whole, found
    room, found = next(fleet.small_room.at_most(fleet.capacity), (0, -1))
    part = operation.group(gpu, room, room)
    return part, found


def _dissolve(operation: MidOperation, gpu: Gpu, budget: int) -> bool:
    """Places the mixed GPU's requests as if they were new; returns whether that took no new GPU."""
    fleet = operation.fleet
    count = len(fleet.gpus)
    for request, size in sorted(gpu.mids.items(), key=lambda entry: -entry[1]):
        operation.place_mid(request, size)
        if len(fleet.gpus) > count or len(operation.moves) > budget:
            return False
    return fleet.gpus.get(gpu.number) is not gpu or _spread(operation, gpu, budget)


# ---- putting what two open GPUs have on one


def _merge(operation: MidOperation, budget: int) -> bool:
    """Merges two open GPUs that fit on one into the mixed GPU: the pair that takes the fewest moves."""
    fleet = operation.fleet
    opened = [fleet.gpus[number] for role in (Class.M, Class.S) for number in fleet.partial[role]]
    lowest = fleet.lowest_tee_gpu()
    opened += [lowest] if lowest is not None else []
    if fleet.mixed is not None:
        pairs = [(gpu, fleet.gpus[fleet.mixed]) for gpu in opened]
    else:
        pairs = [(source, gpu) for source in opened for gpu in opened if source is not gpu]
    room = fleet.capacity - operation.settings.reserve
    pairs = [pair for pair in pairs if pair[0].used + pair[1].used <= room]
    if not pairs:
        return False
    source, gpu = min(pairs, key=lambda pair: fleet.tee_count(pair[0]) + len(pair[0].mids))

    def into_one(operation: MidOperation, source: Gpu, budget: int) -> bool:
        fleet.mix(gpu.number)
        for request in [*source.mids, *source.tees]:
            operation.relocate((request,), gpu.number)
        while source.small:
            unit = operation.group(source, fleet.capacity, fleet.capacity)
            assert unit is not None
            operation.relocate(unit.requests, gpu.number)
        return True

    return _attempt(operation, source, budget, into_one)
