"""kvpool.sim: a fleet behind the global scheduler, by examples to follow by hand, and what must hold always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.fleet import BLOCK, UnitModel, prompt, transfer

from kvpool import ArgumentError
from kvpool.policy import routing
from kvpool.sim.routing_fleet import FleetSim, Session, Turn
from kvpool.sim.routing_sessions import DocumentSessions

NO_CAP = routing.Balance(cap=float("inf"), warmup_s=0)


def fleet(n=2, capacity=100, policy=None, **options):
    moves = options.get("transfer")

    def scheduler(clock):
        return routing.GlobalScheduler(
            UnitModel(),
            clock,
            policy=policy or routing.QueuePlusExec(),
            transfer=moves,
            balance=NO_CAP,
            ttl_s=None,
            learn_at="response",
        )

    return FleetSim(scheduler, n, UnitModel(), capacity, token_s=0.5, **options)


def one(name, start_s, *prompts, output=0, think_s=0.0):
    return Session(name, start_s, [Turn(p, np.full(output, 77, np.int32)) for p in prompts], think_s)


def test_a_queue_by_hand():
    """One instance: 20 s, then 20 s of which all but the last token are cached, then 8 s that fork."""
    sim = fleet(n=1)
    done = sim.run([one("a", 0.0, prompt(5)), one("b", 3.0, prompt(5)), one("c", 4.0, prompt(5, fork=3))])
    assert done.ttft_s.tolist() == [20.0, 18.0, 25.0]
    assert done.cached_tokens.tolist() == [0, 20, 12]
    assert done.work_s.tolist() == [29.0]
    assert done.end_s == 29.0
    assert done.hit_ratio == 32 / 60
    assert sim.scheduler.in_flight == 0


def test_the_next_turn_waits_for_the_answer_and_finds_it_cached():
    """16 s, 8 tokens of answer in 4 s, 2 s of thought; then prompt, answer and one block more."""
    first, answer = prompt(4), np.full(8, 77, np.int32)
    second = np.concatenate([first, answer, prompt(1, name=9)])
    done = fleet().run([Session("a", 1.0, [Turn(first, answer), Turn(second, answer)], think_s=2.0)])
    assert done.ttft_s.tolist() == [16.0, 4.0]
    assert done.cached_tokens.tolist() == [0, 24]
    assert done.end_s == 1 + 16 + 4 + 2 + 4 + 4


def test_the_longest_unused_is_evicted_to_make_room():
    sim = fleet(n=1, capacity=6)
    done = sim.run(
        [
            one("a", 0.0, prompt(3, name=1)),
            one("b", 100.0, prompt(3, name=2)),
            one("c", 200.0, prompt(3, name=1)),
            one("d", 300.0, prompt(3, name=3)),  # 2 goes
            one("e", 400.0, prompt(3, name=1)),
            one("f", 500.0, prompt(3, name=2)),
            one("g", 600.0, prompt(9, name=5)),  # more than fits
            one("h", 700.0, prompt(9, name=5)),
        ]
    )
    assert done.cached_tokens.tolist() == [0, 0, 12, 0, 12, 0, 0, 24]
    assert len(sim._instances[0].index) == 6
    sim._instances[0].index.audit()


def test_blocks_that_another_instance_holds_are_fetched():
    """Session policy, so that b computes where a did not; 0.25 s a token for 16, and 4 to compute."""
    policy = routing.SessionId()
    sim = fleet(policy=policy, transfer=transfer(0.25))
    done = sim.run(
        [
            one("a", 0.0, prompt(4)),
            one("b", 1.0, prompt(1, name=8)),
            one("b", 50.0, np.concatenate([prompt(4), prompt(1, name=9)])),
        ]
    )
    assert done.instance.tolist() == [0, 1, 1]
    assert done.fetched_tokens.tolist() == [0, 0, 16]
    assert done.ttft_s.tolist() == [16.0, 4.0, 16 * 0.25 + 4]


def test_a_fetch_that_would_come_too_late_is_computed():
    """Instance 0 evicts what it held while the request waits at instance 1."""
    sim = fleet(policy=routing.SessionId(), capacity=4, transfer=transfer(0.25))
    done = sim.run(
        [
            one("a", 0.0, prompt(4)),
            one("b", 1.0, prompt(1, name=8)),
            one("b", 17.0, prompt(4, name=7)),
            one("a", 18.0, prompt(4, name=6)),  # at 34 the first prompt is gone
            one("b", 19.0, np.concatenate([prompt(3), prompt(1, name=9)])),  # begins at 33
            one("b", 20.0, np.concatenate([prompt(4), prompt(1, name=9)])),  # begins after
        ]
    )
    assert done.fetched_tokens.tolist() == [0, 0, 0, 0, 12, 0]
    assert done.cached_tokens.tolist()[-1] == 12


def sessions_of(documents, share, rate, seed):
    workload = DocumentSessions(documents, 40, question_tokens=6, answer_tokens=5, vocab=50)
    return workload.sessions(share, rate, seed)


@settings(max_examples=40)
@given(
    st.sampled_from([routing.LeastLoad, routing.SessionId, routing.LongestPrefix, routing.QueuePlusExec]),
    st.integers(1, 4),
    st.integers(1, 60),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_work_is_conserved(policy, n, capacity, by_events, fetching, seed):
    sessions = sessions_of(6, 2, 0.1, seed)
    sim = fleet(n, capacity, policy(), by_events=by_events, transfer=transfer(0.1) if fetching else None)
    done = sim.run(sessions)
    assert len(done.ttft_s) == sum(len(session.turns) for session in sessions)
    there = done.cached_tokens + done.fetched_tokens
    computed = done.prompt_tokens - np.minimum(there, done.prompt_tokens - 1)
    assert done.work_s.sum() == pytest.approx(float(computed.sum() + 0.1 * done.fetched_tokens.sum()))
    assert (done.ttft_s >= computed - 1e-6).all()
    assert (there <= done.prompt_tokens).all()
    assert done.end_s >= done.work_s.max() - 1e-6
    assert sim.scheduler.in_flight == 0
    for instance in sim._instances:
        assert len(instance.index) <= capacity
        instance.index.audit()
    if by_events:
        sim._follow_events()
        tree = sim.scheduler.tree(routing.Kind.COLOCATED)
        assert [tree.blocks(i) for i in range(n)] == [len(instance.index) for instance in sim._instances]
    if not fetching:
        assert not done.fetched_tokens.any()


def test_the_same_seed_gives_the_same_result_and_another_one_another():
    def run(seed):
        return fleet(3).run(sessions_of(10, 3, 0.3, seed))

    assert run(1).ttft_s.tobytes() == run(1).ttft_s.tobytes()
    assert run(1).ttft_s.tobytes() != run(2).ttft_s.tobytes()


def test_prompt_trees_find_hits_that_sessions_miss():
    """The subject of Fig 15, at its smallest: the same documents, in questions of others."""
    hits = {}
    for policy in (routing.LeastLoad, routing.SessionId, routing.LongestPrefix):
        hits[policy] = fleet(4, 2000, policy()).run(sessions_of(12, 4, 0.02, 3)).hit_ratio
    assert hits[routing.LeastLoad] < hits[routing.SessionId] < hits[routing.LongestPrefix]


def test_document_sessions_have_the_figures_of_the_paper():
    """§8: 80 sessions, roughly 250 requests, 1k tokens of a document, at most five questions."""
    workload = DocumentSessions()
    once, twice = workload.sessions(1, 10.0, 5), workload.sessions(2, 10.0, 5)
    requests = sum(len(session.turns) for session in once)
    assert (len(once), len(twice)) == (80, 160)
    assert 220 <= requests <= 280
    assert sum(len(session.turns) for session in twice) == 2 * requests
    assert max(len(session.turns) for session in once) <= 5
    texts = sorted(turn.prompt.tobytes() for session in twice for turn in session.turns)
    assert texts[0::2] == texts[1::2]
    for session in once:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            said = np.concatenate([before.prompt, before.output])
            assert (after.prompt[: len(said)] == said).all()
        assert 1000 < len(session.turns[0].prompt) < 1100
    duration = twice[-1].start_s
    assert 2 * requests / duration == pytest.approx(10.0, rel=0.35)
    assert len({session.name for session in twice}) == 160


@pytest.mark.parametrize(
    "make",
    [
        lambda: fleet(n=0),
        lambda: fleet(capacity=0),
        lambda: DocumentSessions().sessions(0, 1.0, 0),
        lambda: DocumentSessions().sessions(1, 0.0, 0),
    ],
)
def test_impossible_simulations_are_refused(make):
    with pytest.raises(ArgumentError):
        make()


def test_blocks_of_the_kit_agree_with_those_of_the_model():
    assert UnitModel.block_tokens == BLOCK
