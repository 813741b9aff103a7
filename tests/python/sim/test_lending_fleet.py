"""kvpool.sim: fleets that lend, by examples to follow by hand, and what must hold always."""

from __future__ import annotations

import pytest
from sim.lending_kit import fleet, machines, mixed, rules

from kvpool.errors import ArgumentError, OutOfBlocks
from kvpool.policy import lending
from kvpool.sim.lending_fleet import LendingFleet
from kvpool.sim.lending_market import Market
from kvpool.sim.lending_memory import Memory
from kvpool.sim.workload import Arrival

SEEDS = range(6)


def check(memories):
    """No block is counted twice; what one owes the other lends."""
    for memory in memories:
        memory.check()
    owed = {(memory.member, creditor): blocks for memory in memories for creditor, blocks in memory.debts.items()}
    lent = {(debtor, memory.member): blocks for memory in memories for debtor, blocks in memory.lent.items()}
    assert owed == lent


def figures(outcome):
    """Everything that a run says of its requests."""
    return [(job.number, job.first_s, job.end_s, job.made, job.stopped) for job in outcome.jobs]


# ---- by hand


def test_one_request_by_hand():
    """Its KV is there: three steps of 1.25 s and, in two layers, 8, 9 and 10 tokens to read."""
    done = fleet(1, 10, scale=1.0, chunk=0).run([Arrival(0.0, 8, 3)])
    assert done.end_s == pytest.approx(3 * (1.25 + 2 * 9))
    assert done.requests_s == pytest.approx(1 / done.end_s)
    assert done.output_tokens_s == pytest.approx(3 / done.end_s)


def test_a_prompt_is_computed_in_chunks():
    """16 and 4 tokens: pairs 16 * 16 / 2, then 4 * 16 + 4 * 4 / 2; the second chunk gives the first token."""
    done = fleet(1, 10, scale=1.0).run([Arrival(0.0, 20, 1)])
    first = 1.25 + 2 * (16 + 2 * 16 * 16 / 2)
    second = 1.25 + 2 * (20 + 2 * (4 * 16 + 4 * 4 / 2))
    assert done.end_s == pytest.approx(first + second)
    assert done.jobs[0].first_s == done.end_s


def test_a_sequence_of_two_engines_by_hand():
    """80 tokens and one to come are 21 blocks; an engine of 16 stages two and keeps a leaf and a block at the end.

    So 10 blocks stay from the first on, and four leaves go: the creditor reads 32 tokens while the borrower reads 48.
    """
    done = fleet(2, 16, rules(payback=False), scale=1.0, chunk=0).run([Arrival(0.0, 80, 1)])
    assert done.market.borrowed == 8
    assert done.end_s == pytest.approx(1.25 + 2 * 48)
    assert done.copied_bytes == 0  # a new sequence's blocks are written where they lie


def test_of_a_new_sequence_go_its_own_blocks():
    """They are not written yet, so nothing is copied; those of the sequence beside it stay."""
    memories = {1: Memory(1, 24, 20), 2: Memory(2, 24, 20)}
    memories[1].grow(9, 14)
    memories[1].sequences[9].written = 14
    copies = []
    market = Market(memories, rules(), 0, lambda *what: copies.append(what))
    assert market.place(1, 5, 21, 0)
    check(memories.values())
    assert memories[1].debts == {2: 14}
    assert memories[1].sequences[5].loans[0].first == 4  # early blocks are read by all later chunks: they stay
    assert memories[1].sequences[9].away == 0
    assert (memories[1].free, memories[1].staged) == (1, {5: 2})
    assert copies == []
    memories[1].unstage(5)
    assert not market.place(1, 6, 21, 0)  # the other one has too little left, and keeps it
    check(memories.values())


def test_a_creditor_pays_for_what_it_computes():
    """A short request takes longer beside a neighbour's long one than beside none."""
    short = Arrival(0.0, 8, 40)
    alone = fleet(2, 30, rules(), scale=0.05, chunk=0).run([short])
    both = fleet(2, 30, rules(), scale=0.05, chunk=0).run([Arrival(0.0, 150, 40), short])
    assert both.market.borrowed > 0
    assert both.jobs[1].end_s > 1.02 * alone.jobs[0].end_s


def test_a_creditor_bounds_what_it_computes_for_others():
    """The less a busy creditor lends of its time, the longer the borrower's steps, and the shorter the creditor's."""
    ends = []
    for share in (0.1, 0.3, 0.5):
        sim = fleet(2, 60, rules(payback=False), scale=0.05, chunk=0, share=share)
        done = sim.run([Arrival(0.0, 8, 90), Arrival(0.1, 340, 60)])  # the first is at the second's creditor
        assert done.market.borrowed > 0
        ends.append(tuple(job.end_s for job in done.jobs))
    short, long = zip(*ends, strict=True)
    assert list(short) == sorted(set(short))
    assert list(long) == sorted(set(long), reverse=True)


# ---- what must hold always


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", [{}, {"borrowers_lend": True}, {"payback": False}], ids=["", "open", "kept"])
def test_every_request_ends_and_every_debt_is_paid(seed, settings):
    seen = []

    def watch(memories):
        check(memories)
        seen[:] = memories

    sim = fleet(4, 40, rules(**settings), watch=watch, seed=seed)
    requests = mixed(seed)
    done = sim.run(requests)
    assert done.refused == done.given_up == 0
    assert [job.made for job in done.jobs] == [request.response for request in requests]
    assert all(job.arrival_s < job.first_s <= job.end_s <= done.end_s for job in done.jobs)
    assert done.market.borrowed > 0
    assert sum(done.made.values()) == sum(request.response for request in requests)
    check(seen)
    assert all(memory.free == memory.blocks and not memory.debts and not memory.lent for memory in seen)
    assert all(memory.most_lent <= memory.lend_max for memory in seen)


