"""Times of jobs with shares of the compute, alone and beside each other, by hand and by the cost model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.multiplexing import CostTiming
from kvpool.sim.hardware import GPUS, MODELS, roofline
from kvpool.sim.multiplexing_study import EAGER, HARDWARE, TABLE_1, served_models
from kvpool.sim.multiplexing_times import JobTimes, Launches, Parts, Ring, alone_s, slowdown

GPU = GPUS[HARDWARE]
SEVEN = JobTimes(roofline(MODELS["llama-2-7b"], GPU))


def test_a_step_alone_by_hand():
    parts = Parts(compute_s=0.010, memory_s=0.008, calls_s=0.001, launches_s=0.0)
    assert alone_s(parts, 1.0) == pytest.approx(0.019)
    assert alone_s(parts, 0.5) == pytest.approx(0.020 + 0.008 + 0.001)
    assert alone_s(parts, 0.4) == pytest.approx(0.025 + 0.008 + 0.001)  # 0.4 of the units read as fast as all
    assert alone_s(parts, 0.2) == pytest.approx(0.050 + 0.016 + 0.001)
    assert alone_s(parts._replace(launches_s=0.03), 1.0) == 0.03
    assert alone_s(parts._replace(launches_s=0.03), 0.5) == 0.03  # launches hide it
    assert alone_s(parts, 1.0, slower=2.0) == pytest.approx(0.027)


def test_decode_hardly_slows_down_until_the_bandwidth_is_short_and_prefill_does():
    """Fig 3."""
    for batch in (1, 16):
        decode = [SEVEN.decode_s(share, batch, 128, 1) for share in (0.2, 0.4, 1.0)]
        assert decode[1] < 1.35 * decode[2]
        assert decode[0] > 1.6 * decode[1]
        prefill = [SEVEN.prefill_s(share, batch, 128, 1) for share in (0.4, 1.0)]
        assert prefill[0] > 1.5 * prefill[1]


def test_jobs_alone_take_what_the_policys_estimate_says():
    timing = CostTiming(roofline(MODELS["llama-2-7b"], GPU))
    for tokens in (1, 128, 1000):
        assert SEVEN.prefill_s(1.0, 1, tokens, 1) == pytest.approx(timing.prefill_s(1.0, 1, tokens, 1))
        for share, waves in ((1.0, 0.001), (0.5, 0.12)):  # whole waves on 54 of 108 units
            assert SEVEN.decode_s(share, 1, tokens, 1) == pytest.approx(timing.decode_s(share, 1, tokens, 1), rel=waves)
        assert SEVEN.decode_reads_s(1, tokens, 1) == pytest.approx(timing.decode_reads_s(1, tokens, 1), rel=1e-6)


def test_a_batch_shares_one_call_of_attention():
    """The cost model counts one for each request, which is 33 ms of a step of 256."""
    calls = [SEVEN.decode_parts(batch, 0, 1).calls_s for batch in (1, 256)]
    assert calls[0] == pytest.approx(calls[1])
    assert 0 < calls[0] < 2e-3
    assert SEVEN.prefill_parts([100, 100], 1).calls_s == pytest.approx(SEVEN.prefill_parts([200], 1).calls_s)


def test_parts_grow_with_batch_context_and_prompts():
    one, many = SEVEN.decode_parts(4, 1000, 1), SEVEN.decode_parts(4, 9000, 1)
    kv_s = 8000 * MODELS["llama-2-7b"].kv_bytes_per_token / (0.8 * GPU.bytes_per_s)
    assert many.memory_s - one.memory_s == pytest.approx(kv_s, rel=0.02)
    assert SEVEN.decode_parts(64, 1000, 1).compute_s > 2 * one.compute_s
    long, short = SEVEN.prefill_parts([512], 1), SEVEN.prefill_parts([256, 256], 1)
    assert long.compute_s > short.compute_s  # attention grows with the square
    eager = JobTimes(SEVEN.model, launches=Launches(2e-3, 1e-3))
    assert eager.decode_parts(1, 1, 1).launches_s == pytest.approx(0.032)
    assert eager.prefill_parts([1], 1).launches_s == pytest.approx(0.064)


def test_an_all_reduce_costs_its_call_and_the_steps_of_its_ring():
    ring = Ring(240e9, 7e-6, 1.5e-6)
    assert ring.link(1) is None
    for tp in (2, 8):
        assert ring.link(tp).all_reduce_s(0, tp) == pytest.approx(7e-6 + 2 * (tp - 1) * 1.5e-6)
    linked = JobTimes(SEVEN.model, ring)
    more = linked.decode_parts(1, 1, 2).calls_s - SEVEN.decode_parts(1, 1, 2).calls_s
    assert more == pytest.approx(2 * 32 * 10e-6, rel=0.05)


def test_the_study_takes_about_what_the_published_profile_shows():
    """Milliseconds of a decode step with 128 tokens a request, A100, from the repository of MuxServe's authors."""
    times = {model.name.split("/")[0]: model.timing for model in served_models(TABLE_1, [1.0] * 19)}
    assert all(each.launches == EAGER for each in times.values())
    measured = [
        ("llama-2-7b", 1, 1.0, 1, 11.5), ("llama-2-7b", 1, 1.0, 128, 24.2), ("llama-2-7b", 1, 1.0, 256, 40.4),
        ("llama-2-7b", 1, 0.4, 128, 40.9), ("llama-2-7b", 4, 1.0, 32, 13.1), ("llama-2-13b", 1, 1.0, 32, 24.1),
        ("llama-2-13b", 2, 0.5, 128, 36.0), ("llama-30b", 4, 1.0, 32, 23.8), ("llama-65b", 8, 0.4, 8, 31.6),
    ]  # fmt: skip
    for name, tp, share, batch, decode_ms in measured:
        assert 1e3 * times[name].decode_s(share, batch, 128, tp) == pytest.approx(decode_ms, rel=0.2)
    assert 1e3 * times["llama-2-13b"].prefill_s(0.5, 8, 512, 1) == pytest.approx(883.6, rel=0.35)


