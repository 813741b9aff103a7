"""Lost GPUs: the next plan places their requests again, and instances can carry it out as it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import ArgumentTypeError
from kvpool.policy import mell

C = 240


class Service:
    """Instances that do as plans say, step by step, and of which some are lost at any time."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.capacity = scheduler.capacity
        self.monitor = mell.ClusterMonitor(scheduler)
        self.active = set()
        self.where = {}  # running requests only
        self.sizes = {}  # of all that has not ended
        self.growths = {}  # that are reported and not written yet
        self.lost = set()  # since the last plan

    def submit(self, request, size):
        assert self.monitor.submit(request, size)
        self.sizes[request] = size

    def report(self, gpu):
        """All that runs on a GPU, with the sizes that it grows to."""
        running = [request for request, where in self.where.items() if where == gpu]
        self.monitor.report(gpu, {request: self.growths.get(request, self.sizes[request]) for request in running})

    def lose(self, gpu):
        here = {request for request, where in self.where.items() if where == gpu}
        again = set(self.monitor.lost(gpu))
        assert here <= again | set(self.monitor.waiting)
        for request in again:
            self.where.pop(request, None)  # a request that still runs elsewhere is stopped
            self.growths.pop(request, None)
            if request in self.sizes:
                self.sizes[request] = self.monitor.waiting[request]  # growth that is planned counts
            else:  # the monitor does not know yet that it has ended
                del self.monitor.waiting[request]
        self.active.discard(gpu)
        self.lost.add(gpu)

    def plan(self):
        """The plan of the epoch; it does not touch anything lost."""
        terminated = self.lost & set(self.scheduler.gpus)
        plan = self.monitor.plan()
        named = {gpu for move in plan.moves for gpu in (move.source, move.destination)}
        named |= {place.gpu for place in plan.placed} | set(plan.activated)
        assert not named & self.lost
        assert terminated <= set(plan.terminated)
        self.scheduler.audit()
        self.lost.clear()
        return plan

    def carry_out(self, plan, losses=()):
        """Each step of a plan; `losses` are pairs of a step and the GPU that is lost just before it."""
        assert not self.active & set(plan.activated)
        self.active |= set(plan.activated)
        losses = sorted(losses)
        for step, part in enumerate([*plan.moves, *plan.placed]):
            while losses and losses[0][0] <= step:
                self.lose(losses.pop(0)[1])
            (self.move if isinstance(part, mell.Move) else self.begin)(part)
        for _, gpu in losses:
            self.lose(gpu)
        self.sizes.update(self.growths)
        self.growths.clear()
        assert all(self.used(gpu) <= self.capacity for gpu in self.active)
        self.active -= set(plan.terminated)
        self.check()

    def move(self, move):
        left = [request for request in move.requests if request in self.where]
        assert all(self.where[request] == move.source for request in left)
        assert set(move.requests).difference(left, self.monitor.waiting).isdisjoint(self.sizes)  # the others have ended
        assert len(left) < len(move.requests) or move.tokens == sum(self.sizes[request] for request in left)
        self.where.update(dict.fromkeys(left, move.destination))
        assert not left or move.destination in self.active
        assert self.used(move.destination) <= self.capacity

    def begin(self, place):
        if place.request not in self.monitor.waiting:
            assert (place.request in self.where, place.tokens) == (False, self.sizes[place.request])
            assert place.gpu in self.active
            self.where[place.request] = place.gpu
            assert self.used(place.gpu) <= self.capacity

    def check(self):
        """Every request runs where the scheduler has it, or waits."""
        waiting = set(self.monitor.waiting)
        assert set(self.where) | waiting == set(self.sizes)
        assert not set(self.where) & waiting
        assert set(self.where.values()) <= self.active
        for request, gpu in self.where.items():
            assert (self.scheduler.where(request), self.scheduler.sizes[request]) == (gpu, self.sizes[request])
        if not self.lost:
            assert self.active == set(self.scheduler.gpus)

    def used(self, gpu):
        return sum(self.sizes[request] for request, where in self.where.items() if where == gpu)

    def end(self, request):
        del self.sizes[request], self.where[request]


