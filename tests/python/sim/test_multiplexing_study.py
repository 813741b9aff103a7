"""The study of MuxServe: workloads, what is measured, and small runs of its designs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import ArgumentError, OutOfMemory
from kvpool.policy import multiplexing as mux
from kvpool.sim.multiplexing_requests import Request
from kvpool.sim.multiplexing_study import (
    DESIGNS,
    GRAPHS,
    Outcome,
    Window,
    alone_s,
    machines,
    serve,
    served_models,
)
from kvpool.sim.multiplexing_workload import (
    LMSYS,
    SHAREGPT,
    Lengths,
    arrivals,
    cumulative,
    power_law,
    shifting,
)

# ---- workloads


def test_a_power_law_by_hand():
    assert power_law(3, 1.0, 6.0) == [6.0, 3.0, 2.0]
    assert power_law(2, 0.0, 5.0) == [5.0, 5.0]
    assert cumulative([6.0, 3.0, 1.0], 1 / 3) == pytest.approx(0.6)
    assert cumulative([1.0, 6.0, 3.0], 0.5) == pytest.approx(0.75)  # half way from 0.6 to 0.9
    assert cumulative([1.0, 1.0], 1.0) == 1.0


def test_popularity_is_within_four_points_of_the_papers():
    """§4.2: with alpha 0.9 and 2.1, 20 % of the models get 50 % and 90 % of the requests. Here 53.1 % and 90.2 %."""
    for alpha, part, here in ((0.9, 0.5, 0.531), (2.1, 0.9, 0.902)):
        found = cumulative(power_law(19, alpha, 20.0), 0.2)
        assert found == pytest.approx(part, abs=0.035)
        assert found == pytest.approx(here, abs=0.001)


def test_arrivals_have_their_rates_and_lengths_and_are_seeded():
    rates = {"a": 30.0, "b": 10.0, "c": 0.0}
    found = arrivals(rates, 200.0, seed=4)
    assert found == arrivals(rates, 200.0, seed=4) != arrivals(rates, 200.0, seed=5)
    assert [each.time_s for each in found] == sorted(each.time_s for each in found)
    for name, rate in rates.items():
        assert sum(each.model == name for each in found) == pytest.approx(200 * rate, rel=0.1)
    assert sum(each.prompt for each in found) / len(found) == pytest.approx(SHAREGPT.prompt, rel=0.08)
    assert sum(each.output for each in found) / len(found) == pytest.approx(SHAREGPT.output, rel=0.08)
    assert 1 <= min(each.output for each in found) <= max(each.output for each in found) <= 2048
    by_name = arrivals({"a": 30.0, "b": 30.0}, 100.0, {"a": Lengths(10, 20, 0.0), "b": Lengths(10, 20, 0.0).times(3)})
    assert {(each.model, each.prompt, each.output) for each in by_name} == {("a", 10, 20), ("b", 30, 60)}


def test_shifting_rates_keep_their_means_and_shift():
    found = shifting({"a": 40.0, "b": 5.0}, 200.0, period_s=20.0, seed=1)
    of = [each.time_s for each in found if each.model == "a"]
    assert len(of) == pytest.approx(8000, rel=0.05)
    counts = [sum(20 * at <= time < 20 * (at + 1) for time in of) for at in range(10)]
    assert max(counts) > 1.5 * min(counts)
    assert sum(each.prompt for each in found) / len(found) == pytest.approx(LMSYS.prompt, rel=0.1)


@pytest.mark.parametrize(("models", "alpha", "top"), [(0, 1.0, 1.0), (2, -0.1, 1.0), (2, 1.0, 0.0)])
def test_bad_power_laws_are_refused(models, alpha, top):
    with pytest.raises(ArgumentError):
        power_law(models, alpha, top)


# ---- what is measured

TWO = served_models(["llama-2-7b", "llama-2-13b"], [3.0, 1.0])


def ended(at, time_s, end_s, output=100):
    request = Request(TWO[at].name, time_s, 100, output)
    request.end_s = end_s
    return request


def test_throughput_is_weighted_by_rates_and_counts_what_ends_in_the_window():
    requests = [
        ended(0, 0.0, 12.0),
        ended(0, 11.0, 19.0),
        ended(0, 12.0, 20.0),
        ended(0, 1.0, 9.9),
        ended(1, 0.0, 15.0),
    ]
    outcome = Outcome(TWO, Window(20.0, 10.0), requests, [], mux.Placement((), 0.0, False))
    assert outcome.throughputs == pytest.approx({TWO[0].name: 0.2, TWO[1].name: 0.1})
    assert outcome.requests_s == pytest.approx(0.3)
    assert outcome.weighted == pytest.approx((3 * 0.2 + 1 * 0.1) / 4)


def test_a_request_is_in_time_within_the_scale_of_what_it_takes_alone():
    alone = alone_s(TWO[0], ended(0, 0.0, 0.0))
    timing = TWO[0].timing
    assert alone == pytest.approx(timing.prefill_s(1.0, 1, 100, 1) + 99 * timing.decode_s(1.0, 1, 149, 1))
    requests = [ended(0, 10.0, 10.0 + 1.9 * alone), ended(0, 10.0, 10.0 + 3.9 * alone), ended(0, 11.0, -1.0),
                ended(0, 9.0, 9.0 + 10 * alone)]  # fmt: skip
    outcome = Outcome(TWO, Window(20.0, 10.0), requests, [], mux.Placement((), 0.0, False))
    assert [outcome.attainment(scale) for scale in (1.0, 2.0, 4.0, 8.0)] == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3])
    with pytest.raises(ArgumentError, match="scale"):
        outcome.attainment(9.0)


def test_a_large_model_alone_has_the_fewest_gpus_that_hold_it():
    (large,) = served_models(["llama-65b"], [1.0])
    request = Request(large.name, 0.0, 100, 2)
    assert alone_s(large, request) == pytest.approx(
        large.timing.prefill_s(1.0, 1, 100, 2) + large.timing.decode_s(1.0, 1, 100, 2)
    )


def test_bad_studies_are_refused():
    with pytest.raises(ArgumentError, match="rates"):
        served_models(["llama-2-7b"], [1.0, 2.0])
    with pytest.raises(ArgumentError, match="warm-up"):
        Window(10.0, 10.0)
    placement = mux.place(TWO, machines(1, 2))
    other = [mux.ServedModel(each.name, 1.0, 10, 10, 1, 1, mux.FittedTiming({}, {})) for each in TWO]
    with pytest.raises(ArgumentError, match="JobTimes"):
        serve(placement, other, [], machines(1, 2), mux.ADBS())


# ---- designs


def test_designs_serve_everything_at_a_low_rate():
    gpus = machines(1, 4)
    models = served_models(["llama-2-7b", "llama-2-7b", "llama-2-13b"], [1.0, 0.5, 0.2], launches=GRAPHS)
    comes = arrivals({model.name: model.rate for model in models}, 12.0, seed=1)
    for design in DESIGNS:
        placement = design.place(models, gpus)
        outcome = serve(placement, models, comes, gpus, design.scheduler, design.sharing, Window(12.0, 0.0), check=True)
        assert outcome.total("ended") == len(comes) == len(outcome.requests)
        assert outcome.total("tokens") == sum(each.output for each in comes)
        assert outcome.attainment(8.0) == 1.0


def test_all_models_together_have_one_mesh_and_its_compute():
    models = served_models(["llama-2-7b", "llama-2-13b"], [5.0, 1.0])
    (unit,) = mux.together(models, machines(1, 4)).units
    assert unit.gpus == 4
    assert [placed.model for placed in unit.models] == [model.name for model in models]
    assert sum(placed.share for placed in unit.models) == pytest.approx(1.0)
    with pytest.raises(OutOfMemory):
        mux.together(served_models(["llama-65b", "llama-65b"], [1.0, 1.0]), machines(1, 2))


def test_spatial_partitioning_gives_each_model_gpus_of_its_own_and_the_busiest_more():
    models = served_models(["llama-2-7b", "llama-2-7b", "llama-2-13b"], [40.0, 0.5, 0.2])
    found = mux.spatial(models, machines(1, 4))
    assert all(len(unit.models) == 1 for unit in found.units)
    sizes = {unit.models[0].model: unit.gpus for unit in found.units}
    assert sizes == {models[0].name: 2, models[1].name: 1, models[2].name: 1}
    assert all(placed.share == pytest.approx(1.0) for unit in found.units for placed in unit.models)
    assert sum(unit.gpus for unit in mux.spatial(models, machines(1, 6)).units) == 4  # cut as a node of four
    with pytest.raises(OutOfMemory):
        mux.spatial(models, machines(1, 2))


@given(st.lists(st.sampled_from([0.1, 1.0, 5.0, 20.0]), min_size=2, max_size=4))
def test_spatial_partitioning_is_the_best_of_its_kind(rates):
    """Against all divisions of four GPUs, by the same estimator."""
    models = served_models(["llama-2-7b", "llama-2-13b", "llama-2-7b", "llama-2-7b"][: len(rates)], rates)
    gpus = machines(1, 4)

    def best(left, rest):
        if not rest:
            return 0.0
        options = [
            mux.estimate_unit(rest[:1], size, [1.0], gpus).throughputs[0] + best(left - size, rest[1:])
            for size in (1, 2, 4)
            if size <= left - len(rest) + 1
        ]
        return max(options)

    assert mux.spatial(models, gpus).throughput == pytest.approx(best(4, models))


def test_the_greedy_placement_takes_empty_meshes_first_and_then_free_memory():
    models = served_models(["llama-2-7b", "llama-2-13b", "llama-2-7b", "llama-2-7b"], [8.0, 4.0, 2.0, 1.0])
    found = mux.by_rate(models, machines(1, 2))
    of = {placed.model: at for at, unit in enumerate(found.units) for placed in unit.models}
    assert [unit.gpus for unit in found.units] == [1, 1]
    assert of[models[0].name] != of[models[1].name]  # each takes a GPU, as long as one is empty
    assert of[models[2].name] == of[models[0].name]  # beside 7B there is more free memory than beside 13B
    assert of[models[3].name] == of[models[1].name]  # and now it is the other way round
    whole = mux.by_rate(served_models(["llama-65b", "llama-2-7b"], [0.5, 0.1]), machines(1, 4))
    assert [len(unit.models) for unit in whole.units] == [1, 1]
