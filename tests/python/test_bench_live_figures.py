"""The figures of MELL's paper from live runs: what is counted, and that what is predicted is counted the same way."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench.mell.live_figures import draw_live, of_prediction, over_seeds, traced
from bench.mell.live_model import predict
from kvpool.policy.rebalancing import SCHEDULERS, Planner

ROOM = {"blocks": 4, "block_tokens": 16, "epoch_s": 0.5}  # of an instance: 64 tokens


def arrival(name, at_s, prompt, new_tokens):
    return SimpleNamespace(name=name, at_s=at_s, prompt=tuple(range(prompt)), new_tokens=new_tokens)


def answer(at_s, prompt, times):
    return SimpleNamespace(arrival=arrival("r", at_s, prompt, len(times)), times=times)


def test_a_run_is_counted_once_an_epoch():
    """Two instances for a second, then one. 40 tokens, 48 of room, from 0; 20, 32 of room, from 0.5 to 1.2."""
    run = SimpleNamespace(
        seconds=2.0,
        in_use=[(0.0, 2), (0.9, 1)],
        answers=[answer(0.0, 40, [0.1, 0.2, 1.9]), answer(0.5, 20, [0.6, 1.2])],
    )
    seen = traced(run, 3, **ROOM)
    assert seen.over_time == [(0.0, 2), (0.5, 2), (1.0, 1), (1.5, 1)]
    assert (seen.gpus, seen.moves_s) == (1.5, 1.5)
    assert seen.utilisation == pytest.approx(100 * (48 + 80 + 80 + 48) / (64 * 6))
    assert seen.over_bound == pytest.approx(100 * (6 / (1 + 2 + 2 + 1) - 1))


def test_a_request_takes_room_for_what_it_has_put_out_until_its_end():
    times = [0.1 * number for number in range(1, 21)]
    run = SimpleNamespace(seconds=2.5, in_use=[(0.0, 1)], answers=[answer(0.0, 15, times)])
    seen = traced(run, 0, **ROOM)
    assert seen.utilisation == pytest.approx(
        100 * (16 + 32 + 32 + 32 + 0) / (64 * 5)
    )  # with the next token, 36 at most


def predicted(policy):
    requests = [arrival(f"r{number}", 0.2 * number, 20, 30 + 5 * (number % 4)) for number in range(12)]
    planner = Planner(SCHEDULERS[policy], instances_max=4)
    return predict(requests, planner, blocks=8, block_tokens=16, step_s=0.05, epoch_s=0.25, growth=16, start_s=0.5)


@pytest.mark.parametrize("policy", ["mell", "lb", "bf"])
def test_a_prediction_counts_every_epoch_of_every_instance(policy):
    found = predicted(policy)
    assert sum(count for _, count in found.over_time) * 0.25 == pytest.approx(found.instance_seconds)
    assert max(count for _, count in found.over_time) == found.instances_max
    assert 0 < found.bound_seconds <= found.instance_seconds
    seen = of_prediction(found, 128)
    assert 0 < seen.utilisation <= 100
    assert seen.gpus == pytest.approx(found.instance_seconds / found.seconds)
    assert seen.over_bound >= 0


def test_all_figures_are_drawn_with_their_spread(tmp_path):
    pytest.importorskip("matplotlib")
    runs = {policy: [of_prediction(predicted(policy), 128)] * 2 for policy in ("mell", "lb")}
    spread = over_seeds(runs["lb"])["gpus"]
    assert spread["min"] == spread["median"] == spread["max"] > 0
    assert draw_live(tmp_path, runs, runs) == ["live.png"]
    assert (tmp_path / "live.png").stat().st_size > 10_000
