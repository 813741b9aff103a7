"""The virtual clock, the workloads, and the packing of KV caches epoch by epoch."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.policy import mell
from kvpool.sim.clock import Clock
from kvpool.sim.packing import demand, replay, served
from kvpool.sim.workload import Arrival, azure, long_tailed, poisson, zipped

C = 2_000


def rng(seed=1):
    return np.random.default_rng(seed)


def made(seconds=200, rate=1.0, seed=1):
    """Epochs and sizes of a small workload."""
    generator = rng(seed)
    times = poisson(rate, seconds, generator)
    prompts, responses = (long_tailed(mean, 1.0, len(times), generator).tolist() for mean in (80, 240))
    return demand(zipped(times, prompts, responses), C, 10.0, 1.0, seconds)


def test_events_happen_in_order_and_time_stands_between_them():
    clock, seen = Clock(), []
    for name, time_s in (("c", 3.0), ("a", 1.0), ("b", 1.0)):
        clock.at(time_s, lambda name=name: seen.append((name, clock.now_s)))
    clock.at(1.0, lambda: clock.at(0.5, lambda: seen.append(("late", clock.now_s))))
    clock.run(2.0)
    assert seen == [("a", 1.0), ("b", 1.0), ("late", 1.0)]
    assert clock.now_s == 2.0
    clock.run(3.0)
    assert seen[-1] == ("c", 3.0)


def test_poisson_arrivals_and_long_tails_have_their_means():
    times = poisson(5.0, 10_000, rng())
    assert len(times) == pytest.approx(50_000, rel=0.03)
    assert np.all(np.diff(times) > 0)
    assert times[-1] < 10_000
    lengths = long_tailed(695, 1.0, 100_000, rng())
    assert lengths.mean() == pytest.approx(695, rel=0.03)
    assert np.median(lengths) < 0.65 * lengths.mean()
    assert lengths.min() >= 1


def test_a_trace_is_read(tmp_path):
    file = tmp_path / "trace.csv"
    rows = ["2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:46.4951690,374,44"]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert azure(file) == [Arrival(0.0, 374, 44), Arrival(4.5, 396, 109)]


def test_the_azure_trace_agrees_with_its_publication(traces):
    requests = azure(traces / "azure2023_conv.csv.xz")
    assert len(requests) == 19_366
    assert np.mean([request.prompt for request in requests]) == pytest.approx(1155, abs=1)


def test_a_request_keeps_its_room_until_it_ends():
    epochs, sizes, refused = demand([Arrival(0.5, 100, 25), Arrival(0.0, C, 1)], C, 10.0, 1.0, 5)
    assert refused == 1
    assert [epoch.arrivals for epoch in epochs] == [[(0, 110)], [], [], [], []]
    assert [epoch.growths for epoch in epochs] == [[], [(0, 120)], [(0, 125)], [], []]
    assert [epoch.departures for epoch in epochs] == [[], [], [], [0], []]
    assert sizes == [{0: 110}, {0: 120}, {0: 125}, {}, {}]


def test_the_same_seed_gives_the_same_outcome():
    assert made() == made()
    assert replay(made()[0], mell.Mell(C)) == replay(made()[0], mell.Mell(C))
    assert made(seed=2) != made(seed=1)


def test_mell_needs_the_fewest_gpus_and_never_less_than_the_bound():
    epochs, sizes, _ = made(seconds=400)
    bounds = [mell.lower_bound(each.values(), C) for each in sizes]
    outcomes = {
        "mell": replay(epochs, mell.Mell(C)),
        "bf": replay(epochs, mell.BestFit(C)),
        "wf": replay(epochs, mell.WorstFit(C)),
        "lb": replay(epochs, mell.LoadBalance(C)),
    }
    for outcome in outcomes.values():
        assert all(gpus >= bound for gpus, bound in zip(outcome.gpus, bounds, strict=True))
    needed = {name: sum(outcome.gpus) for name, outcome in outcomes.items()}
    assert min(needed, key=lambda name: needed[name]) == "mell"
    assert needed["mell"] < 1.1 * sum(bounds)


def test_batches_move_less_than_single_operations():
    epochs, _, _ = made(seconds=300)
    assert sum(replay(epochs, mell.Mell(C)).item_moves) < sum(replay(epochs, mell.Mell(C), one_by_one=True).item_moves)


def test_a_fixed_fleet_serves_more_requests_with_migration():
    epochs, _, _ = made(seconds=400, rate=2.0)
    with_migration, given_up = served(epochs, mell.Mell(C), 6)
    without, lost = served(epochs, mell.BestFit(C), 6)
    assert with_migration > without
    assert given_up < lost
