"""What the searches for a placement share: candidates, estimates of units, greedy placement, and improvement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Final, NamedTuple

from kvpool.errors import ArgumentError, OutOfMemory
from kvpool.policy.multiplexing.estimate import Candidate, Machines, ServedModel, Unit, candidates, estimate_unit

__all__ = ["Placed", "PlacedUnit", "Placement", "Search", "levelled"]

_MORE: Final = 1e-9
_MORE_THAN_ANY: Final = 1e12  # requests a second: a rate that no GPUs serve
_HALVINGS: Final = 40


class Placed(NamedTuple):
    """A model of a unit.

    Attributes:
        model: Its name.
        share: Of the unit's compute, for its decode jobs.
        batch: Requests that decode together.
        throughput: Requests a second that it is expected to serve.
        unmet: Whether that is below its rate.
    """

    model: str
    share: float
    batch: int
    throughput: float
    unmet: bool


class PlacedUnit(NamedTuple):
    """GPUs of one node, and the models that share them, each split over all of them.

    Attributes:
        gpus: How many.
        models: In the order in which `place` got them.
    """

    gpus: int
    models: tuple[Placed, ...]


@dataclass(frozen=True)
class Placement:
    """Which models share which GPUs.

    Attributes:
        units: Those that have models, the largest first.
        throughput: Requests a second, all models: what eq. 1 maximises.
        unmet: Whether any model's rate is not met.
    """

    units: tuple[PlacedUnit, ...]
    throughput: float
    unmet: bool


class Search:
    """What both searches share: candidates, and the estimates of units, each made once.

    An assignment is a list with the number of each model's mesh in its group.
    """

    def __init__(self, models: Sequence[ServedModel], machines: Machines, shares: Sequence[float]) -> None:
        if not models or len({model.name for model in models}) < len(models):
            raise ArgumentError("there are no models, or two have the same name")
        if not any(model.rate for model in models):
            raise ArgumentError("all rates are 0: there is nothing to place models by")
        self.models = models
        self.machines = machines
        self.candidates: list[dict[int, Candidate]] = [
            {each.tp: each for each in candidates(model, machines, shares)} for model in models
        ]
        self._units: dict[tuple[int, tuple[int, ...]], Unit | None] = {}
        everything = range(len(models))
        by_computation = sorted(everything, key=lambda at: -self._computation(at))
        by_size = sorted(everything, key=lambda at: -models[at].weight_bytes)
        self.orders = (by_computation, by_size, by_computation[::-1])

    def _computation(self, at: int) -> float:
        """GPUs that a model needs alone: of the cheapest candidate, extended to its rate."""
        rate = self.models[at].rate
        return min(
            each.tp * each.share * max(1.0, rate / each.throughput if each.throughput else 1.0)
            for each in self.candidates[at].values()
        )

    def unit(self, size: int, members: tuple[int, ...]) -> Unit | None:
        """The estimate for some models on a mesh; None if they do not fit. REQUIRES: members in order."""
        key = (size, members)
        if key not in self._units:
            fits = all(size in self.candidates[at] for at in members)
            unit = None
            if fits:
                chosen = [self.models[at] for at in members]
                unit = estimate_unit(chosen, size, self.shares(size, members), self.machines)
            if unit is not None:  # loaded by what rates need, not by what was left for them
                unit = unit._replace(load=sum(self.candidates[at][size].share for at in members))
            self._units[key] = unit
        return self._units[key]

    def shares(self, size: int, members: tuple[int, ...]) -> list[float]:
        """Of models on a mesh: those of their candidates, changed so that they fill the mesh and no more.

        Algorithm 2 takes the smallest share that serves a rate, with as large a batch as that takes; and a large batch
        takes memory that all models of the unit lack. So compute that is left goes to the smallest shares. Where there
        is too little, the largest are cut: jobs that read run better beside each other than in turns.
        """
        return levelled([self.candidates[at][size].share for at in members])

    def served(self, size: int, members: tuple[int, ...]) -> float:
        """F of eq. 1; 0 without models, below 0 if they do not fit."""
        if not members:
            return 0.0
        unit = self.unit(size, members)
        return -1.0 if unit is None else sum(unit.throughputs)

    def value(self, group: tuple[int, ...], assigned: Sequence[int]) -> tuple[float, float]:
        """What an assignment serves, and minus its largest load; (-1, 0) if something does not fit."""
        total = load = 0.0
        for mesh, members in enumerate(_members(group, assigned)):
            unit = self.unit(group[mesh], members) if members else Unit((), (), 0.0)
            if unit is None:
                return -1.0, 0.0
            total += sum(unit.throughputs)
            load = max(load, unit.load)
        return round(total, 9), -load

    def greedy(self, group: tuple[int, ...], order: Sequence[int]) -> list[int] | None:
        """Each model on the mesh where it adds most; None if one fits nowhere."""
        members: list[tuple[int, ...]] = [()] * len(group)
        assigned = [0] * len(self.models)
        for at in order:
            best, best_value = -1, (-1e300, 0.0)
            seen = set()
            for mesh, size in enumerate(group):
                if (size, members[mesh]) in seen:
                    continue
                seen.add((size, members[mesh]))
                unit = self.unit(size, _with(members[mesh], at))
                if unit is None:
                    continue
                value = (round(sum(unit.throughputs) - self.served(size, members[mesh]), 9), -unit.load)
                if value > best_value:
                    best, best_value = mesh, value
            if best < 0:
                return None
            assigned[at] = best
            members[best] = _with(members[best], at)
        return assigned

    def packed(self, group: tuple[int, ...]) -> list[int] | None:
        """The largest models first, each on the mesh with the least memory left; None if one fits nowhere."""
        left = [self.machines.mesh_bytes(size) for size in group]
        assigned = [0] * len(self.models)
        for at in self.orders[1]:
            needed = self.models[at].weight_bytes + self.models[at].request_bytes
            fits = [mesh for mesh, size in enumerate(group) if size in self.candidates[at] and needed <= left[mesh]]
            if not fits:
                return None
            assigned[at] = min(fits, key=left.__getitem__)
            left[assigned[at]] -= needed
        return assigned

    def apart(self) -> tuple[tuple[int, ...], list[int]] | None:
        """Meshes and an assignment by which each model is by itself; None if the GPUs do not suffice.

        The best such: it serves most, and of those that serve as much, the one whose GPUs are least busy, so that GPUs
        that are left over go where there is most to do. Nodes whose GPUs are no power of two are cut as if they were
        the next smaller one.
        """
        node = 1 << (self.machines.gpus.bit_length() - 1)
        best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}  # by GPUs that are used
        for at, model in enumerate(self.models):
            after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
            most = {size: self._most(at, size) for size in self.candidates[at] if size <= node}
            for used, (served, rest, sizes) in best.items():
                for size, requests_s in most.items():
                    total = used + size
                    if total <= self.machines.nodes * node:
                        option = (served + min(model.rate, requests_s), rest - model.rate / requests_s, (*sizes, size))
                        after[total] = max(after.get(total, option), option)
            best = after
        if not best:
            return None
        sizes = max(best.values(), key=lambda each: (round(each[0], 9), each[1]))[2]
        order = sorted(range(len(sizes)), key=lambda at: -sizes[at])
        assigned = [0] * len(sizes)
        for mesh, at in enumerate(order):
            assigned[at] = mesh
        return tuple(sizes[at] for at in order), assigned

    def _most(self, at: int, size: int) -> float:
        """Requests a second that a model serves at most by itself."""
        endless = replace(self.models[at], rate=_MORE_THAN_ANY)
        unit = estimate_unit([endless], size, (1.0,), self.machines)
        return unit.throughputs[0] if unit is not None else _MORE

    def best_of_all(self, groups: Sequence[tuple[int, ...]]) -> Placement:
        """The best of all assignments. Raises OutOfMemory if none fits."""
        everything = range(len(self.models))
        every = [(group, list(each)) for group in groups for each in product(range(len(group)), repeat=len(everything))]
        group, assigned = max(every, key=lambda each: self.value(*each))
        if self.value(group, assigned)[0] < 0:
            raise self.too_large()
        return self.placement(group, assigned)

    def too_large(self) -> OutOfMemory:
        """For models of which no division was found."""
        return OutOfMemory(
            f"{len(self.models)} models do not fit together",
            needed_bytes=sum(model.weight_bytes + model.request_bytes for model in self.models),
            available_bytes=self.machines.nodes * self.machines.mesh_bytes(self.machines.gpus),
        )

    def improve(self, group: tuple[int, ...], assigned: Sequence[int]) -> list[int]:
        """Moves one model, or lets two change places, as long as that serves more: each time the best such change."""
        now = list(assigned)
        members = _members(group, now)
        wanted = sum(model.rate for model in self.models)
        while self.value(group, now)[0] < wanted - _MORE:
            served = [self.served(size, of_mesh) for size, of_mesh in zip(group, members, strict=True)]
            gain, changed = max(self._changes(group, now, members, served), default=(0.0, {}), key=lambda each: each[0])
            if gain <= _MORE:
                break
            for at, mesh in changed.items():
                now[at] = mesh
            members = _members(group, now)
        return now

    def _changes(
        self,
        group: tuple[int, ...],
        assigned: Sequence[int],
        members: Sequence[tuple[int, ...]],
        served: Sequence[float],
    ) -> Iterator[tuple[float, dict[int, int]]]:
        """Changes of one model's mesh or of two models' meshes that fit, with what each serves more."""
        everything = range(len(assigned))
        moves = [({at: mesh}, assigned[at], mesh) for at in everything for mesh in range(len(group))]
        swaps = [
            ({one: assigned[other], other: assigned[one]}, assigned[one], assigned[other])
            for one, other in combinations(everything, 2)
        ]
        for changed, source, target in (*moves, *swaps):
            if source != target:
                before = served[source] + served[target]
                left = [at for at in members[source] if at not in changed]
                left += [at for at in members[target] if changed.get(at) == source]
                come = [at for at in members[target] if at not in changed]
                come += [at for at in members[source] if changed.get(at) == target]
                after = [
                    self.served(group[source], tuple(sorted(left))),
                    self.served(group[target], tuple(sorted(come))),
                ]
                if min(after) >= 0:
                    yield sum(after) - before, changed

    def placement(self, group: tuple[int, ...], assigned: Sequence[int]) -> Placement:
        """The result, without empty meshes."""
        units = []
        for mesh, members in enumerate(_members(group, assigned)):
            unit = self.unit(group[mesh], members) if members else None
            if unit is not None:
                placed = [
                    Placed(
                        self.models[at].name,
                        share,
                        batch,
                        throughput,
                        throughput < self.models[at].rate * (1 - _MORE),
                    )
                    for at, share, batch, throughput in zip(
                        members, self.shares(group[mesh], members), unit.batches, unit.throughputs, strict=True
                    )
                ]
                units.append(PlacedUnit(group[mesh], tuple(placed)))
        throughput = sum(each.throughput for unit in units for each in unit.models)
        return Placement(tuple(units), throughput, any(each.unmet for unit in units for each in unit.models))


def levelled(shares: Sequence[float]) -> list[float]:
    """Shares that sum up to 1: the smallest raised to one level, or the largest cut to one.

    REQUIRES: shares above 0 and at most 1.
    """
    bound = min if sum(shares) > 1 else max
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(bound(share, middle) for share in shares) < 1 else (low, middle)
    return [bound(share, low) for share in shares]


def _with(members: tuple[int, ...], at: int) -> tuple[int, ...]:
    return tuple(sorted((*members, at)))


def _members(group: tuple[int, ...], assigned: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in group]
    for at, mesh in enumerate(assigned):
        found[mesh].append(at)
    return [tuple(each) for each in found]
