"""Weighted water-filling in whole units: how much each model should have.

Level-filling gives each model x = slope * level, held between its low and its high mark, at the one level at which all
together use what there is. Then no unit can move to a model that has less for its slope: the smallest x / slope is as
large as possible, then the second smallest, and so on (weighted max-min fairness).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.quotas.arguments import known, number_above_0, whole
from kvpool.policy.quotas.tier import QuotaRule

__all__ = ["level_fill", "reserves_fit", "targets", "targets_of"]

_SLOPE_MIN: Final = 1e-9


def level_fill(total: int, slopes: Sequence[float], lows: Sequence[int], highs: Sequence[int]) -> list[int]:
    """Divides `total` units; the result sums up to min(total, sum of highs) exactly.

    For i that could have more and j that could have less: (x_i + 1) / slope_i >= x_j / slope_j. So no unit is better
    placed elsewhere. Ties go to the first.

    REQUIRES: 0 <= low <= high for each, slopes above 0 where low < high, sum of lows <= total.
    """
    if sum(highs) <= total:
        return list(highs)
    moving = [at for at, low in enumerate(lows) if low < highs[at]]
    found = list(lows)
    level = _level(total - sum(lows), moving, slopes, lows, highs)
    for at in moving:
        units = int(slopes[at] * level)
        if units > lows[at]:
            found[at] = units if units < highs[at] else highs[at]
    left = total - sum(found)
    while left < 0:  # rounding of floats: at most a unit or so for each model
        worst = max((at for at in moving if found[at] > lows[at]), key=lambda at: found[at] / slopes[at])
        found[worst] -= 1
        left += 1
    if left > 0:
        _hand_out(left, found, moving, slopes, highs)
    return found


def _level(
    room: int, moving: Sequence[int], slopes: Sequence[float], lows: Sequence[int], highs: Sequence[int]
) -> float:
    """The level at which the models use `room` units above their low marks, by walking over the marks in order."""
    marks = [(lows[at] / slopes[at], slopes[at]) for at in moving]
    marks += [(highs[at] / slopes[at], -slopes[at]) for at in moving]
    marks.sort()
    level = rising = used = 0.0
    for mark, change in marks:
        more = (mark - level) * rising
        if used + more >= room and rising > 0:
            break
        used += more
        level = mark
        rising += change
    return level + (room - used) / rising if rising > 0 else level


def _hand_out(
    left: int, found: list[int], moving: Sequence[int], slopes: Sequence[float], highs: Sequence[int]
) -> None:
    """The units that rounding down has left, each to the model that has the least for its slope with it."""
    waiting = [((found[at] + 1) / slopes[at], at) for at in moving if found[at] < highs[at]]
    heapify(waiting)
    for _ in range(left):
        at = waiting[0][1]
        found[at] += 1
        full = found[at] >= highs[at]
        heapreplace(waiting, (float("inf") if full else (found[at] + 1) / slopes[at], at))


def targets(capacity: int, rules: Mapping[str, QuotaRule], demands: Mapping[str, float]) -> dict[str, int]:
    """Quotas of all models in one tier, each within [reserve, limit]; they sum up to min(capacity, sum of limits).

    First every model gets up to its demand, in proportion to weight * demand: models that all lack memory then have the
    same use / (weight * demand), which is R of eq. 2 (MuxServe §3.3, where R is normalised by rates). What nobody needs
    goes to all in proportion to their weights, for their prompt caches.

    Args:
        capacity: Units.
        rules: By name of model.
        demands: Units that each model needs, by name; a model that is not named needs none.

    Raises:
        ArgumentError: A demand is negative or not finite, or of an unknown model; the capacity is below 1, or the
            reserves together exceed it.
        ArgumentTypeError: A demand is no number, or the capacity no int.
    """
    reserves_fit(capacity, rules)
    for model, demand in demands.items():
        number_above_0(demand, f"the demand of {known(model, rules)!r}", zero=True)
    return targets_of(capacity, rules, demands)


def reserves_fit(capacity: int, rules: Mapping[str, QuotaRule]) -> None:
    """Raises ArgumentError for reserves above the capacity or one below 1, ArgumentTypeError if it is no int."""
    reserved = sum(rule.reserve for rule in rules.values())
    if reserved > whole(capacity, "capacity", 1):
        raise ArgumentError(f"the reserves are {reserved} units, and the capacity is {capacity}")


def targets_of(
    capacity: int,
    rules: Mapping[str, QuotaRule],
    demands: Mapping[str, float],
    parts: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """As `targets`; what is scarce is divided in proportion to weight * `parts`, in place of the demands, if there are.

    REQUIRES: reserves that fit, finite demands and parts from 0 of known models.
    """
    lows = [rule.reserve for rule in rules.values()]
    limits = [rule.limit_of(capacity) for rule in rules.values()]
    wanted = [demands.get(model, 0.0) for model in rules]
    weights = [rule.weight for rule in rules.values()]
    highs = []
    for low, limit, demand in zip(lows, limits, wanted, strict=True):
        high = limit if demand >= limit else -int(-demand // 1)
        highs.append(high if high > low else low)
    weights = _slopes(weights)
    shared = wanted if parts is None else [parts.get(model, 0.0) for model in rules]
    slopes = _slopes([weight * part for weight, part in zip(weights, _slopes(shared), strict=True)])
    needed = level_fill(capacity, slopes, lows, highs)
    spare = capacity - sum(needed)
    if spare > 0:
        room = [limit - units for limit, units in zip(limits, needed, strict=True)]
        more = level_fill(spare, weights, [0] * len(room), room)
        needed = [units + added for units, added in zip(needed, more, strict=True)]
    return dict(zip(rules, needed, strict=True))


def _slopes(values: Sequence[float]) -> list[float]:
    """In proportion to the largest, and not so small that levels leave the range of floats."""
    largest = max(values, default=0.0) or 1.0
    least = _SLOPE_MIN * largest
    return [value / largest if value > least else _SLOPE_MIN for value in values]
