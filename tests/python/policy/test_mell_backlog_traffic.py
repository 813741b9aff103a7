"""Deferred moves under random traffic: none waits forever, and what links leave waiting had no room or no link."""

from __future__ import annotations

import copy

from hypothesis import example, given
from hypothesis import strategies as st
from mell_kit import CAPACITY, Everywhere, links, sizes

from kvpool.policy import mell
from kvpool.policy.mell import Backlog, Boundaries, ComputeProfile, Fit, Move, Way


class Instances:
    """What runs where, as it really is: growth and new requests wait for room that nothing in the backlog counts on."""

    def __init__(self, patience=3):
        self.scheduler = mell.Mell(CAPACITY)
        self.backlog = Backlog(patience)
        self.sizes = {}
        self.where = {}
        self.stopped = set()
        self.to_grow = {}
        self.to_begin = {}

    def epoch(self, limits, departures=(), growths=(), arrivals=(), fit=Fit.FIRST):
        plan = self.scheduler.batch(departures, growths, arrivals)
        for request in departures:
            for each in (self.sizes, self.where, self.to_grow, self.to_begin):
                each.pop(request, None)
            self.stopped.discard(request)
        moves = plan.moves
        fresh = {request for move in moves for request in move.requests if request not in self.sizes}
        for move in moves:  # a request that has not begun yet begins where the scheduler wants it by now
            for request in fresh.intersection(move.requests):
                self.to_begin[request] = (move.destination, self.to_begin[request][1])
        moves = [kept for move in moves if (kept := self.without(move, fresh))]
        division = self.divide(moves, limits, fit)
        self.to_grow.update(growths)
        self.to_begin.update({place.request: (place.gpu, place.tokens) for place in plan.placed})
        self.to_begin = {
            request: (gpu, dict(growths).get(request, size)) for request, (gpu, size) in self.to_begin.items()
        }
        self.go_on()
        return division

    def without(self, move, fresh):
        left = tuple(request for request in move.requests if request not in fresh)
        tokens = sum(self.sizes[request] for request in left)
        return Move(left, move.source, move.destination, tokens) if left else None

    def divide(self, moves, limits, fit):
        gpus = set(self.where.values()) | {gpu for move in moves for gpu in (move.source, move.destination)}
        gpus |= set(self.backlog.held)
        free = {gpu: CAPACITY - self.used(gpu) for gpu in gpus}
        batches = {gpu: sum(where == gpu for where in self.where.values()) for gpu in gpus}
        other = copy.deepcopy(self.backlog)
        arguments = (moves, limits, batches, dict(self.sizes), free, fit)
        division = self.backlog.divide(*arguments)
        assert other.divide(*copy.copy(arguments)) == division  # each rank computes the same
        self.check_boundaries(division, limits)
        for move in division.made:
            for request in move.requests:
                assert request in self.stopped or self.where[request] == move.source
                self.where[request] = move.destination
                self.stopped.discard(request)
            assert self.used(move.destination) <= CAPACITY
        for move in division.stopped:
            for request in move.requests:
                assert self.where.pop(request) == move.source
                self.stopped.add(request)
        assert len(division.deferred) == len(self.backlog)
        return division

    def check_boundaries(self, division, limits):
        in_parts = {part.move for part in division.parts}
        carried = [(move, Way.KV, move.tokens) for move in division.as_kv if move not in in_parts]
        carried += [(move, Way.TOKENS, move.tokens) for move in division.as_tokens if move not in in_parts]
        carried += [(part.move, part.way, part.tokens) for part in division.parts]
        use, computed = {}, {}
        for move, way, tokens in carried:
            assert tokens > 0
            if way is Way.KV:
                for link in links(move.source, move.destination):
                    use[link] = use.get(link, 0) + tokens + limits.link_call_tokens.get(link)
            else:
                computed[move.destination] = computed.get(move.destination, 0) + tokens
        assert (use, computed) == (division.link_use, division.compute_use)
        assert all(tokens <= limits.link_tokens.get(link) for link, tokens in use.items())
        assert all(tokens <= limits.compute.get(gpu).boundary(0) for gpu, tokens in computed.items())
        assert sorted(map(id, division.made)) == sorted(map(id, division.as_kv + division.as_tokens))

    def go_on(self):
        """Growth and new requests, where there is room that no move needs."""
        held = self.backlog.held
        for request, (gpu, size) in list(self.to_begin.items()):
            if CAPACITY - self.used(gpu) - held.get(gpu, 0) >= size:
                self.where[request], self.sizes[request] = gpu, size
                del self.to_begin[request]
                self.to_grow.pop(request, None)
        for request, size in list(self.to_grow.items()):
            if request in self.where and request in self.sizes:
                gpu = self.where[request]
                if CAPACITY - self.used(gpu) - held.get(gpu, 0) >= size - self.sizes[request]:
                    self.sizes[request] = size
                    del self.to_grow[request]
        lent = self.backlog.carried
        for gpu in {*self.where.values(), *lent}:
            assert self.used(gpu) + lent.get(gpu, 0) <= CAPACITY

    def used(self, gpu):
        return sum(self.sizes[request] for request, where in self.where.items() if where == gpu)

    def as_the_scheduler_has_it(self):
        return self.where == {request: self.scheduler.where(request) for request in self.scheduler.sizes} and (
            self.sizes == dict(self.scheduler.sizes)
        )


