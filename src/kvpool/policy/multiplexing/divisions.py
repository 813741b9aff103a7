"""Placements that MuxServe compares with (§4.1, §4.4): each model by itself, and a greedy one by rate and memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.policy.multiplexing.estimate import SHARES, Machines, ServedModel
from kvpool.policy.multiplexing.search import Placement, Search

__all__ = ["by_rate", "spatial", "together"]


def spatial(models: Sequence[ServedModel], machines: Machines) -> Placement:
    """Spatial partitioning: each model has GPUs that it shares with no other, and all of their compute.

    The best such division by the estimator that `place` goes by; GPUs that are left over go where there is most to do.

    Raises:
        ArgumentError: As `place`.
        OutOfMemory: The GPUs do not suffice for all models.
    """
    search = Search(models, machines, (1.0,))
    found = search.apart()
    if found is None:
        raise search.too_large()
    return search.placement(*found)


def by_rate(models: Sequence[ServedModel], machines: Machines, shares: Sequence[float] = SHARES) -> Placement:
    """The greedy placement of §4.4: the highest rates first, each to the mesh with the most free memory.

    The paper does not say which meshes there are. Here nodes are cut as models come: a model takes the smallest mesh
    that is empty, of which it leaves what it does not need for its rate; where none is empty or large enough, it goes
    to the mesh with the most free memory a GPU.

    Raises:
        ArgumentError: As `place`.
        OutOfMemory: A model fits on no mesh.
    """
    search = Search(models, machines, shares)
    meshes: list[tuple[int, tuple[int, ...]]] = [(machines.gpus, ()) for _ in range(machines.nodes)]
    for at in sorted(range(len(models)), key=lambda at: (-models[at].rate, at)):
        fitting = [
            mesh
            for mesh, (size, members) in enumerate(meshes)
            if (members and search.unit(size, tuple(sorted((*members, at)))) is not None)
            or (not members and any(tp <= size for tp in search.candidates[at]))
        ]
        if not fitting:
            raise search.too_large()
        mesh = min(fitting, key=lambda mesh: _rank(search, *meshes[mesh]))
        size, members = meshes[mesh]
        if members:
            meshes[mesh] = (size, tuple(sorted((*members, at))))
            continue
        needed = _needed(search, at, size)
        meshes[mesh] = (needed, (at,))
        while size > needed:  # what is left, in powers of two
            size //= 2
            meshes.append((size, ()))
    meshes = sorted((mesh for mesh in meshes if mesh[1]), reverse=True)
    assigned = [0] * len(models)
    for mesh, (_, members) in enumerate(meshes):
        for at in members:
            assigned[at] = mesh
    return search.placement(tuple(size for size, _ in meshes), assigned)


def _rank(search: Search, size: int, members: tuple[int, ...]) -> tuple[int, float]:
    """Empty meshes first, the smallest of them; then those with the most free memory a GPU."""
    if not members:
        return 0, float(size)
    free = search.machines.mesh_bytes(size) - sum(search.models[at].weight_bytes for at in members)
    return 1, -free / size


def _needed(search: Search, at: int, size: int) -> int:
    """GPUs of an empty mesh that a model takes: the fewest that serve its rate, or else the most that it can have."""
    possible = [each for tp, each in sorted(search.candidates[at].items()) if tp <= size]
    return next((each.tp for each in possible if not each.unmet), possible[-1].tp)


def together(models: Sequence[ServedModel], machines: Machines, shares: Sequence[float] = SHARES) -> Placement:
    """All models on one mesh, the whole of a node.

    Raises:
        ArgumentError: As `place`.
        OutOfMemory: They do not fit there.
    """
    search = Search(models, machines, shares)
    if search.unit(machines.gpus, tuple(range(len(models)))) is None:
        raise search.too_large()
    return search.placement((machines.gpus,), [0] * len(models))
