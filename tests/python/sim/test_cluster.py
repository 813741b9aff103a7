"""The simulated cluster against closed forms, against naive models, and against what it must never lose."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.cluster_kit import DECODE, MODEL, ONE_BY_ONE, UNIT, Watched, cluster, request, simulated
from sim.naive import NaiveCache, naive_engine

from kvpool import ArgumentError
from kvpool.policy import cost, routing
from kvpool.sim.cluster import Cluster, ClusterSim
from kvpool.sim.generators import generate
from kvpool.sim.instance import Batching
from kvpool.sim.requests import NO_IDS, SimRequest
from kvpool.sim.routing_fleet import FleetSim, Session, Turn
from kvpool.sim.times import CountedInBlocks
from kvpool.sim.traces import open_trace

POLICIES = [routing.LeastLoad, routing.SessionId, routing.LongestPrefix, routing.QueuePlusExec]


# ---- closed forms


@pytest.mark.parametrize("busy", [0.3, 0.6])
def test_the_wait_of_one_instance_agrees_with_m_d_1(busy):
    """Pollaczek and Khinchine: rho S / (2 (1 - rho)) for a constant service time S."""
    service_s = MODEL.exec_s(64 * UNIT)
    workload = generate(
        "poisson", rate=busy / service_s, requests=8000, seed=4, sigma=0, prompt=64 * UNIT, output=1, block_tokens=UNIT
    )
    done = ClusterSim(cluster(hbm_blocks=1000), skip=500).run(workload.start())
    expected = busy * service_s / (2 * (1 - busy))
    assert done.ttft_s.mean - service_s == pytest.approx(expected, rel=0.06)
    assert done.instances[0]["prefill_busy"] == pytest.approx(busy, rel=0.03)


def test_a_queue_by_hand():
    done = Watched(cluster())
    done.run([request(0.0, 1, 8), request(0.0, 2, 4), request(0.0, 1, 6)])
    first = MODEL.exec_s(8 * UNIT)
    second = first + MODEL.exec_s(4 * UNIT)
    third = second + MODEL.exec_s(6 * UNIT, 6 * UNIT)
    assert [done.first[number] for number in range(3)] == pytest.approx([first, second, third])
    assert done.hits == {0: 0, 1: 0, 2: 6}
    measures = done.measures
    assert (measures.prompt_tokens, measures.hbm_tokens) == (18 * UNIT, 6 * UNIT)


def test_prompts_of_a_batch_are_computed_together():
    done = Watched(cluster(batching=Batching(batch_tokens=12 * UNIT, chunked=False)))
    done.run([request(0.0, 1, 4), *(request(1e-9, name, 4) for name in (2, 3, 4, 5))])
    alone, together = MODEL.exec_s(4 * UNIT), MODEL.batch_s([(4 * UNIT, 0)] * 3)
    assert done.first[0] == pytest.approx(alone)
    assert [done.first[number] for number in (1, 2, 3)] == pytest.approx([alone + together] * 3)
    assert done.first[4] == pytest.approx(2 * alone + together)


def test_what_prompts_of_a_batch_share_is_computed_once():
    done = Watched(cluster(batching=Batching(batch_tokens=12 * UNIT, chunked=False)))
    done.run([request(0.0, 1, 4), *(request(1e-9, name, blocks) for name, blocks in ((2, 4), (2, 4), (3, 4), (2, 6)))])
    together = MODEL.batch_s([(4 * UNIT, 0), (4 * UNIT, 4 * UNIT), (4 * UNIT, 0), (6 * UNIT, 4 * UNIT)])
    ends = MODEL.exec_s(4 * UNIT) + together
    assert [done.first[number] for number in (1, 2, 3, 4)] == pytest.approx([ends] * 4)
    assert done.hits == {0: 0, 1: 0, 2: 4, 3: 0, 4: 4}


# ---- naive models


@pytest.mark.parametrize("batch_requests", [3, 256])
def test_decoding_agrees_with_a_simulation_step_by_step(batch_requests):
    random = np.random.default_rng(7)
    times = np.cumsum(random.exponential(0.05, 60)).tolist()
    shapes = [(int(p), int(o)) for p, o in zip(random.integers(16, 600, 60), random.integers(1, 80, 60), strict=True)]
    rows = [(time_s, *shape) for time_s, shape in zip(times, shapes, strict=True)]
    first, last = naive_engine(rows, MODEL, lambda batch, context: DECODE.run_s(1, batch, context), batch_requests)
    requests = [
        SimRequest(time_s, np.arange(1000 * at, 1000 * at - (-prompt // UNIT), dtype=np.int32), prompt, output)
        for at, (time_s, prompt, output) in enumerate(rows)
    ]
    done = Watched(cluster(batching=Batching(0, batch_requests, chunked=False)))
    done.run(requests)
    assert [done.first[at] for at in range(60)] == pytest.approx([first[at] for at in range(60)], rel=1e-9)
    assert [done.last[at] for at in range(60)] == pytest.approx([last[at] for at in range(60)], rel=1e-9)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 100_000), st.floats(0, 1))
def test_the_current_step_is_found(steps, batch, context, share):
    passed = share * DECODE.run_s(steps, batch, context)
    found = DECODE.steps_until(passed, batch, context)
    assert 1 <= found <= steps
    assert DECODE.run_s(found, batch, context) >= passed
    assert found == 1 or DECODE.run_s(found - 1, batch, context) < passed


@pytest.mark.parametrize("capacity", [100, 160, 400, 100_000])
def test_hits_agree_with_the_plainest_lru(capacity):
    """One instance, one prompt at a time: the order of arrival is the order of use."""
    workload = generate(
        "documents", rate=1e-3, requests=600, seed=2, output=1, sigma=0.0, shared=20 * UNIT, shared_count=12, prompt=40
    )
    naive, hits = NaiveCache(capacity), []
    for each in workload.start():
        hits.append(naive.serve(each.ids.tolist(), -(-(each.prompt + each.output) // UNIT)))
    done = Watched(cluster(hbm_blocks=capacity))
    done.run(workload.start())
    assert [done.hits[at] for at in range(600)] == hits
    assert sum(hits) > 0


@pytest.mark.parametrize(("hbm", "dram"), [(100, 100), (60, 300)])
def test_two_tiers_have_nearly_the_hits_of_one_of_their_sum(hbm, dram):
    workload = generate(
        "documents", rate=1e-3, requests=400, seed=5, output=1, sigma=0.0, shared=20 * UNIT, shared_count=12, prompt=40
    )
    two, one = Watched(cluster(hbm_blocks=hbm, dram_blocks=dram)), Watched(cluster(hbm_blocks=hbm + dram))
    alone = Watched(cluster(hbm_blocks=hbm))
    for each in (two, one, alone):
        each.run(workload.start())
    # Blocks that are brought back are in both tiers for a moment, so a little more is evicted than from one tier.
    assert 0.97 * one.measures.hit_ratio <= two.measures.hit_ratio <= one.measures.hit_ratio
    assert two.measures.hbm_tokens == alone.measures.hbm_tokens
    assert two.measures.dram_tokens > 0


def test_a_recorded_hour_has_the_hits_that_its_publishers_count(traces):
    """Without a limit the Mooncake conversation trace hits exactly so many tokens, whatever the times."""
    trace = open_trace(traces / "mooncake_conversation_trace.jsonl.xz")
    one_by_one = Cluster(MODEL, trace.block_tokens, 1 << 24, routing.LeastLoad, colocated=1, batching=ONE_BY_ONE)
    done = ClusterSim(one_by_one).run(trace.start())
    assert (done.ended, done.refused) == (12_031, 0)
    assert done.prompt_tokens == 144_793_823
    assert done.hbm_tokens == 54_098_411


# ---- the fleet, where both say the same


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("by_events", [False, True])
def test_without_answers_it_agrees_with_the_fleet_of_the_routing_studies(policy, by_events):
    """Prompts one at a time and nothing to decode: the special case that `routing_fleet` is."""
    workload = generate("documents", rate=40.0, requests=300, seed=3, output=1, sigma=0.4, shared_count=30, shared=640)
    requests = [(each.time_s, each.ids) for each in workload.start()]
    blocks, balance = 300, routing.Balance(warmup_s=0)
    model = CountedInBlocks(MODEL, UNIT)
    fleet = FleetSim(
        lambda clock: routing.GlobalScheduler(
            model, clock, policy=policy(), balance=balance, ttl_s=None, learn_at="dispatch" if by_events else "response"
        ),
        3,
        model,
        blocks,
        by_events=by_events,
    )
    old = fleet.run([Session(str(at), time_s, [Turn(ids, NO_IDS)]) for at, (time_s, ids) in enumerate(requests)])
    # The new one keeps a block for the token that is generated.
    new = Watched(
        cluster(
            policy=policy,
            colocated=3,
            hbm_blocks=blocks + 1,
            balance=balance,
            ttl_s=None,
            learn="events" if by_events else "response",
        )
    )
    done = new.run(SimRequest(time_s, ids, UNIT * len(ids), 1, str(at)) for at, (time_s, ids) in enumerate(requests))
    assert done.hit_ratio == pytest.approx(old.hit_ratio, abs=0.02)
    assert done.ttft_s.mean == pytest.approx(float(old.ttft_s.mean()), rel=0.05)


# ---- prefill and decode apart


def test_kv_is_sent_to_the_decoding_instance_and_transfers_wait_for_each_other():
    link = cost.Link(1e6)
    done = Watched(cluster(colocated=0, prefill=2, decode=1, link=link, policy=routing.LeastLoad))
    measures = done.run([request(0.0, 1, 8, output=5), request(0.0, 2, 8, output=5), request(100.0, 1, 8, output=1)])
    transfer_s = 8 * UNIT * MODEL.model.kv_bytes_per_token / 1e6
    prefill_s = MODEL.exec_s(8 * UNIT)
    decode_s = DECODE.run_s(4, 1, 8 * UNIT + 1)
    assert [done.first[number] for number in (0, 1)] == pytest.approx([prefill_s] * 2)
    assert done.last[0] == pytest.approx(prefill_s + transfer_s + decode_s)
    assert done.last[1] == pytest.approx(prefill_s + 2 * transfer_s + decode_s)
    assert measures.link_waited_s == pytest.approx(transfer_s)
    assert measures.sent_tokens == 2 * 8 * UNIT  # an answer of one token needs no decoding
    assert done.last[2] == done.first[2]


def test_blocks_that_the_decoding_instance_holds_are_not_sent():
    done = Watched(cluster(colocated=0, prefill=1, decode=1))
    measures = done.run([request(0.0, 1, 8, output=5), request(100.0, 1, 12, output=5)])
    assert measures.sent_tokens == 12 * UNIT
    assert done.hits == {0: 0, 1: 8}


def test_a_request_waits_for_room_where_it_decodes():
    done = Watched(cluster(colocated=0, prefill=1, decode=1, hbm_blocks=20))
    done.run([request(0.0, 1, 8, output=100), request(0.0, 2, 8, output=100)])
    assert done.last[1] > done.last[0] + DECODE.run_s(99, 1, 8 * UNIT + 1)


def test_a_prefix_is_fetched_from_its_holder():
    fast = cost.Link(1e12)
    done = Watched(cluster(colocated=2, fetch=True, policy=routing.SessionId, link=fast))
    measures = done.run(
        [request(0.0, 1, 60, session="a"), request(1e-6, 2, 1, session="b"), request(50.0, 1, 62, session="b")]
    )
    assert measures.fetched_tokens == 60 * UNIT
    assert done.first[2] - 50.0 < MODEL.exec_s(62 * UNIT)


# ---- sessions


def test_the_next_turn_is_sent_when_the_answer_is_there():
    first, answer = request(1.0, 1, 4, output=8), np.array([5, 6], np.int32)
    first.output_ids = answer[:1]
    second = request(2.0, 1, 8)
    second.ids = np.concatenate([first.ids, answer, np.arange(90, 92, dtype=np.int32)])
    first.then = iter([second])
    done = Watched(cluster())
    done.run([first])
    assert done.hits == {0: 0, 1: 5}  # four blocks of the prompt and one of the answer
    assert done.first[1] > done.last[0] + 2.0


# ---- what must never be lost


@settings(max_examples=40)
@given(
    st.sampled_from(["poisson", "power-law", "documents", "chat", "agent"]),
    st.sampled_from(POLICIES),
    st.sampled_from(["response", "dispatch", "events"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 150]),
    st.integers(120, 400),
    st.booleans(),
    st.integers(0, 1000),
)
def test_every_request_ends_once_and_every_block_comes_back(
    name, policy, learn, apart, fetch, dram, hbm, chunked, seed
):
    roles = {"colocated": 1, "prefill": 2, "decode": 2} if apart else {"colocated": 3}
    changes = {} if name in ("poisson", "power-law") else {"shared": 320, "shared_count": 5}
    workload = generate(name, rate=30.0, requests=60, seed=seed, prompt=300, output=40, **changes)
    options = {
        "learn": learn,
        "fetch": fetch,
        "dram_blocks": dram,
        "hbm_blocks": hbm,
        "batching": Batching(512, 4, chunked),
    }
    sim = Watched(cluster(policy=policy, **roles, **options))
    sent = []

    def audited():
        for each in workload.start():
            sim.audit()
            sent.append(each)
            yield each

    measures = sim.run(audited())  # it checks at its end that blocks and requests are all there
    assert measures.ended + measures.refused == measures.arrived >= len(sent)
    assert len(sim.last) == measures.ended == measures.jct_s.count
    assert sorted(sim.first) == sorted(sim.last)
    assert all(sim.first[number] <= sim.last[number] for number in sim.last)
    again = ClusterSim(cluster(policy=policy, **roles, **options)).run(workload.start())
    assert json.dumps(again.as_json()) == json.dumps(measures.as_json())


def test_a_request_longer_than_an_instance_is_refused_and_counted():
    done = simulated([request(0.0, 1, 8, output=2 * UNIT), request(0.0, 2, 9, output=2 * UNIT)], hbm_blocks=10)
    assert (done.arrived, done.refused, done.ended) == (2, 1, 1)


def test_another_seed_gives_another_run():
    def bytes_of(seed):
        workload = generate("chat", rate=20.0, requests=80, seed=seed)
        return json.dumps(simulated(workload.start(), colocated=2).as_json())

    assert bytes_of(1) == bytes_of(1)
    assert bytes_of(1) != bytes_of(2)


def test_memory_does_not_grow_with_the_requests():
    """Nothing of a request that has ended is kept: what is kept is counted, after one thousand to four thousand.

    The cluster keeps up, so requests do not gather in its queues. The workload is drawn from a seed, so the counts are
    always the same.
    """
    sim = ClusterSim(cluster(colocated=2, hbm_blocks=2000, ttl_s=5.0))
    source = generate("poisson", rate=5.0, requests=4000, seed=1).start()
    kept = []
    for _ in range(4):
        sim.feed(next(source) for _ in range(1000))
        trees = sum(len(sim._scheduler.tree(kind)) for kind in routing.Kind)
        kept.append((len(sim._loop._heap), sim._scheduler.in_flight, trees))
    events, in_flight, trees = zip(*kept, strict=True)
    assert max(events) < 100
    assert max(in_flight) < 100
    assert max(trees[2:]) < 1.5 * max(trees[:2]), trees
    sim.finish()


@pytest.mark.parametrize(
    "call",
    [
        lambda: cluster(colocated=0),
        lambda: cluster(prefill=1),
        lambda: cluster(decode=1),
        lambda: cluster(learn="never"),
        lambda: Cluster(MODEL, 0, 10, routing.LeastLoad, colocated=1),
        lambda: ClusterSim(cluster(hbm_blocks=0)),
        lambda: ClusterSim(cluster(dram_blocks=-1)),
        lambda: Batching(-1),
        lambda: Batching(255),  # fewer tokens than requests
        lambda: Batching(1, 0),
        lambda: simulated([request(1.0, 1, 1), request(0.0, 1, 1)]),
        lambda: simulated([SimRequest(0.0, NO_IDS, 1, 1)]),
    ],
)
def test_impossible_simulations_are_refused(call):
    with pytest.raises(ArgumentError):
        call()
