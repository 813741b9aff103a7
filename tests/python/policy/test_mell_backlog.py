"""Deferred moves: offered first, planned again if the state has changed, made at last; no boundary is exceeded."""

from __future__ import annotations

import random

import pytest
from mell_kit import boundaries, links

from kvpool import ArgumentError
from kvpool.policy.mell import Backlog, Boundaries, ComputeProfile, Move, Part, Way


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
