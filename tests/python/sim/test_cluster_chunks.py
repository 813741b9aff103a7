"""Prompts that a simulated engine computes in chunks, by hand and beside a naive model."""

from __future__ import annotations

import numpy as np
import pytest
from sim.cluster_kit import DECODE, MODEL, UNIT, Watched, cluster, request
from sim.naive import naive_chunked_engine

from kvpool.sim.instance import Batching
from kvpool.sim.requests import SimRequest

# ---- prompts in chunks, by hand


def context_s(tokens):
    """What tokens before it add to a step of decoding."""
    return DECODE.run_s(1, 1, tokens) - DECODE.run_s(1, 1, 0)


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    """128 tokens in steps of 50, 50 and 28; then 32 more, of which 128 are cached."""
    done = Watched(cluster(batching=Batching(50, 50)))
    done.run([request(0.0, 1, 8), request(100.0, 1, 10)])
    steps = [MODEL.batch_s([each]) for each in ((50, 0), (100, 50), (128, 100))]
    assert done.first[0] == pytest.approx(sum(steps), rel=1e-12)
    assert done.first[1] - 100.0 == pytest.approx(MODEL.batch_s([(160, 128)]), rel=1e-12)
    assert done.hits == {0: 0, 1: 8}


def test_what_decodes_takes_its_token_of_each_step_and_waits_for_the_chunks():
    """A answers with six tokens. B comes during its first step of decoding: 80 tokens, in chunks of 31, 31 and 18."""
    done = Watched(cluster(batching=Batching(32, 32)))
    a = MODEL.batch_s([(32, 0)])
    measures = done.run([request(0.0, 1, 2, output=6), request(a + 1e-9, 2, 5, output=1)])
    step = DECODE.run_s(1, 1, 33)
    mixed = [
        MODEL.batch_s([chunk, (1, 0)]) + context_s(tokens)
        for chunk, tokens in (((31, 0), 34), ((62, 31), 35), ((80, 62), 36))
    ]
    assert done.first == {0: pytest.approx(a, rel=1e-12), 1: pytest.approx(a + step + sum(mixed), rel=1e-12)}
    end = a + step + sum(mixed) + DECODE.run_s(1, 1, 37)
    assert done.last == {0: pytest.approx(end, rel=1e-12), 1: done.first[1]}
    assert measures.tpot_s.mean == pytest.approx((end - a) / 5, rel=1e-9)  # the other one has no time between tokens
    [instance] = measures.instances
    assert instance["prefill_busy"] * end == pytest.approx(a + sum(mixed), rel=1e-9)
    assert instance["decode_busy"] * end == pytest.approx(step + DECODE.run_s(1, 1, 37), rel=1e-9)


def test_what_a_prompt_leaves_of_a_step_goes_to_the_next_one():
    """Two prompts of 48 and 64 tokens in steps of 80: 48 and 32 of them, then the rest."""
    done = Watched(cluster(batching=Batching(80, 80)))
    done.run([request(0.0, 1, 3), request(0.0, 2, 4)])
    alone = MODEL.batch_s([(48, 0)])  # it comes first: the other one is not there yet
    assert done.first[0] == pytest.approx(alone, rel=1e-12)
    done = Watched(cluster(batching=Batching(80, 80)))
    done.run([request(0.0, 9, 1), request(1e-9, 1, 3), request(1e-9, 2, 4)])
    alone = MODEL.batch_s([(16, 0)])
    both = MODEL.batch_s([(48, 0), (32, 0)])
    assert done.first[1] == pytest.approx(alone + both, rel=1e-12)
    assert done.first[2] == pytest.approx(alone + both + MODEL.batch_s([(64, 32)]), rel=1e-12)


def test_a_prompt_in_chunks_is_computed_once_for_all_that_come_meanwhile():
    """Four of 8,000 tokens in steps of 2,048: the last one has a token of each but the first."""
    done = Watched(cluster(batching=Batching(2048, 256)))
    measures = done.run([request(at * 1e-6, 1, 500) for at in range(4)])
    assert done.hits == {0: 0, 1: 500, 2: 500, 3: 500}
    assert (measures.hbm_tokens, measures.prompt_tokens) == (24_000, 32_000)
    steps = [(2048, 0), (4096, 2048), (6144, 4096)]
    end = sum(MODEL.batch_s([step]) for step in steps) + MODEL.batch_s([(8000, 6144), *[(8000, 7999)] * 3])
    assert list(done.first.values()) == pytest.approx([end] * 4, rel=1e-12)


def test_what_begins_beside_a_chunk_matches_as_much_as_that_computes():
    """The longer prompt leaves no step room for more until its last one; another forks at its 40th block."""
    done = Watched(cluster(batching=Batching(320, 256)))
    ids = request(0.0, 1, 50).ids.copy()
    ids[40:] += 500
    fork = SimRequest(1e-6, ids, 50 * UNIT, 1)
    done.run([request(0.0, 1, 50), fork, request(1e-6, 2, 1)])
    assert done.hits == {0: 0, 1: 40, 2: 0}


def test_a_prompt_in_chunks_is_one_of_the_requests_that_run():
    """One at a time: the second begins when the first has its last token."""
    done = Watched(cluster(batching=Batching(32, 1)))
    done.run([request(0.0, 1, 4, output=3), request(0.0, 2, 1)])
    assert done.first[1] == pytest.approx(done.last[0] + MODEL.batch_s([(16, 0)]), rel=1e-12)


def test_chunks_wait_for_what_is_swapped_in():
    """A prompt of 8 blocks of which HBM has room for few comes back from DRAM, and is decoded beside."""
    done = Watched(cluster(hbm_blocks=12, dram_blocks=50, batching=Batching(64, 64)))
    done.run([request(0.0, 1, 8), request(50.0, 2, 8), request(100.0, 1, 9)])
    assert done.hits[2] == 8
    assert done.measures.dram_tokens > 0
    in_dram = done.measures.dram_tokens
    expected = MODEL.batch_s([(9 * UNIT, 8 * UNIT)]) + MODEL.swap_in_s(in_dram)
    assert done.first[2] - 100.0 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("batch_tokens", "batch_requests"), [(40, 3), (100, 16), (2048, 256)])
def test_chunks_agree_with_a_simulation_step_by_step(batch_tokens, batch_requests):
    random = np.random.default_rng(8)
    times = np.cumsum(random.exponential(0.03, 60)).tolist()
    shapes = [(int(p), int(o)) for p, o in zip(random.integers(1, 600, 60), random.integers(1, 80, 60), strict=True)]
    rows = [(time_s, *shape) for time_s, shape in zip(times, shapes, strict=True)]

    def step_s(chunks, batch, context):
        return MODEL.batch_s([*chunks, *[(1, 0)] * batch]) + context_s(context)

    first, last = naive_chunked_engine(rows, step_s, batch_tokens, batch_requests)
    requests = [
        SimRequest(time_s, np.arange(1000 * at, 1000 * at - (-prompt // UNIT), dtype=np.int32), prompt, output)
        for at, (time_s, prompt, output) in enumerate(rows)
    ]
    done = Watched(cluster(batching=Batching(batch_tokens, batch_requests)))
    done.run(requests)
    assert [done.first[at] for at in range(60)] == pytest.approx([first[at] for at in range(60)], rel=1e-9)
    assert [done.last[at] for at in range(60)] == pytest.approx([last[at] for at in range(60)], rel=1e-9)
