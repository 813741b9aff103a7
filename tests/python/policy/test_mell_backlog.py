"""Deferred moves: offered first, planned again if the state has changed, made at last; no boundary is exceeded."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mell_kit import sizes

from kvpool import ArgumentError
from kvpool.policy import mell
from kvpool.policy.mell import Backlog, Boundaries, ComputeProfile, Fit, Move, Part, Way

CAPACITY = 240


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


def epoch(backlog, moves, limits, sizes, free=(), **options):
    free = dict.fromkeys(range(8), 1000) | dict(free)
    return backlog.divide(moves, limits, {}, sizes, free, **options)


def test_waiting_moves_are_offered_before_new_ones():
    backlog, limits = Backlog(), boundaries(100)
    sizes = {"a": 60, "b": 60, "c": 60}
    moves = {request: Move((request,), 0, 2, 60) for request in sizes}
    assert epoch(backlog, [moves["a"], moves["b"]], limits, sizes).made == [moves["a"]]
    assert (len(backlog), backlog.oldest, backlog.held, backlog.occupied) == (1, 1, {2: 60}, {0, 2})
    found = epoch(backlog, [moves["c"]], limits, sizes)
    assert (found.made, found.deferred) == ([moves["b"]], [moves["c"]])
    assert epoch(backlog, [], limits, sizes).made == [moves["c"]]
    assert (len(backlog), backlog.oldest, backlog.held, backlog.occupied) == (0, 0, {}, set())


class Swapping:
    """Plans that send requests round and round, while nothing can carry them: each move needs room that one leaves."""

    CLOSED = boundaries(0)

    def __init__(self, seed, requests=3, gpus=3, **options):
        self.rng, self.gpus = random.Random(seed), gpus
        self.backlog = Backlog(**options)
        self.where = {request: request % gpus for request in range(requests)}
        self.real = dict(self.where)
        self.sizes = dict.fromkeys(self.where, 100)

    def plan(self):
        moves = []
        for request in self.rng.sample(sorted(self.where), self.rng.randint(1, len(self.where))):
            to = self.rng.randrange(self.gpus)
            if to != self.where[request]:
                moves.append(Move((request,), self.where[request], to, 100))
                self.where[request] = to
        return moves

    def epoch(self, moves, limits, room=0):
        free = dict.fromkeys(range(self.gpus), room)
        found = self.backlog.divide(moves, limits, {}, self.sizes, free)
        for move in found.made:
            for request in move.requests:
                assert self.real[request] == move.source
                self.real[request] = move.destination
        return found


@pytest.mark.parametrize("seed", range(5))
def test_a_backlog_holds_so_many_moves_for_each_request_and_no_more(seed):
    one, most = Swapping(seed), 0
    for _ in range(150):
        one.epoch(one.plan(), one.CLOSED)
        most = max(most, len(one.backlog))
    assert 3 < most <= 3 * 8
    for _ in range(40):  # and all of them end where the latest plan wants them
        one.epoch([], boundaries(1000), room=1000)
    assert len(one.backlog) == 0
    assert one.real == one.where


def test_requests_that_wait_for_the_same_moves_get_one_move_together_when_chains_are_netted():
    backlog, closed = Backlog(chain_max=1), boundaries(0)
    sizes = {"a": 10, "b": 20, "c": 30}
    plans = [
        [Move(("a", "b"), 0, 1, 30), Move(("c",), 1, 0, 30)],  # c counts on the room of the others
        [Move(("a", "b"), 1, 2, 30)],
        [Move(("c",), 0, 1, 30)],
    ]
    for moves in plans[:2]:
        found = epoch(backlog, moves, closed, sizes, dict.fromkeys(range(3), 0))
    assert [(move.requests, move.source, move.destination) for move in found.deferred] == [
        (("a", "b"), 0, 1), (("c",), 1, 0), (("a", "b"), 1, 2)
    ]  # fmt: skip
    sizes = {"a": 11, "b": 21}  # c has ended; then two of two is the bound
    found = epoch(backlog, [Move(("a",), 2, 0, 11)], closed, sizes, dict.fromkeys(range(3), 0))
    assert sorted((move.requests, move.source, move.destination, move.tokens) for move in found.deferred) == [
        (("b",), 0, 2, 21)
    ]


def test_moves_that_are_netted_in_every_epoch_are_stopped_after_their_patience():
    """Two requests wait for each other's room, and each plan sends one of them elsewhere."""
    backlog, limits, full = Backlog(patience=3, chain_max=1), boundaries(0, 100), dict.fromkeys(range(3), 0)
    sizes, plans = {"a": 10, "b": 10}, [[Move(("a",), 0, 1, 10), Move(("b",), 1, 0, 10)]]
    plans += [[Move(("a",), 1, 2, 10)], [Move(("a",), 2, 1, 10)]] * 2
    stopped = []
    for moves in plans:
        stopped += epoch(backlog, moves, limits, sizes, full).stopped
        assert len(backlog) == 2
    assert {request for move in stopped for request in move.requests} == {"a", "b"}


def test_a_large_move_is_not_overtaken_by_small_ones_forever():
    """90 of 100 tokens, while each epoch brings three of 30: the first two of these would always leave too little."""
    backlog, limits, sizes = Backlog(), boundaries(100), {"large": 90}
    sizes.update(dict.fromkeys(range(30), 30))

    def small(at):
        return [Move((number,), 0, 2, 30) for number in range(3 * at, 3 * at + 3)]

    first = epoch(backlog, [*small(0), Move(("large",), 0, 2, 90)], limits, sizes)
    assert [move.requests for move in first.made] == [(0,), (1,), (2,)]
    second = epoch(backlog, small(1), limits, sizes)
    assert [move.requests for move in second.made] == [("large",)]


