"""Shared by the tests of MELL: a naive executor of plans, exact packing, and operations to draw."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from kvpool.policy import mell
from kvpool.policy.mell import Boundaries, ComputeProfile

CAPACITY = 240  # divisible by 2, 3, 4 and 8


class Cluster:
    """Carries out plans as instances would, and notices what no instance could do."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.where = {}
        self.sizes = {}
        self.active = set()

    def carry_out(self, plan, departures=(), growths=(), arrivals=()):
        """Each move finds room when those before it are done; growth is written last."""
        assert not self.active & set(plan.activated)
        self.active |= set(plan.activated)
        for request in departures:
            del self.where[request], self.sizes[request]
        for move in plan.moves:
            assert move.source != move.destination
            assert move.tokens == sum(self.sizes[request] for request in move.requests)
            assert {self.where[request] for request in move.requests} == {move.source}
            self.where.update(dict.fromkeys(move.requests, move.destination))
            assert self.used(move.destination) <= self.capacity
            if len(move.requests) > 1:  # a group, at the sizes that are reported
                assert all(8 * self.sizes[request] <= self.capacity for request in move.requests)
                assert 4 * move.tokens <= self.capacity
        for place, (request, size) in zip(plan.placed, arrivals, strict=True):
            assert (place.request, place.tokens) == (request, size)
            self.where[request] = place.gpu
            self.sizes[request] = size
        self.sizes.update(growths)
        for gpu in set(self.where.values()):
            assert self.used(gpu) <= self.capacity
        self.active -= set(plan.terminated)
        assert self.active == set(self.where.values())

    def used(self, gpu):
        return sum(size for request, size in self.sizes.items() if self.where[request] == gpu)


class Driver:
    """A scheduler, the cluster that carries out its plans, and what is checked after each operation."""

    def __init__(self, capacity=CAPACITY, settings=None):
        self.scheduler = mell.Mell(capacity, settings)
        self.cluster = Cluster(capacity)
        self.count = 0

    def batch(self, departures=(), growths=(), arrivals=()):
        plan = self.scheduler.batch(departures, growths, arrivals)
        self.cluster.carry_out(plan, departures, growths, arrivals)
        assert dict(self.scheduler.sizes) == self.cluster.sizes
        assert {request: self.scheduler.where(request) for request in self.cluster.sizes} == self.cluster.where
        assert set(self.scheduler.gpus) == self.cluster.active
        self.scheduler.audit()
        bound = mell.lower_bound(self.cluster.sizes.values(), self.cluster.capacity)
        assert bound <= self.scheduler.gpu_count <= mell.promised(bound_or_optimum(self.cluster, bound))
        return plan

    def step(self, kind, pick, size):
        """One operation, on the request that `pick` chooses; returns how many items moved."""
        requests = list(self.cluster.sizes)
        if kind == "arrive" or not requests:
            self.count += 1
            plan = self.batch(arrivals=[(self.count, size)])
        else:
            request = requests[pick % len(requests)]
            if kind == "depart":
                plan = self.batch(departures=[request])
            else:
                grown = max(size, self.cluster.sizes[request])
                plan = self.batch(growths=[(request, grown)])
        assert plan.item_moves <= mell.MOVES_AN_OPERATION
        return plan.item_moves


def bound_or_optimum(cluster, bound):
    """The best packing where that is quickly found; the lower bound otherwise."""
    sizes = list(cluster.sizes.values())
    return optimum(sizes, cluster.capacity) if len(sizes) <= 9 else bound


def optimum(sizes, capacity):
    """The fewest GPUs that hold these sizes, by trying all packings."""
    sizes = sorted(sizes, reverse=True)
    best = len(sizes)

    def place(index, free):
        nonlocal best
        if len(free) >= best:
            return
        if index == len(sizes):
            best = len(free)
            return
        for room in sorted(set(free)):
            if room >= sizes[index]:
                left = list(free)
                left.remove(room)
                place(index + 1, [*left, room - sizes[index]])
        place(index + 1, [*free, capacity - sizes[index]])

    place(0, [])
    return best


def sizes(capacity=CAPACITY):
    """All sizes, those at the bounds of the classes often, those of one class at a time, too."""
    bounds = sorted(
        {min(capacity, max(1, capacity // part + off)) for part in (8, 4, 3, 2, 1) for off in (-1, 0, 1, 2)}
    )
    edges = [0, capacity // 8, capacity // 4, capacity // 3, capacity // 2, capacity]
    classes = [st.integers(low + 1, high) for low, high in pairwise(edges) if low < high]
    return st.one_of(st.integers(1, capacity), st.sampled_from(bounds), *classes)


def operations(capacity=CAPACITY):
    """(kind, number of the request, size): arrivals a little more often than departures."""
    kinds = st.sampled_from(["arrive", "arrive", "arrive", "grow", "grow", "depart", "depart"])
    return st.tuples(kinds, st.integers(0, 10_000), sizes(capacity))


# ---- boundaries of what moves in an epoch


def links(source, destination):
    """Machines of two GPUs: within one its own bus, between two the network of either."""
    first, second = source // 2, destination // 2
    return [("bus", first)] if first == second else [("net", first), ("net", second)]


class Everywhere(dict):
    """The same for every key."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def get(self, key, default=None):
        return self.value


def boundaries(link_tokens, compute_tokens=0, call_tokens=0):
    """The same on all links, and on all GPUs for all batches."""
    profile = ComputeProfile({10**6: compute_tokens})
    return Boundaries(links, Everywhere(link_tokens), Everywhere(profile), Everywhere(call_tokens))
