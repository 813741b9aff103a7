"""Which models share which GPUs: Algorithm 1, over groups of meshes, with what it leaves open.

As printed, Algorithm 1 ends with `best_mesh.u = make_unit(m, d)`, d being the mesh that was looked at last: the best
one is meant. It says nothing of memory, of models whose rate nobody meets, and of equally good meshes. Here a mesh is
left out if weights and a request of each model do not fit; a rate that is not met is marked; of equally good meshes the
one with the lowest load is taken. Each group is tried in three orders: by computation, as printed; by size, because the
first may end with a large model that fits nowhere; and the smallest computation first, so that a model that no GPUs can
serve comes last, where it harms least. A packing by memory alone, best fit decreasing, is one more start: it fits where
none of the three does. Then models of the best results move and change places while that serves more. Where there are
few assignments, all are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Final, NamedTuple

from kvpool.errors import ArgumentError, OutOfMemory
from kvpool.policy.multiplexing.estimate import (
    SHARES,
    Candidate,
    Machines,
    ServedModel,
    Unit,
    candidates,
    estimate_unit,
)

__all__ = ["Placed", "PlacedUnit", "Placement", "exhaustive", "mesh_groups", "place"]

_IMPROVED: Final = 96  # results that moves improve, times the number of models: a step of many takes longer
_EXHAUSTIVE_MAX: Final = 100_000
_FEW: Final = 3000  # assignments that `place` tries one by one
_MORE: Final = 1e-9


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


def mesh_groups(machines: Machines, meshes: int) -> list[tuple[int, ...]]:
    """The ways to cut the nodes into meshes of 1, 2, 4, ... GPUs within a node, the largest first in each.

    Nodes are equal, so only the sizes matter. With fewer models than meshes the smallest meshes would stay empty: only
    the `meshes` largest of a group are named, and groups that are equal then are one.
    """
    of_node = list(_cuts(machines.gpus, machines.gpus))
    groups: set[tuple[int, ...]] = {()}
    for _ in range(machines.nodes):
        groups = {tuple(sorted(group + cut, reverse=True)) for group in groups for cut in of_node}
    return sorted({group[:meshes] for group in groups}, reverse=True)


def _cuts(gpus: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Powers of two, falling, that sum up to `gpus`."""
    if gpus == 0:
        yield ()
        return
    size = 1 << (min(gpus, largest).bit_length() - 1)
    while size:
        yield from ((size, *rest) for rest in _cuts(gpus - size, size))
        size //= 2


def place(models: Sequence[ServedModel], machines: Machines, shares: Sequence[float] = SHARES) -> Placement:
    """Algorithm 1.

    Args:
        models: With their workloads.
        machines: Where they can run.
        shares: Of compute that a decode job may have.

    Raises:
        ArgumentError: There are no models, two have one name, all rates are 0, a model is larger than every mesh, or a
            share is not above 0 and at most 1.
        OutOfMemory: No division of the GPUs that was tried has the memory for all models.
    """
    search = _Search(models, machines, shares)
    groups = mesh_groups(machines, len(models))
    if sum(len(group) ** len(models) for group in groups) <= _FEW:
        return search.best_of_all(groups)
    results: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
    for group in groups:
        if all(any(size in of_model for size in group) for of_model in search.candidates):
            starts = [*(search.greedy(group, order) for order in search.orders), search.packed(group)]
            placed = [found for found in starts if found is not None]
            results.update({(group, tuple(assigned)): search.value(group, assigned) for assigned in placed})
    if not results:
        raise search.too_large()
    first = sorted(results, key=results.__getitem__, reverse=True)[: max(4, _IMPROVED // len(models))]
    group, assigned = max(
        ((group, search.improve(group, assigned)) for group, assigned in first), key=lambda each: search.value(*each)
    )
    return search.placement(group, assigned)


def exhaustive(models: Sequence[ServedModel], machines: Machines, shares: Sequence[float] = SHARES) -> Placement:
    """The best of all divisions of the GPUs and all assignments of models to them, to check `place` with.

    Raises:
        ArgumentError: As `place`; or there are more than 100,000 assignments.
        OutOfMemory: As `place`.
    """
    search = _Search(models, machines, shares)
    groups = mesh_groups(machines, len(models))
    many = sum(len(group) ** len(models) for group in groups)
    if many > _EXHAUSTIVE_MAX:
        raise ArgumentError(f"{many} assignments are too many", value=many, maximum=_EXHAUSTIVE_MAX)
    return search.best_of_all(groups)


class _Search:
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
            shares = [self.candidates[at][size].share for at in members] if fits else []
            chosen = [self.models[at] for at in members]
            self._units[key] = estimate_unit(chosen, size, shares, self.machines) if fits else None
        return self._units[key]

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
                        self.candidates[at][group[mesh]].share,
                        batch,
                        throughput,
                        throughput < self.models[at].rate * (1 - _MORE),
                    )
                    for at, batch, throughput in zip(members, unit.batches, unit.throughputs, strict=True)
                ]
                units.append(PlacedUnit(group[mesh], tuple(placed)))
        throughput = sum(each.throughput for unit in units for each in unit.models)
        return Placement(tuple(units), throughput, any(each.unmet for unit in units for each in unit.models))


def _with(members: tuple[int, ...], at: int) -> tuple[int, ...]:
    return tuple(sorted((*members, at)))


def _members(group: tuple[int, ...], assigned: Sequence[int]) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in group]
    for at, mesh in enumerate(assigned):
        found[mesh].append(at)
    return [tuple(each) for each in found]