def test_a_move_too_large_for_an_epoch_is_carried_in_parts():
    backlog, limits, sizes = Backlog(), boundaries(100, call_tokens=10), {"a": 250}
    move = Move(("a",), 0, 2, 250)
    for carried in (90, 180):
        found = epoch(backlog, [move] * (carried == 90), limits, sizes)
        assert (found.made, found.parts, found.deferred) == ([], [Part(move, Way.KV, 90)], [move])
        assert (backlog.carried, backlog.held) == ({2: carried}, {2: 250})
    sizes["a"] = 255  # it runs on meanwhile
    move = Move(("a",), 0, 2, 255)
    found = epoch(backlog, [], limits, sizes)
    assert (found.made, found.parts) == ([move], [Part(move, Way.KV, 75)])
    assert found.link_use == {("net", 0): 85, ("net", 1): 85}


def test_parts_go_on_as_they_began_and_reset_where_their_way_is_closed():
    backlog, sizes = Backlog(), {"a": 250}
    epoch(backlog, [Move(("a",), 0, 2, 250)], boundaries(100, 60), sizes)
    assert epoch(backlog, [], boundaries(100, 1000), sizes).as_tokens == []
    found = epoch(backlog, [], boundaries(0, 200), sizes)
    assert [(part.way, part.tokens) for part in found.parts] == [(Way.TOKENS, 200)]
    assert epoch(backlog, [], boundaries(0, 200), sizes).as_tokens == [Move(("a",), 0, 2, 250)]


def test_a_request_that_ended_stops_waiting_and_leaves_its_group():
    backlog, sizes = Backlog(), {"a": 10, "b": 20, "c": 30}
    epoch(backlog, [Move(("a", "b"), 0, 2, 30), Move(("c",), 0, 2, 30)], boundaries(0), sizes)
    found = epoch(backlog, [], boundaries(0), {"b": 21})
    assert found.deferred == [Move(("b",), 0, 2, 21)]


def test_a_request_bound_further_moves_at_once_and_one_bound_back_stays():
    backlog, sizes = Backlog(), {"a": 10, "b": 20}
    moves = [Move(("a",), 0, 2, 10), Move(("b",), 0, 4, 20)]
    epoch(backlog, moves, boundaries(0), sizes)
    found = epoch(backlog, [Move(("a",), 2, 6, 10), Move(("b",), 4, 0, 20)], boundaries(100), sizes)
    assert (found.made, found.deferred) == ([Move(("a",), 0, 6, 10)], [])


def test_a_request_counted_on_to_leave_leaves_before_it_moves_further():
    """b comes to GPU 0 in the room of a, and then a goes on: to GPU 2 first, which is there for it."""
    backlog, sizes = Backlog(), {"a": 10, "b": 20}
    epoch(backlog, [Move(("a",), 0, 2, 10), Move(("b",), 4, 0, 20)], boundaries(0), sizes)
    found = epoch(backlog, [Move(("a",), 2, 6, 10)], boundaries(100), sizes)
    assert found.made == [Move(("a",), 0, 2, 10), Move(("b",), 4, 0, 20), Move(("a",), 2, 6, 10)]


def test_reserved_room_is_not_taken_by_others():
    backlog, sizes = Backlog(), {"a": 70, "b": 20}
    free = {2: 80}
    epoch(backlog, [Move(("a",), 0, 2, 70)], boundaries(0), sizes, free)
    only_near = Boundaries(links, {("bus", 1): 100}, {})
    found = epoch(backlog, [Move(("b",), 3, 2, 20)], only_near, sizes, free)
    assert [move.requests for move in found.deferred] == [("a",), ("b",)]


def test_two_requests_that_wait_for_each_others_room_are_stopped_and_get_it():
    """Both have grown where they were, so that neither GPU has room left."""
    backlog, limits, sizes = Backlog(patience=2), boundaries(100, 100), {"a": 60, "b": 60}
    free = {0: 0, 2: 0}
    moves = [Move(("a",), 0, 2, 60), Move(("b",), 2, 0, 60)]
    assert epoch(backlog, moves, limits, sizes, free).stopped == []
    found = epoch(backlog, [], limits, sizes, free)
    assert (found.made, found.stopped) == ([], moves)
    assert backlog.occupied == {0, 2}
    found = epoch(backlog, [], limits, sizes, {0: 60, 2: 60})
    assert (found.as_tokens, found.as_kv) == (moves, [])


def test_a_request_that_waits_only_for_a_boundary_is_never_stopped():
    """a waits for its link, and b for the room that a leaves."""
    backlog, sizes = Backlog(patience=2), {"a": 60, "b": 60}
    limits = Boundaries(links, {("bus", 0): 100}, {0: ComputeProfile({8: 100})})
    for _ in range(10):
        moves = [Move(("a",), 0, 2, 60), Move(("b",), 1, 0, 60)] * (not backlog)
        assert epoch(backlog, moves, limits, sizes, {0: 0}).stopped == []
    assert len(backlog) == 2


@pytest.mark.parametrize("move", [Move(("gone",), 0, 2, 10), Move(("a",), 5, 6, 10)])
def test_impossible_changes_are_refused_and_change_nothing(move):
    backlog, sizes = Backlog(), {"a": 10, "b": 20}
    epoch(backlog, [Move(("a",), 0, 2, 10)], boundaries(0), sizes)
    with pytest.raises(ArgumentError):
        epoch(backlog, [Move(("b",), 0, 2, 20), move], boundaries(100), sizes)
    assert (len(backlog), backlog.oldest, backlog.held) == (1, 1, {2: 10})
    with pytest.raises(ArgumentError):
        Backlog(patience=0)
    with pytest.raises(ArgumentError):
        Backlog(chain_max=0)
