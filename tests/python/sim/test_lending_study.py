"""kvpool.sim: the workloads and designs of Infinite-LLM's study."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.errors import ArgumentError
from kvpool.sim.hardware import MODELS
from kvpool.sim.lending_study import DESIGNS, LENGTHS, LONG_PARTS, SETTINGS, fleet, machines, requests


def contexts(arrivals):
    return np.array([arrival.prompt + arrival.response for arrival in arrivals])


def test_the_table_has_eighteen_workloads():
    assert sorted(number for setting in SETTINGS for number in setting.datasets) == list(range(1, 19))
    assert LONG_PARTS == (0.01, 0.1, 0.3)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("part", LONG_PARTS)
def test_a_workload_has_its_ranges_and_its_share_of_long_requests(part, lengths):
    setting = SETTINGS[3]
    arrivals = requests(setting, part, seed=4, lengths=lengths)
    tokens = contexts(arrivals)
    assert (tokens > setting.normal).sum() == pytest.approx(1000 * part, abs=1)
    assert tokens.min() >= 2
    assert tokens.max() <= setting.long
    assert all(1 <= arrival.response <= 1024 and arrival.prompt >= 1 for arrival in arrivals)
    assert arrivals == requests(setting, part, seed=4, lengths=lengths)
    assert arrivals != requests(setting, part, seed=5, lengths=lengths)
    assert all(arrival.time_s == 0 for arrival in arrivals)


def test_arrivals_have_their_rate():
    times = [arrival.time_s for arrival in requests(SETTINGS[0], 0.01, rate=4.0)]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(250, rel=0.15)
    with pytest.raises(ArgumentError, match="share"):
        requests(SETTINGS[0], 1.5)


def test_all_designs_have_the_same_gpus():
    setting = SETTINGS[3]
    engines = {design: machines(setting, design) for design in DESIGNS}
    assert {design: each.engines for design, each in engines.items()} == {
        "lending": 4,
        "independent": 4,
        "migrating": 4,
        "one": 1,
        "pipeline": 1,
    }
    assert engines["one"].blocks == engines["pipeline"].blocks > 4 * engines["lending"].blocks
    assert engines["pipeline"].times.stages == 4
    # A token costs as many bytes everywhere; eight GPUs read it four times as fast as two.
    assert engines["one"].times.kv_bytes == MODELS["llama-2-13b"].kv_bytes_per_token
    assert 4 * engines["one"].times.read_s == pytest.approx(engines["lending"].times.read_s)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.name)
def test_lending_serves_the_long_requests_that_engines_alone_refuse(setting):
    lending, alone = (fleet(setting, design).context_max for design in ("lending", "independent"))
    assert lending > 1.8 * alone
    assert alone < setting.long
    assert fleet(setting, "one").context_max >= lending


def test_a_small_workload_is_served_by_all_designs():
    arrivals = requests(SETTINGS[0], 0.05, count=40, seed=1)
    outcomes = {design: fleet(SETTINGS[0], design, chunk_tokens=0).run(arrivals) for design in DESIGNS}
    assert {design: len(each.done) for design, each in outcomes.items() if not each.refused} == {
        "lending": 40,
        "one": 40,
        "pipeline": 40,
    }
    assert len(outcomes["independent"].done) == len(outcomes["migrating"].done) < 40
