"""Which models share which GPUs: Algorithm 1, over groups of meshes, with what it leaves open.

As printed, Algorithm 1 ends with `best_mesh.u = make_unit(m, d)`, d being the mesh that was looked at last: the best
one is meant. It says nothing of memory, of models whose rate nobody meets, and of equally good meshes. Here a mesh is
left out if weights and a request of each model do not fit; a rate that is not met is marked; of equally good meshes the
one with the lowest load is taken. Each group is tried in two orders, by computation and by size, because the first may
end with a large model that fits nowhere; then models of the best groups move and change places while that serves more.
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

_IMPROVED: Final = 4  # groups whose placement is improved by moves
_EXHAUSTIVE_MAX: Final = 100_000
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
    found: list[tuple[tuple[float, float], tuple[int, ...], list[int]]] = []
    for group in mesh_groups(machines, len(models)):
        if all(any(size in of_model for size in group) for of_model in search.candidates):
            orders = (search.by_computation, search.by_size)
            placed = [assigned for order in orders if (assigned := search.greedy(group, order)) is not None]
            found += [(search.value(group, assigned), group, assigned) for assigned in placed]
    if not found:
        raise OutOfMemory(
            f"{len(models)} models do not fit together",
            needed_bytes=sum(model.weight_bytes + model.request_bytes for model in models),
            available_bytes=machines.nodes * machines.mesh_bytes(machines.gpus),
        )
    found.sort(key=lambda each: each[0], reverse=True)
    best = [(group, search.improve(group, assigned)) for _, group, assigned in found[:_IMPROVED]]
    group, assigned = max(best, key=lambda each: search.value(*each))
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
    every = [(group, list(each)) for group in groups for each in product(range(len(group)), repeat=len(models))]
    group, assigned = max(every, key=lambda each: search.value(*each))
    if search.value(group, assigned)[0] < 0:
        raise OutOfMemory(f"{len(models)} models do not fit together")
    return search.placement(group, assigned)


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
        self.by_computation = sorted(everything, key=lambda at: -self._computation(at))
        self.by_size = sorted(everything, key=lambda at: -models[at].weight_bytes)

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
        """F of eq. 1; below 0 if they do not fit."""
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
                before = self.served(size, members[mesh]) if members[mesh] else 0.0
                value = (round(sum(unit.throughputs) - before, 9), -unit.load)
                if value > best_value:
                    best, best_value = mesh, value
            if best < 0:
                return None
            assigned[at] = best
            members[best] = _with(members[best], at)
        return assigned

    def improve(self, group: tuple[int, ...], assigned: Sequence[int]) -> list[int]:
        """Moves one model, or lets two change places, as long as that serves more."""
        now = list(assigned)
        wanted = sum(model.rate for model in self.models)
        most = self.value(group, now)[0]
        gained = True
        while gained and most < wanted - _MORE:
            gained = False
            for changed in self._neighbours(group, now):
                value = self.value(group, changed)[0]
                if value > most + _MORE:
                    now, most, gained = changed, value, True
                    break
        return now

    def _neighbours(self, group: tuple[int, ...], assigned: Sequence[int]) -> Iterator[list[int]]:
        for at, mesh in product(range(len(assigned)), range(len(group))):
            if mesh != assigned[at]:
                changed = list(assigned)
                changed[at] = mesh
                yield changed
        for one, other in combinations(range(len(assigned)), 2):
            if assigned[one] != assigned[other]:
                changed = list(assigned)
                changed[one], changed[other] = changed[other], changed[one]
                yield changed

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