# ---- beside each other


def test_reads_of_two_jobs_share_one_bandwidth_by_hand():
    """Two jobs that read for all of their time: each takes twice as long. A third that computes is not slowed down."""
    reads = Parts(0.0, 0.010, 0.0, 0.0)
    assert slowdown([(reads, 0.5)]) == 1.0
    assert slowdown([(reads, 0.5), (reads, 0.5)]) == pytest.approx(2.0, rel=1e-4)
    computes = Parts(0.010, 0.0, 0.0, 0.0)
    assert slowdown([(reads, 0.5), (computes, 0.5)]) == 1.0
    half = Parts(0.005, 0.010, 0.0, 0.0)  # at a share of 0.5 it reads for half of its time
    assert slowdown([(half, 0.5), (half, 0.5)]) == 1.0
    slower = slowdown([(half, 0.5), (reads, 0.5)])  # 10 / (10 + 10 f) + 1 / f = 1: f^2 - f - 1 = 0
    assert slower == pytest.approx((1 + 5**0.5) / 2, rel=1e-4)
    launched = Parts(0.0, 0.010, 0.0, 0.020)  # its reads fit into the time of its launches, twice
    assert slowdown([(launched, 0.5), (launched, 0.5)]) == 1.0


@given(
    st.lists(
        st.tuples(st.floats(0, 0.05), st.floats(0, 0.05), st.floats(1e-4, 0.01), st.floats(0, 0.05), st.floats(0.1, 1)),
        min_size=1,
        max_size=5,
    )
)
def test_no_more_is_read_than_the_memory_gives(jobs):
    running = [(Parts(*each[:4]), each[4] / len(jobs)) for each in jobs]
    factor = slowdown(running)
    used = sum(parts.memory_s / alone_s(parts, share, slower=factor) for parts, share in running)
    assert used <= 1 + 1e-6
    assert factor >= 1
    if factor > 1.001:
        assert used == pytest.approx(1, abs=1e-3)  # and no less, where jobs wait for it