OPERATIONS = st.tuples(st.sampled_from(["arrive", "grow", "grow", "depart"]), st.integers(0, 1000), sizes())
OPEN = st.integers(40, 400)  # tokens of a link: through one of a token an epoch an example would take minutes
EPOCHS = st.lists(st.lists(OPERATIONS, max_size=6), min_size=1, max_size=25)
PATIENCE = 3


class Some(dict):
    """One of a few values for each key, always the same."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def get(self, key, default=None):
        return self.values[sum(key[0].encode()) + key[1] if isinstance(key, tuple) else key]


class Cycle(list):
    def __getitem__(self, at):
        return super().__getitem__(at % len(self))


def unequal(link_tokens, compute_tokens, call_tokens):
    """Links and GPUs that differ."""
    profiles = Cycle(ComputeProfile({10**6: tokens}) for tokens in compute_tokens)
    return Boundaries(links, Some(Cycle(link_tokens)), Some(profiles), Everywhere(call_tokens))


class Traffic:
    """Random operations on instances, as epochs of them."""

    def __init__(self, limits, fit):
        self.instances, self.limits, self.fit = Instances(PATIENCE), limits, fit
        self.count = 0
        self.waited = 0  # the most moves that waited at a time

    def epoch(self, operations, may_grow=lambda request: True):
        departures, growths, arrivals = [], {}, []
        for kind, pick, size in operations:
            running = [request for request in self.instances.scheduler.sizes if request not in departures]
            if kind == "arrive" or not running:
                arrivals.append((self.count, size))
                self.count += 1
                continue
            request = running[pick % len(running)]
            if kind == "depart" and request not in growths:
                departures.append(request)
            elif kind == "grow" and may_grow(request):
                growths[request] = max(size, self.instances.scheduler.sizes[request])
        self.instances.epoch(self.limits, departures, list(growths.items()), arrivals, self.fit)
        self.waited = max(self.waited, len(self.instances.backlog))

    def run_until_done(self, epochs):
        """Runs epochs without new requests, at most so many. Returns whether all is then as the scheduler has it."""
        for _ in range(epochs):
            if self.instances.as_the_scheduler_has_it():
                assert len(self.instances.backlog) == 0 == len(self.instances.stopped)
                return True
            self.instances.epoch(self.limits)
        return self.instances.as_the_scheduler_has_it()

    def bound(self, tokens_an_epoch):
        """Epochs: what is before a move is carried, and each of it may have had to be stopped first."""
        return 10 + self.waited * (PATIENCE + 2 + -(-CAPACITY // tokens_an_epoch))


@given(
    EPOCHS,
    st.lists(st.integers(0, 400), min_size=1, max_size=4),
    st.lists(st.integers(20, 100), min_size=1, max_size=3),
    st.integers(0, 9),
    st.sampled_from(Fit),
)
@example(  # a request is to go on before it has come, and only the first of its moves can be stopped
    [[("arrive", 0, 61)], [*[("arrive", 0, 61)] * 3, ("arrive", 0, 81), ("grow", 1, 180)]], [0], [1], 0, Fit.FIRST
)
def test_nothing_waits_forever_if_everything_can_be_prefilled(epochs, link, compute, call, fit):
    """No move is older than what was before it takes, at any time and while more comes; then all of them are made."""
    traffic = Traffic(unequal(link, compute, call), fit)
    for operations in epochs * 2:
        traffic.epoch(operations)
        assert traffic.instances.backlog.oldest <= traffic.bound(min(compute))
    assert traffic.run_until_done(traffic.bound(min(compute)))


@given(EPOCHS, st.lists(OPEN, min_size=1, max_size=4), st.integers(0, 9), st.sampled_from(Fit))
def test_links_alone_carry_everything_if_nothing_that_waits_grows(epochs, link, call, fit):
    """So each move still has the room that was there when it was planned: no request has to be stopped."""
    traffic = Traffic(unequal(link, [0], call), fit)

    def may_grow(request):
        backlog = traffic.instances.backlog
        return not any(request in each.move.requests for each in backlog._waiting) and not traffic.instances.to_grow

    for operations in epochs:
        traffic.epoch(operations, may_grow)
        assert not traffic.instances.stopped
    assert traffic.run_until_done(traffic.bound(min(link) - call) if min(link) > call else 0) or min(link) <= call


@given(EPOCHS, st.lists(st.just(0) | OPEN, min_size=1, max_size=4), st.integers(0, 9), st.sampled_from(Fit))
def test_moves_that_links_leave_waiting_had_no_room_or_no_link(epochs, link, call, fit):
    """Waiting requests have grown where they should no longer be, and nothing can stop them here."""
    traffic = Traffic(unequal(link, [0], call), fit)
    for operations in epochs:
        traffic.epoch(operations)
    instances = traffic.instances
    least = min((tokens - call for tokens in link if tokens > call), default=1)
    if traffic.run_until_done(traffic.bound(least)):
        return
    assert not instances.stopped
    seen = set()
    for each in instances.backlog._waiting:
        source, destination = each.move.source, each.move.destination
        closed = any(traffic.limits.link_tokens.get(link) <= call for link in links(source, destination))
        free = (
            CAPACITY
            - instances.used(destination)
            - sum(
                other.left if other is not each else 0
                for other in instances.backlog._waiting[: instances.backlog._waiting.index(each)]
                if other.move.destination == destination
            )
            - instances.backlog.carried.get(destination, 0)
        )
        assert closed or free < each.left or not seen.isdisjoint(each.move.requests)
        seen.update(each.move.requests)
    first = instances.backlog._waiting[0].move if instances.backlog._waiting else None
    assert first is not None or instances.to_grow or instances.to_begin
