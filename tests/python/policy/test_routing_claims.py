"""What the trees take for held at the dispatch of requests, some of which fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.fleet import BLOCK, Fleet, prompt, transfer

from kvpool.policy.routing import Holder, Kind, Request
from kvpool.policy.routing.claims import Claims

_NAMES = st.lists(st.integers(1, 2), min_size=1, max_size=4)
_STEPS = st.lists(st.tuples(st.sampled_from(["route", "first_token", "finished", "failed"]), _NAMES, st.integers(0, 5)))


@given(_STEPS)
def test_an_instance_holds_what_was_computed_there_and_what_is_on_its_way(steps):
    fleet = Fleet(1, learn_at="dispatch", ttl_s=None)
    scheduler, tree = fleet.scheduler, fleet.scheduler.tree(Kind.COLOCATED)
    under_way, computed = {}, []
    for step, names, which in steps:
        if step == "route":
            tokens = [name for name in names for _ in range(BLOCK)]
            under_way[fleet.route(tokens).ticket] = names
        elif under_way:
            ticket = sorted(under_way)[which % len(under_way)]
            getattr(scheduler, step)(ticket)
            computed += [under_way[ticket]] * (step != "failed")
            if step != "first_token":
                del under_way[ticket]
        # A request that was computed and then fails stays: it is in `computed` since its first token.
        prompts = [*computed, *under_way.values()]
        assert tree.blocks(1) == len({tuple(names[:end]) for names in prompts for end in range(1, len(names) + 1)})
    tree.audit()


@pytest.mark.parametrize("order", ["computed first", "left first", "left last"])
def test_who_leaves_takes_no_prompt_from_those_who_share_it(order):
    """Two prompts begin with the same five blocks, and the client of one leaves before its first token."""
    fleet = Fleet(1, learn_at="dispatch")
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    leaves, stays = (prompt(7, fork=5, fork_name=name) for name in (2, 3))
    if order == "left last":
        stays, leaves = fleet.route(stays), fleet.route(leaves)
    else:
        leaves, stays = fleet.route(leaves), fleet.route(stays)
    if order == "computed first":
        fleet.scheduler.finished(stays.ticket)
    fleet.scheduler.failed(leaves.ticket)
    assert tree.blocks(1) == 7
    assert fleet.route(prompt(9, fork=5, fork_name=4)).cached == 5 * BLOCK


def test_namespaces_share_nothing():
    fleet = Fleet(1, learn_at="dispatch")
    tree = fleet.scheduler.tree(Kind.COLOCATED)
    leaves = fleet.route(prompt(3))
    stays = fleet.scheduler.route(Request(prompt(3), namespace="other"))
    fleet.scheduler.finished(stays.ticket)
    fleet.scheduler.failed(leaves.ticket)
    assert tree.blocks(1) == 3
    assert len(tree.match(prompt(3))[0]) == 0


def test_nothing_is_kept_of_requests_that_have_ended():
    fleet = Fleet(2, learn_at="dispatch")
    tickets = [fleet.route(prompt(3, name=name)).ticket for name in range(6)]
    assert len(fleet.scheduler._claims) == 6
    fleet.scheduler.remove_instance(1)
    for ticket in tickets:
        (fleet.scheduler.failed if ticket % 2 else fleet.scheduler.finished)(ticket)
    assert (len(fleet.scheduler._claims), fleet.scheduler._claims._at) == (0, {})


# ---- what is fetched


def _elsewhere(fleet, tokens):
    """Routes it while instance 1 takes nothing, so that instance 2 gets it."""
    fleet.scheduler.drain(1)
    decision = fleet.route(tokens)
    fleet.scheduler.failed(decision.ticket)
    fleet.scheduler.resume(1)
    assert decision.instance == 2
    return decision


@pytest.mark.parametrize("by_events", [False, True])
def test_nothing_is_fetched_that_nobody_has_computed(by_events):
    fleet = Fleet(1, learn_at="dispatch", transfer=transfer(0.1))
    fleet.scheduler.set_by_events(1, by_events)
    first = fleet.route(prompt(8))
    fleet.scheduler.add_instance(2)
    found = _elsewhere(fleet, prompt(8))
    assert (found.holders, found.fetch) == ((Holder(1, 0, 8 * BLOCK),), None)
    assert found.exec_s == 8 * BLOCK
    fleet.scheduler.first_token(first.ticket)
    assert _elsewhere(fleet, prompt(8)).fetch[:3] == (1, 0, 8 * BLOCK)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_as_much_is_fetched_as_is_computed(order):
    """Instance 1 has three blocks, and gets a prompt of six and one of nine that begin with them."""
    fleet = Fleet(1, learn_at="dispatch", transfer=transfer(0.1))
    fleet.serve(prompt(3))
    tickets = {"first": fleet.route(prompt(6)).ticket, "second": fleet.route(prompt(9)).ticket}
    fleet.scheduler.add_instance(2)
    assert _elsewhere(fleet, prompt(12)).fetch[:3] == (1, 0, 3 * BLOCK)
    assert _elsewhere(fleet, prompt(12, fork=2)).fetch[:3] == (1, 0, 2 * BLOCK)
    fleet.scheduler.first_token(tickets[order[0]])
    assert _elsewhere(fleet, prompt(12)).fetch[:3] == (1, 0, (6 if order[0] == "first" else 9) * BLOCK)
    fleet.scheduler.first_token(tickets[order[1]])
    assert _elsewhere(fleet, prompt(12)).fetch[:3] == (1, 0, 9 * BLOCK)


def test_a_holder_that_has_computed_it_is_preferred_to_one_that_has_to():
    fleet = Fleet(2, learn_at="dispatch", transfer=transfer(0.1))
    fleet.scheduler.drain(2)
    computing = fleet.route(prompt(8))
    fleet.hold(2, prompt(8))
    fleet.scheduler.add_instance(3)
    fleet.scheduler.drain(1)
    assert computing.instance == 1
    found = fleet.route(prompt(8))
    assert (found.instance, found.fetch[:3]) == (3, (2, 0, 8 * BLOCK))


@pytest.mark.parametrize("by_events", [False, True])
def test_what_a_request_that_failed_was_to_compute_is_not_fetched(by_events):
    fleet = Fleet(1, learn_at="dispatch", transfer=transfer(0.1))
    fleet.scheduler.set_by_events(1, by_events)
    leaves, stays = fleet.route(prompt(8)), fleet.route(prompt(8))
    fleet.scheduler.failed(leaves.ticket)
    fleet.scheduler.add_instance(2)
    assert _elsewhere(fleet, prompt(8)).fetch is None
    fleet.scheduler.first_token(stays.ticket)
    assert _elsewhere(fleet, prompt(8)).fetch[:3] == (1, 0, 8 * BLOCK)


class _Adds:
    """In place of a tree: so many of the last blocks are new."""

    def __init__(self, new):
        self.new = new

    def insert(self, tokens, instance, namespace):
        return min(self.new, len(tokens) // BLOCK)


@given(st.lists(st.tuples(_NAMES, st.integers(0, 4)), max_size=4), _NAMES, st.integers(0, 4))
def test_what_is_computed_ends_at_the_first_block_that_someone_has_yet_to_compute(claimed, names, held):
    claims = Claims(BLOCK)
    missing = set()
    for ticket, (other, new) in enumerate(claimed):
        claims.add(_Adds(new), np.repeat(np.array(other, np.int32), BLOCK), "", 1, 1, ticket)
        missing |= {tuple(other[: at + 1]) for at in range(max(0, len(other) - new), len(other))}
    held = min(held, len(names))
    computed = next((at for at in range(held) if tuple(names[: at + 1]) in missing), held)
    tokens = np.repeat(np.array(names, np.int32), BLOCK)
    assert claims.computed_tokens(1, tokens, "", held * BLOCK) == computed * BLOCK
    assert claims.computed_tokens(2, tokens, "", held * BLOCK) == held * BLOCK
    assert claims.computed_tokens(1, tokens, "other", held * BLOCK) == held * BLOCK
