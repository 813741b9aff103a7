"""kvpool.sim: what a step takes whose attention is computed by others too, by hand."""

from __future__ import annotations

import pytest
from sim.lending_kit import FAST, MODEL, times

from kvpool.errors import ArgumentError
from kvpool.policy import cost
from kvpool.sim.lending_times import Load, Part, Remote, StepTimes, Work, layer_s, queue_s


def test_a_layer_lasts_as_long_as_its_slowest_part():
    assert layer_s(10.0, []) == 10.0
    assert layer_s(10.0, [Remote(1.0, 2.0, 6.0)]) == 10.0
    assert layer_s(10.0, [Remote(1.0, 2.0, 8.0)]) == 11.0
    assert layer_s(10.0, [Remote(1.0, 2.0, 8.0), Remote(5.0, 2.0, 9.0)]) == 16.0


def test_a_call_waits_for_the_kernel_under_way_and_for_the_calls_of_others():
    assert queue_s([]) == 0.0
    assert queue_s([], kernel_s=4.0) == 2.0
    assert queue_s([Load(3.0, 0.25)]) == pytest.approx(0.375 / 0.75)
    assert queue_s([Load(3.0, 0.25), Load(2.0, 0.25)], kernel_s=4.0) == pytest.approx(2.0 + (0.375 + 0.25) / 0.5)
    assert queue_s([Load(3.0, 2.0)]) == pytest.approx(3.0 / 0.05)  # more than there is time: long, not for ever


def test_a_step_by_hand():
    each = times()
    assert each.linear_s(1, 0) == pytest.approx(1.25)
    assert each.linear_s(3, 0) == pytest.approx(1.75)
    assert each.linear_s(0, 8) == pytest.approx(1.25)  # one prompt: logits of one token
    work = Work(2, local=Part(2, 10), remote={2: Part(1, 20)})
    assert each.step_s(work) == pytest.approx(1.5 + 2 * 10)
    remote = Remote(0.5, each.round_trip_s(1, FAST), each.part_s(work.remote[2]))
    assert remote.round_trip_s == pytest.approx(2.0)
    assert each.step_s(work, [remote]) == pytest.approx(1.5 + 2 * 22.5)
    assert each.part_s(Part(4, 10, pairs=40.0)) == pytest.approx(10 + 2 * 40)


def test_queries_and_answers_count_by_their_bytes():
    slow = cost.Link(1.0)
    wide, answer = 2 * 2 * 4, 2 * (2 + 2) * 4  # float32: the query; output, maximum and sum of each head
    assert times().round_trip_s(3, slow) == pytest.approx(3 * (wide + answer))


def test_a_pipeline_waits_for_its_stages_or_for_its_longest_sequence():
    pipeline = StepTimes(MODEL, 2, cost.Link(1e12, latency_s=0.5))
    # Two batches of one sequence: each stage takes both in turn, (2 * 1.25 + 2 * 20) / 2 s.
    even = Work(2, local=Part(2, 20), longest=10)
    assert pipeline.step_s(even) == pytest.approx(21.25 + 2 * 0.5)
    # One of them has all the tokens: its batch goes through both stages.
    odd = Work(2, local=Part(2, 20), longest=19)
    assert pipeline.step_s(odd) == pytest.approx(1.25 + 2 * 19 + 2 * 0.5)
    # A single sequence leaves a stage idle at a time.
    assert pipeline.step_s(Work(1, local=Part(1, 20), longest=20)) == pytest.approx(1.25 + 40 + 2 * 0.5)


def test_a_pipeline_has_a_link_and_others_have_none():
    for stages, hop in ((0, None), (2, None), (1, FAST)):
        with pytest.raises(ArgumentError, match="stages"):
            StepTimes(MODEL, stages, hop)
