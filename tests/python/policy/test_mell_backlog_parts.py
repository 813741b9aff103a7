"""Parts that epochs have carried of moves that are too large for one: they stay where the requests still go."""

from __future__ import annotations

from kvpool.policy.mell import Backlog, Boundaries, ComputeProfile, Move, Part, Way


def limits(link_tokens, compute_tokens=0):
    """One link, between all GPUs; the same compute everywhere."""
    compute = {gpu: ComputeProfile({10**6: compute_tokens}) for gpu in range(4)}
    return Boundaries(lambda source, destination: ("link",), {"link": link_tokens}, compute)


def epoch(backlog, moves, boundaries, sizes, free=1000):
    """`free` tokens on each GPU."""
    return backlog.divide(moves, boundaries, {}, sizes, dict.fromkeys(range(4), free))


def waiting(found):
    return sorted((move.requests, move.source, move.destination, move.tokens) for move in found.deferred)


def test_what_was_carried_stays_when_a_plan_leads_away_and_back():
    backlog, sizes = Backlog(), {"a": 250}
    epoch(backlog, [Move(("a",), 0, 1, 250)], limits(100), sizes)
    found = epoch(backlog, [Move(("a",), 1, 2, 250), Move(("a",), 2, 1, 250)], limits(120), sizes, 250)
    assert (found.parts, found.deferred) == ([Part(Move(("a",), 0, 1, 250), Way.KV, 120)], [Move(("a",), 0, 1, 250)])
    assert backlog.carried == {1: 220}


def test_what_was_carried_stays_when_the_netted_move_goes_to_the_same_place():
    """The request is to go on from where it goes, and back there; others count on its leaving meanwhile."""
    backlog, sizes = Backlog(chain_max=1), {"a": 250, "b": 900, "c": 900}
    epoch(backlog, [Move(("a",), 0, 1, 250)], limits(100), sizes)
    moves = [Move(("b",), 2, 0, 900), Move(("a",), 1, 2, 250), Move(("c",), 3, 1, 900), Move(("a",), 2, 1, 250)]
    found = epoch(backlog, moves, limits(100), sizes, 0)
    assert waiting(found) == [(("a",), 0, 1, 250), (("b",), 2, 0, 900), (("c",), 3, 1, 900)]
    assert backlog.carried == {1: 100}
    found = epoch(backlog, [], limits(150), {"a": 250})
    assert (found.made, found.parts) == ([Move(("a",), 0, 1, 250)], [Part(Move(("a",), 0, 1, 250), Way.KV, 150)])


def test_what_was_carried_elsewhere_does_not_count_when_chains_are_netted():
    backlog, sizes = Backlog(chain_max=1), {"a": 250, "b": 900}
    epoch(backlog, [Move(("a",), 0, 1, 250)], limits(100), sizes)
    moves = [Move(("b",), 2, 0, 900), Move(("a",), 1, 2, 250), Move(("b",), 0, 3, 900)]
    found = epoch(backlog, moves, limits(0), sizes, 0)
    assert waiting(found) == [(("a",), 0, 2, 250), (("b",), 2, 3, 900)]
    assert backlog.carried == {}


def test_each_request_of_a_group_that_netting_divides_keeps_what_was_carried_of_it():
    backlog, sizes = Backlog(chain_max=1), {"a": 60, "b": 70, "c": 900}
    epoch(backlog, [Move(("a", "b"), 0, 1, 130)], limits(80), sizes)  # a, and 20 of b
    moves = [Move(("a",), 1, 2, 60), Move(("c",), 3, 1, 900), Move(("a",), 2, 3, 60)]
    found = epoch(backlog, moves, limits(80), sizes, 0)
    assert waiting(found) == [(("a",), 0, 3, 60), (("b",), 0, 1, 70), (("c",), 3, 1, 900)]
    assert backlog.carried == {1: 20}


