"""Taking over requests that run already: a scheduler without memory of how they came to be where they are.

Only the placement is state (`Fleet`), so a placement that a scheduler of MELL has made is taken over as it is. Any
other one is made legal: what may not stay on its GPU is placed again, and the five properties are restored.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.policy.mell.classes import Class
from kvpool.policy.mell.fleet import Fleet
from kvpool.policy.mell.growth import GrowthOperation
from kvpool.policy.mell.plan import RequestId
from kvpool.policy.mell.settings import Settings

__all__ = ["adopted"]


def adopted(capacity: int, settings: Settings, running: Mapping[int, Mapping[RequestId, int]]) -> Fleet:
    """A fleet with these requests, as far as possible where they are.

    Args:
        capacity: C, tokens of KV cache on each GPU.
        settings: The scheduler's.
        running: The requests of each GPU, with their sizes, 1 to C each. Together they may be more than C.
    """
    fleet = Fleet(capacity)
    legal = {number: _legal(fleet, requests) for number, requests in sorted(running.items()) if requests}
    mixed = _mixed(fleet, running, legal)
    misfits: list[tuple[RequestId, int]] = []
    for number, may_stay in legal.items():
        stay = _fitting(running[number], capacity) if number == mixed else may_stay
        for request, size in running[number].items():
            if request in stay:
                fleet.put(request, size, number)
            else:
                misfits.append((request, size))
    if mixed is not None:
        fleet.mix(mixed)
    operation = GrowthOperation(fleet, settings, {})
    for gpu in list(fleet.gpus.values()):
        operation.trim(gpu)
    for request, size in sorted(misfits, key=lambda entry: -entry[1]):
        _place(operation, request, size)
    singles = [gpu.number for gpu in fleet.gpus.values() if gpu.large and not gpu.mids]
    operation.to_refill.update(dict.fromkeys(singles))
    operation.restore()
    fleet.was_active.clear()
    return fleet


def _place(operation: GrowthOperation, request: RequestId, size: int) -> None:
    """As a request that arrives."""
    kind = operation.fleet.class_of(size)
    if kind is Class.L:
        operation.place_large(request, size)
    elif kind > Class.T:
        operation.place_mid(request, size)
    else:
        operation.begin(request, size, operation.place_for_tee(size, kind is Class.SMALL, None))


def _fitting(requests: Mapping[RequestId, int], capacity: int) -> dict[RequestId, int]:
    """Those that may stay: the largest first, as many as C has room for."""
    stay: dict[RequestId, int] = {}
    free = capacity
    for request, size in sorted(requests.items(), key=lambda entry: -entry[1]):
        if size <= free:
            stay[request] = size
            free -= size
    return stay


def _legal(fleet: Fleet, requests: Mapping[RequestId, int]) -> dict[RequestId, int]:
    """Those that may stay on a GPU that is not the mixed one: an L and an S or M, or S, or M; and T beside them."""
    fitting = _fitting(requests, fleet.capacity)
    kinds = {request: fleet.class_of(size) for request, size in fitting.items()}
    larges = [request for request, kind in kinds.items() if kind is Class.L]
    mids = [request for request, kind in kinds.items() if kind in (Class.S, Class.M)]
    if larges:
        kept = mids[:1]
    else:
        groups = [[request for request in mids if kinds[request] is kind] for kind in (Class.M, Class.S)]
        kept = max(groups, key=len)
    stay = {*larges, *kept}
    return {request: size for request, size in fitting.items() if kinds[request] <= Class.T or request in stay}


def _mixed(
    fleet: Fleet,
    running: Mapping[int, Mapping[RequestId, int]],
    legal: Mapping[int, Mapping[RequestId, int]],
) -> int | None:
    """The GPU that becomes the mixed one: of those without L that may not stay as they are, the one with most use."""
    found: int | None = None
    most = 0
    for number, stay in legal.items():
        requests = running[number]
        used = sum(requests.values())
        kinds = [fleet.class_of(size) for size in requests.values()]
        if Class.L in kinds or used > fleet.capacity or used <= most:
            continue
        if len(stay) < len(requests) or _crowded(fleet, requests):
            found, most = number, used
    return found


def _crowded(fleet: Fleet, requests: Mapping[RequestId, int]) -> bool:
    """Whether more T stand beside S or M than may, unless it is the mixed GPU."""
    probe = Fleet(fleet.capacity)
    for request, size in requests.items():
        probe.put(request, size, 0)
    limit = probe.tee_limit(probe.gpus[0])
    return limit is not None and probe.tee_count(probe.gpus[0]) > limit
