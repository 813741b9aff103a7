"""Whether a model may have more units, and whose historical units make room for them.

Why eviction alone always suffices. Let C be the capacity, r, a, h a model's reserve, active and historical units.

  T1. sum over models of max(a, r) <= C.                                                    (`admit` sees to it)
  P.  `reclaim` leaves each neighbour o its active units, and its historical ones within its reserve: it keeps
      p_o = max(a_o, min(a_o + h_o, r_o)) <= max(a_o, r_o).

Let `admit` allow model m to grow by u active units. T1 holds after the growth, so with a = a_m + u

      sum over o != m of p_o  <=  sum over o != m of max(a_o, r_o)  <=  C - max(a, r_m)  <=  C - a.

What is free, what neighbours have beyond p_o, and m's own historical units are together C - sum of p_o - a_m, hence at
least a - a_m = u. So every growth that is admitted is served by eviction, and no active block is ever touched. With
a = r_m this is the promise of a reserve: T1 does not change while a_m <= r_m, so a model is always admitted up to its
reserve, at once, whatever its neighbours have cached or run there meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.errors import OutOfQuota
from kvpool.policy.quotas.arguments import known, whole
from kvpool.policy.quotas.filling import level_fill
from kvpool.policy.quotas.tier import Tier

__all__ = ["Eviction", "Room", "admit", "reclaim"]


class Eviction(NamedTuple):
    """Historical units of one model that make room, the least recently used first.

    Attributes:
        model: Whose they are.
        units: How many leave this tier.
        swapped: How many of these go to DRAM; the others are dropped.
    """

    model: str
    units: int
    swapped: int


class Room(NamedTuple):
    """Where the units of a growth come from: `free` and the evictions are at least what was asked for.

    They are more only where a model was above its limit before: what is beyond goes with them.

    Attributes:
        free: Units that nobody occupies.
        evictions: The model's own first, then those of its neighbours by their names.
    """

    free: int
    evictions: tuple[Eviction, ...]


def admit(tier: Tier, model: str, units: int) -> None:
    """Checks that a model may have `units` more active ones. Pure: it changes nothing.

    Raises:
        OutOfQuota: Its active units would exceed its limit, or T1 would break: the rest of the capacity is active or
            reserved for others. Only the end of requests changes that, so the caller waits, or preempts one.
        ArgumentError: The model is unknown, or `units` negative.
        ArgumentTypeError: `units` is no int.
    """
    rule = tier.rules[known(model, tier.rules)]
    whole(units, "units")
    active = tier.uses[model].active
    limit = rule.limit_of(tier.capacity)
    if units and active + units > limit:
        raise _refused(tier, model, units, f"{active} of its limit of {limit} units are active")
    grown = max(active + units, rule.reserve) - max(active, rule.reserve)
    if tier.committed + grown > tier.capacity:
        raise _refused(tier, model, units, f"{tier.committed} of {tier.capacity} are active or reserved")


def reclaim(tier: Tier, model: str, units: int, dram: Tier | None = None) -> Room:
    """Makes room for `units` more active units of a model, by eviction alone.

    In this order:
      1. The model's own historical units, as far as it would exceed its limit: nothing else helps there.
      2. Free units.
      3. Historical units of neighbours beyond their quotas: of the one furthest beyond, until the next is as far.
      4. The model's own historical units.
      5. Historical units of neighbours within their quotas, but beyond their reserves: of the one with the least left
         to its quota. Without these, a growth could be refused while there is something to evict.

    No neighbour falls below its reserve. What leaves HBM goes to DRAM as far as its owner's DRAM quota and the free
    units there allow, and is dropped otherwise.

    Args:
        tier: HBM, or DRAM by itself.
        model: Who grows.
        units: How many more active units.
        dram: The tier below; None: what is evicted is dropped.

    Raises:
        OutOfQuota: `admit` refuses it.
        ArgumentError, ArgumentTypeError: As `admit`.
    """
    admit(tier, model, units)
    use, limit = tier.uses[model], tier.rules[model].limit_of(tier.capacity)
    evicted = {model: min(use.historical, max(0, use.active + use.historical + units - limit))}
    missing = units - evicted[model]
    free = max(0, min(tier.free, missing))
    missing -= free
    if missing > 0:
        missing -= _from_neighbours(tier, model, missing, evicted, within=False)
    if missing > 0:
        own = min(use.historical - evicted[model], missing)
        evicted[model] += own
        missing -= own
    if missing > 0:
        missing -= _from_neighbours(tier, model, missing, evicted, within=True)
    assert missing <= 0, "T1 broke: see the proof above"
    return Room(free, _evictions(model, evicted, dram))


def _from_neighbours(tier: Tier, model: str, missing: int, evicted: dict[str, int], within: bool) -> int:
    """Evicts up to `missing` units of other models; returns how many. Adds them to `evicted`.

    The models that are furthest beyond their quotas come first: this is level-filling from above. What a model keeps is
    x units beyond its quota, the same for all that give, except those that have nothing more to give.
    """
    names: list[str] = []
    excess: list[int] = []
    givable: list[int] = []
    for name in sorted(tier.rules):  # so that the order of the dict does not decide which gives the odd unit
        rule, use = tier.rules[name], tier.uses[name]
        beyond = use.active + use.historical - evicted.get(name, 0) - tier.quota(name)
        floor = rule.reserve if within else max(rule.reserve, tier.quota(name))
        can = min(use.historical - evicted.get(name, 0), beyond + tier.quota(name) - floor)
        if name != model and can > 0:
            names.append(name)
            excess.append(beyond)
            givable.append(can)
    given = _from_the_top(missing, excess, givable)
    for name, count in zip(names, given, strict=True):
        if count:
            evicted[name] = evicted.get(name, 0) + count
    return sum(given)


def _from_the_top(wanted: int, heights: Sequence[int], givable: Sequence[int]) -> list[int]:
    """Takes `wanted` units, or all that can be given, always from the highest that can give.

    What stays of each is level-filling with slope 1 between height - givable and height, moved up to be from 0.
    """
    if not heights:
        return []
    base = min(height - can for height, can in zip(heights, givable, strict=True))
    highs = [height - base for height in heights]
    lows = [high - can for high, can in zip(highs, givable, strict=True)]
    stays = level_fill(max(sum(lows), sum(highs) - wanted), [1.0] * len(highs), lows, highs)
    return [high - left for high, left in zip(highs, stays, strict=True)]


def _evictions(model: str, evicted: dict[str, int], dram: Tier | None) -> tuple[Eviction, ...]:
    """The evictions of `Room`, for the growth of a model. The first have the free units of DRAM."""
    free = dram.free if dram is not None else 0
    found = []
    for owner in (model, *sorted(evicted.keys() - {model})):
        units, swapped = evicted[owner], 0
        if dram is not None and owner in dram.rules:
            use, limit = dram.uses[owner], dram.rules[owner].limit_of(dram.capacity)
            allowed = min(dram.quota(owner), limit) - use.active - use.historical
            swapped = max(0, min(units, allowed, free))
            free -= swapped
        if units:
            found.append(Eviction(owner, units, swapped))
    return tuple(found)


def _refused(tier: Tier, model: str, units: int, why: str) -> OutOfQuota:
    use, rule = tier.uses[model], tier.rules[model]
    return OutOfQuota(
        f"{model!r} asked for {units} units: {why}; it has {use.active} active and {use.historical} historical, and "
        f"{tier.free} are free",
        model=model,
        requested=units,
        free=tier.free,
        active=use.active,
        evictable=use.historical,
        reserve=rule.reserve,
        limit=rule.limit_of(tier.capacity),
        capacity=tier.capacity,
    )