def test_what_was_carried_of_a_request_that_has_ended_is_not_another_ones():
    backlog, sizes = Backlog(), {"a": 60, "b": 70}
    epoch(backlog, [Move(("a", "b"), 0, 1, 130)], limits(80), sizes)
    assert backlog.carried == {1: 80}
    found = epoch(backlog, [], limits(40), {"b": 75})
    assert found.parts == [Part(Move(("b",), 0, 1, 75), Way.KV, 40)]  # 20 of it were there
    assert backlog.carried == {1: 60}
    found = epoch(backlog, [], limits(40), {"b": 75})
    assert (found.made, found.parts) == ([Move(("b",), 0, 1, 75)], [Part(Move(("b",), 0, 1, 75), Way.KV, 15)])


def test_a_stopped_move_that_is_netted_keeps_what_was_prefilled():
    backlog, sizes = Backlog(patience=1, chain_max=1), {"a": 100, "b": 100, "c": 900}
    moves = [Move(("a",), 0, 1, 100), Move(("b",), 1, 0, 100)]
    assert epoch(backlog, moves, limits(0, 40), sizes, 0).stopped == moves
    found = epoch(backlog, [], limits(0, 40), sizes, 100)
    assert [part.tokens for part in found.parts] == [40, 40]
    moves = [Move(("a",), 1, 2, 100), Move(("c",), 3, 1, 900), Move(("a",), 2, 1, 100)]
    found = epoch(backlog, moves, limits(0), sizes, 100)
    assert waiting(found) == [(("a",), 0, 1, 100), (("b",), 1, 0, 100), (("c",), 3, 1, 900)]
    assert backlog.carried == {1: 40, 0: 40}
    assert epoch(backlog, [], limits(10**6, 60), sizes).as_tokens == [
        Move(("a",), 0, 1, 100), Move(("b",), 1, 0, 100)
    ]  # fmt: skip


def test_what_was_carried_is_not_counted_again_for_a_later_move_to_the_same_place():
    """The first move waits on, since another counts on its leaving; a later one comes back to where that goes."""
    backlog, sizes = Backlog(), {"a": 250, "b": 900, "c": 900}
    epoch(backlog, [Move(("a",), 0, 1, 250)], limits(100), sizes)
    moves = [
        Move(("b",), 2, 0, 900), Move(("a",), 1, 2, 250), Move(("c",), 3, 1, 900), Move(("a",), 2, 3, 250),
        Move(("a",), 3, 1, 250),
    ]  # fmt: skip
    found = epoch(backlog, moves, limits(100), sizes, 0)
    assert waiting(found)[:3] == [(("a",), 0, 1, 250), (("a",), 1, 2, 250), (("a",), 2, 1, 250)]
    assert backlog.carried == {1: 100}
    found = epoch(backlog, [], limits(150), {"a": 250})
    assert (found.made, found.parts) == ([Move(("a",), 0, 1, 250)], [Part(Move(("a",), 0, 1, 250), Way.KV, 150)])
    assert epoch(backlog, [], limits(250), {"a": 250}).made == [Move(("a",), 1, 2, 250)]
    found = epoch(backlog, [], limits(249), {"a": 250})
    assert (found.made, found.parts) == ([], [Part(Move(("a",), 2, 1, 250), Way.KV, 249)])


def test_what_was_carried_has_one_move_however_often_plans_lead_away_and_back():
    backlog, sizes = Backlog(), {"a": 250, "c": 900, "d": 900}
    epoch(backlog, [Move(("a",), 0, 1, 250)], limits(100), sizes)
    moves = [
        Move(("a",), 1, 2, 250), Move(("a",), 2, 1, 250), Move(("c",), 3, 0, 900),  # and a stays on its way to 1
        Move(("a",), 1, 3, 250), Move(("d",), 2, 1, 900), Move(("a",), 3, 2, 250), Move(("a",), 2, 1, 250),
    ]  # fmt: skip
    found = epoch(backlog, moves, limits(0), sizes, 0)
    assert waiting(found)[:3] == [(("a",), 0, 1, 250), (("a",), 1, 3, 250), (("a",), 3, 1, 250)]
    assert backlog.carried == {1: 100}
