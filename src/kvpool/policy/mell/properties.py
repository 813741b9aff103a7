"""The five properties of Theorem 1, the sums of a fleet, and the bounds that follow from them."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool.errors import AuditError
from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.fleet import Fleet
from kvpool.policy.mell.gpu import FULL, Gpu

__all__ = ["broken", "check"]


def check(fleet: Fleet) -> None:
    """Raises AuditError where a sum, an ordered set or one of the five properties is broken. Looks at every request."""
    found = [*_sums(fleet), *_sets(fleet), *broken(fleet)]
    if found:
        raise AuditError(f"{len(found)} faults of a placement on {len(fleet.gpus)} GPUs: {'; '.join(found[:5])}")


def broken(fleet: Fleet) -> list[str]:
    """Which of the five properties do not hold, and where. One open GPU of each role, and the mixed one, are exempt."""
    found = []
    low_tees = 0
    roles = {number: fleet.role(gpu) for number, gpu in fleet.gpus.items() if number != fleet.mixed}
    fillers = [
        size
        for number, gpu in fleet.gpus.items()
        if roles.get(number, Class.L) is not Class.L
        for size in gpu.mids.values()
    ]
    smallest = min(fillers, default=fleet.capacity + 1)
    any_tee_gpu = Class.T in roles.values()
    incomplete = {Class.S: 0, Class.M: 0}
    for number, gpu in fleet.gpus.items():
        if number == fleet.mixed:
            continue
        role = roles[number]
        if role in FULL and len(gpu.mids) < FULL[role]:
            incomplete[role] += 1
            continue
        if role is Class.T:
            low_tees += fleet.is_low(gpu.used)
            continue
        if role is Class.L and not gpu.mids and smallest <= fleet.capacity - _largest(gpu):
            found.append(f"property 4: GPU {number} has room beside its L for an S or M of {smallest}")
        if role is not Class.S and any_tee_gpu and fleet.is_low(gpu.used):
            found.append(f"property 5: GPU {number} uses {gpu.used} of {fleet.capacity} while there are T-GPUs")
    found += [f"property 1: {incomplete[Class.M]} M-GPUs with one M"] if incomplete[Class.M] > 1 else []
    found += [f"property 2: {incomplete[Class.S]} S-GPUs with less than three S"] if incomplete[Class.S] > 1 else []
    found += [f"property 3: {low_tees} T-GPUs below 75 %"] if low_tees > 1 else []
    return found


def _largest(gpu: Gpu) -> int:
    return max(gpu.large.values())


def _sums(fleet: Fleet) -> Iterable[str]:
    """Checks the capacity, and each GPU's sums."""
    seen = 0
    for number, gpu in fleet.gpus.items():
        sizes = dict(gpu.requests())
        seen += len(sizes)
        if gpu.used != sum(sizes.values()) or gpu.small_total != sum(gpu.small.values()):
            yield f"GPU {number} says {gpu.used} tokens, its requests have {sum(sizes.values())}"
        if not 0 < gpu.used <= fleet.capacity:
            yield f"GPU {number} holds {gpu.used} of {fleet.capacity} tokens"
        if gpu.held:
            yield f"GPU {number} is held between operations"
        for request, size in sizes.items():
            if fleet.where.get(request) is not gpu or fleet.sizes.get(request) != size:
                yield f"request {request!r} of {size} tokens is on GPU {number}, but not in the tables"
        for holder, kinds in (
            (gpu.large, (Class.L,)),
            (gpu.mids, (Class.S, Class.M)),
            (gpu.tees, (Class.T,)),
            (gpu.small, (Class.SMALL,)),
        ):
            if any(fleet.class_of(size) not in kinds for size in holder.values()):
                yield f"GPU {number} has a request in a class that is not its size's"
        limit = fleet.tee_limit(gpu)
        if limit is not None and fleet.tee_count(gpu) > limit:
            yield f"GPU {number} has {fleet.tee_count(gpu)} T beside its S or M; {limit} may be there"
        if len(gpu.large) > 1 or (gpu.large and len(gpu.mids) > 1):
            yield f"GPU {number} has {len(gpu.large)} L and {len(gpu.mids)} S or M"
        if number == fleet.mixed:
            if gpu.large:
                yield f"GPU {number}, the mixed one, has an L"
        elif not gpu.large and len({fleet.class_of(size) for size in gpu.mids.values()}) > 1:
            yield f"GPU {number} has both S and M"
    if fleet.mixed is not None and fleet.mixed not in fleet.gpus:
        yield f"GPU {fleet.mixed} is the mixed one, and has nothing"
    if seen != len(fleet.where) or seen != len(fleet.sizes):
        yield f"{seen} requests are on GPUs, {len(fleet.where)} in the tables"


def _sets(fleet: Fleet) -> Iterable[str]:
    """Checks that the ordered sets agree with the GPUs."""
    columns: list[set[tuple[int, int]]] = [set() for _ in range(5)]
    fillers: set[tuple[int, object]] = set()
    for number, gpu in fleet.gpus.items():
        for column, key in zip(columns, fleet.keys_of(gpu, fleet.role(gpu), number == fleet.mixed), strict=True):
            if key is not None:
                column.add((key, number))
        if not gpu.large and number != fleet.mixed:
            fillers.update((size, request) for request, size in gpu.mids.items())
    names = ("singles", "tee_room", "small_room", "low", "tee_gpus")
    for name, ordered, column in zip(names, fleet.ordered, columns, strict=True):
        if set(ordered.at_least(0)) != column:
            yield f"the ordered set {name} is not what the GPUs say"
    if set(fleet.fillers.at_least(0)) != fillers:
        yield "the ordered set fillers is not what the GPUs say"
