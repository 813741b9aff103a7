"""Which models share which GPUs: Algorithm 1, over groups of meshes, with what it leaves open.

As printed, Algorithm 1 ends with `best_mesh.u = make_unit(m, d)`, d being the mesh that was looked at last: the best
one is meant. It says nothing of memory, of models whose rate nobody meets, and of equally good meshes. Here a mesh is
left out if weights and a request of each model do not fit; a rate that is not met is marked; of equally good meshes the
one with the lowest load is taken. Each group is tried in three orders: by computation, as printed; by size, because the
first may end with a large model that fits nowhere; and the smallest computation first, so that a model that no GPUs can
serve comes last, where it harms least. A packing by memory alone, best fit decreasing, is one more start: it fits where
none of the three does; and so is the best placement in which each model is by itself. Then models of the best results
move and change places while that serves more. Where there are few assignments, all are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.policy.multiplexing.estimate import SHARES, Machines, ServedModel
from kvpool.policy.multiplexing.search import Placement, Search

__all__ = ["exhaustive", "mesh_groups", "place"]

_IMPROVED: Final = 96  # results that moves improve, times the number of models: a step of many takes longer
_EXHAUSTIVE_MAX: Final = 100_000
_FEW: Final = 3000  # assignments that `place` tries one by one


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
    search = Search(models, machines, shares)
    groups = mesh_groups(machines, len(models))
    if sum(len(group) ** len(models) for group in groups) <= _FEW:
        return search.best_of_all(groups)
    results: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {}
    for group in groups:
        if all(any(size in of_model for size in group) for of_model in search.candidates):
            starts = [*(search.greedy(group, order) for order in search.orders), search.packed(group)]
            placed = [found for found in starts if found is not None]
            results.update({(group, tuple(assigned)): search.value(group, assigned) for assigned in placed})
    if (apart := search.apart()) is not None:
        results[apart[0], tuple(apart[1])] = search.value(*apart)
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
    search = Search(models, machines, shares)
    groups = mesh_groups(machines, len(models))
    many = sum(len(group) ** len(models) for group in groups)
    if many > _EXHAUSTIVE_MAX:
        raise ArgumentError(f"{many} assignments are too many", value=many, maximum=_EXHAUSTIVE_MAX)
    return search.best_of_all(groups)