def drawn_epoch(service, rng, count):
    """Some end, some grow, some come; some instances are silent; some are lost before the plan, or while it is made."""
    reporting = [gpu for gpu in sorted(service.active) if rng.random() < 0.9]
    heard = [request for request, gpu in service.where.items() if gpu in reporting]
    for request in [request for request in heard if rng.random() < 0.15]:
        service.end(request)
        heard.remove(request)
    for request in heard:
        if rng.random() < 0.4:
            service.growths[request] = min(C, service.sizes[request] + rng.choice([1, 3, C // 8, rng.randint(0, C)]))
    for number in range(rng.randint(0, 5)):
        service.submit((count, number), rng.randint(1, rng.choice([C // 8, C // 4, C // 3, C // 2, C])))
    lost = [gpu for gpu in sorted(service.active) if rng.random() < 0.1]
    early = [gpu for gpu in lost if rng.random() < 0.5]
    for gpu in early:
        service.lose(gpu)
    for gpu in reporting:
        service.report(gpu)
    for gpu in lost:
        if gpu not in early:
            service.lose(gpu)
    plan = service.plan()
    steps = len(plan.moves) + len(plan.placed)
    gpus = sorted(service.active | set(plan.activated))
    losses = [(rng.randint(0, steps), gpu) for gpu in gpus if rng.random() < 0.05]
    service.carry_out(plan, losses)


@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 0, 10]))
@settings(deadline=None, max_examples=60)
def test_plans_can_be_carried_out_whatever_is_lost_and_whenever(seed, compare, slack):
    rng = random.Random(seed)
    service = Service(mell.Mell(C, mell.Settings(never_more=compare, slack=slack)))
    for count in range(25):
        drawn_epoch(service, rng, count)
    for gpu in sorted(service.active):
        service.report(gpu)
    service.carry_out(service.plan())
    assert set(service.where) == set(service.sizes)


def test_repairs_elsewhere_after_a_loss_are_in_the_plan():
    """GPU 1 has three requests; when it is lost, the rest on the others fits on fewer."""
    service = Service(mell.Mell(100))
    for request, size in enumerate((39, 29, 7, 47, 31)):
        service.submit(request, size)
        service.carry_out(service.plan())
    assert service.where == {0: 1, 1: 1, 2: 1, 3: 0, 4: 2}
    for gpu in range(3):
        service.report(gpu)
    service.lose(1)
    service.submit("x", 22)
    service.submit("y", 70)
    service.carry_out(service.plan())
    assert len(service.where) == 7


def under_way():
    """Three requests; a was to move from 0, where b runs, to 1, where c does, and has not."""
    scheduler = mell.Mell(100)
    monitor = mell.ClusterMonitor(scheduler)
    for request, size in (("a", 18), ("b", 64), ("c", 56)):
        monitor.submit(request, size)
    assert {place.request: place.gpu for place in monitor.plan().placed} == {"a": 0, "b": 0, "c": 1}
    monitor.report(0, {"a": 38, "b": 64})
    monitor.report(1, {"c": 56})
    assert moves(monitor.plan()) == [(("a",), 0, 1)]
    return scheduler, monitor


def moves(plan):
    return [(move.requests, move.source, move.destination) for move in plan.moves]


def test_moves_through_a_lost_gpu_are_lost_with_it():
    scheduler, monitor = under_way()
    monitor.report(0, {"a": 38, "b": 64})
    monitor.report(1, {"c": 68})
    assert moves(monitor.plan()) == [(("a",), 1, 2)]  # over 1, where it has not come
    assert set(monitor.lost(1)) == {"a", "c"}
    plan = monitor.plan()
    assert {place.request for place in plan.placed} == {"a", "c"}
    assert dict(scheduler.sizes) == {"a": 38, "b": 64, "c": 68}


def test_arrived_requests_are_not_lost_with_their_source():
    _, monitor = under_way()
    monitor.report(0, {"b": 64})
    monitor.report(1, {"c": 56, "a": 38})
    monitor.plan()
    assert monitor.lost(0) == ["b"]


def test_reports_of_lost_requests_are_ignored():
    scheduler, monitor = under_way()
    assert set(monitor.lost(0)) == {"a", "b"}
    monitor.report(0, {"a": 38, "b": 90})
    monitor.report(1, {"a": 39, "c": 56})  # a is to be stopped there
    plan = monitor.plan()
    assert {place.request: place.tokens for place in plan.placed} == {"a": 38, "b": 64}
    at = scheduler.where("a")
    monitor.report(at, {"c": 56} if at == 1 else {})
    monitor.plan()
    assert "a" not in scheduler.sizes  # that another one reported it is forgotten


def test_a_request_given_up_while_it_waits_only_departs():
    scheduler, monitor = under_way()
    monitor.lost(0)
    del monitor.waiting["b"]
    assert [place.request for place in monitor.plan().placed] == ["a"]
    assert dict(scheduler.sizes) == {"a": 38, "c": 56}


def test_only_later_plans_reuse_the_number_of_a_lost_gpu():
    scheduler = mell.Mell(100)
    scheduler.batch(arrivals=[("a", 90), ("b", 91), ("c", 92)])
    at = {request: scheduler.where(request) for request in "abc"}
    plan = scheduler.batch(arrivals=[("a", 90), ("d", 93)], lost=[at["a"], at["b"], 3])  # 3 has never been there
    assert {place.request for place in plan.placed} == {"a", "d"}
    assert {place.gpu for place in plan.placed} == set(plan.activated) == {4, 5}
    assert set(plan.terminated) == {at["a"], at["b"]}
    assert "b" not in scheduler.sizes
    plan = scheduler.batch(arrivals=[("e", 94), ("f", 95), ("g", 96), ("h", 97)])
    assert {place.gpu for place in plan.placed} == {at["a"], at["b"], 3, 6}


def test_a_request_may_depart_and_reset_in_one_batch():
    scheduler = mell.Mell(100)
    scheduler.batch(arrivals=[("a", 60), ("b", 30)])
    plan = scheduler.batch(departures=["a"], arrivals=[("a", 20)])
    assert [(place.request, place.tokens) for place in plan.placed] == [("a", 20)]
    assert dict(scheduler.sizes) == {"a": 20, "b": 30}
    scheduler.audit()


def test_a_lost_gpu_is_a_number():
    scheduler = mell.Mell(100)
    scheduler.batch(arrivals=[("a", 60)])
    with pytest.raises(ArgumentTypeError, match="lost GPU"):
        scheduler.batch(departures=["a"], lost=["0"])
    assert dict(scheduler.sizes) == {"a": 60}