def test_the_same_seed_gives_the_same_fleet():
    runs = [figures(fleet(4, 40, rules(), seed=3).run(mixed(1))) for _ in range(2)]
    assert runs[0] == runs[1]
    others = {repr(figures(fleet(4, 40, rules(), seed=seed).run(mixed(1)))) for seed in range(5)}
    assert len(others) > 1  # creditors are drawn


def test_a_fleet_that_need_not_lend_is_as_one_that_cannot():
    requests = mixed(2, longest=60, rate=0.05)
    lends, alone = fleet(4, 200, rules()).run(requests), fleet(4, 200).run(requests)
    assert lends.market.borrowed == 0
    assert figures(lends) == figures(alone)


def test_a_lone_engine_lends_to_nobody():
    requests = mixed(3, longest=60)
    assert figures(fleet(1, 40, rules()).run(requests)) == figures(fleet(1, 40).run(requests))


def test_the_longest_request_is_served_and_a_longer_one_refused():
    for part in (0.25, 0.9):
        longest = fleet(4, 100, rules(lend_part=part)).context_max
        assert longest > 400 * (0.9 + 2.9 * part)
        done = fleet(4, 100, rules(lend_part=part)).run([Arrival(0.0, longest - 3, 2), Arrival(0.0, longest, 2)])
        assert (len(done.done), done.refused) == (1, 1)
        assert max(done.away) > 0.3


def test_engines_alone_refuse_what_no_engine_holds():
    done = fleet(4, 100).run([Arrival(0.0, 500, 2), Arrival(0.0, 300, 2)])
    assert (len(done.done), done.refused) == (1, 1)


def test_sequences_without_room_are_stopped_and_computed_again():
    requests = [Arrival(0.0, 40, 60), Arrival(0.0, 40, 60)]
    done = fleet(1, 30).run(requests)
    assert done.stopped > 0
    assert [job.made for job in done.jobs] == [60, 60]


def test_a_sequence_without_room_moves_to_an_engine_that_has_it():
    requests = [Arrival(0.0, 40, 60), Arrival(0.0, 60, 2), Arrival(0.0, 40, 60)]
    done = fleet(2, 30, migrate=True).run(requests)
    assert done.moved > 0
    assert done.stopped == 0
    assert done.copied_bytes > 0
    assert done.stall_s > 0
    assert [job.made for job in done.jobs] == [60, 2, 60]


def test_blocks_that_are_written_are_copied_and_hold_a_step_up():
    """Two grow beyond their engine's memory while the other engine has room."""
    requests = [Arrival(0.0, 60, 1), Arrival(0.0, 40, 70), Arrival(0.0, 40, 70)]
    done = fleet(2, 40, rules()).run([*requests, Arrival(0.0, 40, 70), Arrival(0.0, 40, 70)])
    assert done.copied_bytes > 0
    assert done.stall_s > 0


def test_cycles_of_debts_are_settled():
    memories = {member: Memory(member, 40, 30) for member in (1, 2, 3)}
    copies = []
    market = Market(memories, rules(), 0, lambda *what: copies.append(what))
    for member, memory in memories.items():
        memory.grow(member, 30)
        memory.sequences[member].written = 30
    for member, memory in memories.items():
        creditor = member % 3 + 1
        assert memories[creditor].lend(member, 10)
        assert memory.move([lending.Offload(member, 0, 10, creditor)]) == {creditor: 10}
    check(memories.values())
    market.run_settlement()
    check(memories.values())
    assert market.cycles == 1
    assert market.settled == 30
    assert not any(memory.debts for memory in memories.values())
    assert sum(blocks for _, _, blocks in copies) == 30


def test_a_creditor_that_is_short_gets_its_blocks_back_first():
    memories = {1: Memory(1, 40, 30), 2: Memory(2, 40, 30, reserve=4), 3: Memory(3, 40, 30)}
    market = Market(memories, rules(), 0, lambda *_: None)
    memories[1].grow(1, 40)
    for creditor in (3, 2):
        assert memories[creditor].lend(1, 8)
        memories[1].move([lending.Offload(1, 8 * creditor, 8, creditor)])
    memories[2].grow(2, 32)  # all that it has left: its reserve is gone
    market.beat(waiting=True)  # the row says so
    market.beat(waiting=True)
    assert memories[1].debts == {2: 4, 3: 8}
    market.beat(waiting=False)
    assert not memories[1].debts


def test_what_a_memory_refuses_changes_nothing():
    memory = Memory(1, 10, lend_max=4, reserve=2)
    assert not memory.lend(2, 5)
    assert memory.lend(2, 4)
    assert not memory.lend(3, 1)
    with pytest.raises(OutOfBlocks) as refused:
        memory.grow(7, 7)
    assert (refused.value.requested, refused.value.free) == (7, 6)
    memory.grow(7, 6)
    with pytest.raises(OutOfBlocks):
        memory.come(lending.Payback(7, 2, 0, 1))
    memory.check()
    assert (memory.free, memory.lent) == (0, {2: 4})


def test_a_fleet_lends_or_migrates():
    with pytest.raises(ArgumentError, match="not both"):
        LendingFleet(machines(2, 10), rules=rules(), migrate=True)
    with pytest.raises(ArgumentError, match="engines"):
        machines(0, 10)
