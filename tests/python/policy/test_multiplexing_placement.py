"""Placement: the two algorithms against exhaustive search, the estimator by hand, and times that shares stretch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.kit import made_model

from kvpool import ArgumentError, ArgumentTypeError, OutOfMemory
from kvpool.policy import cost
from kvpool.policy import multiplexing as mux
from kvpool.policy.multiplexing import Machines, ServedModel
from kvpool.policy.multiplexing.search import levelled
from kvpool.sim.hardware import GPUS, MODELS, roofline

GIB = 1 << 30
FOUR = Machines(1, 4, 80 * GIB)


@dataclass(frozen=True)
class Affine:
    """Times that are affine in the batch: decode reads weights at the bandwidth of its share, prefill computes."""

    size: float = 1.0

    def prefill_s(self, share, batch, tokens, tp):
        return 0.005 + self.size * 1e-4 * batch * tokens / (share * tp)

    def decode_s(self, share, batch, tokens, tp):
        return 0.002 + self.decode_reads_s(batch, tokens, tp) / min(1.0, share / 0.4)

    def decode_reads_s(self, batch, tokens, tp):
        return self.size * (0.012 + 2e-5 * batch) / tp


class NoReads(Affine):
    """Likewise, of a memory that is never short of bandwidth."""

    def decode_reads_s(self, batch, tokens, tp):
        return 0.0

    def decode_s(self, share, batch, tokens, tp):
        return 0.002 + Affine.decode_reads_s(self, batch, tokens, tp) / share


def served(name, rate, size=1.0, **more):
    more = {"prompt_tokens": 161, "output_tokens": 338, "kv_bytes_per_token": int(size * (1 << 19))} | more
    return ServedModel(name, rate, weight_bytes=int(13 * GIB * size), timing=Affine(size), **more)


@st.composite
def workloads(draw):
    many = draw(st.integers(2, 5))
    sizes = st.sampled_from([0.5, 1.0, 2.0, 5.0])
    rates = st.sampled_from([0.1, 0.5, 2.0, 6.0, 15.0, 40.0])
    return [served(f"m{at}", draw(rates), draw(sizes)) for at in range(many)]


def searched(models, machines):
    """`place` as with many models, however few there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpool.policy.multiplexing.placement._FEW", 0)
        return mux.place(models, machines)


def test_models_that_fit_only_by_best_fit_are_placed():
    rates = [4.0, 4.0, 0.1, 10.0, 4.0, 0.1]
    needs = [58, 38, 20, 14, 8, 22]  # GiB: only 58 + 22 and 38 + 20 + 14 + 8 fit into 80 each
    models = [served(f"m{at}", rate, tp_degrees=(1,), kv_bytes_per_token=1 << 10) for at, rate in enumerate(rates)]
    models = [
        replace(model, weight_bytes=need * GIB - model.request_bytes) for model, need in zip(models, needs, strict=True)
    ]
    for place in (searched, mux.place):
        check(place(models, Machines(1, 2, 80 * GIB)), models, Machines(1, 2, 80 * GIB))


def test_few_assignments_are_all_tried():
    models = [served(f"m{at}", rate, size) for at, (rate, size) in enumerate([(40.0, 2.0), (15.0, 0.5), (6.0, 1.0)])]
    assert mux.place(models, FOUR) == mux.exhaustive(models, FOUR)


@settings(max_examples=15, deadline=None)
@given(workloads())
def test_placement_serves_nearly_what_the_best_of_all_placements_does(models):
    try:
        best = mux.exhaustive(models, FOUR)
    except OutOfMemory:
        with pytest.raises(OutOfMemory):
            searched(models, FOUR)
        return
    found = searched(models, FOUR)
    assert found.throughput >= 0.95 * best.throughput
    assert found.throughput <= best.throughput * (1 + 1e-9)
    check(found, models, FOUR)
    check(best, models, FOUR)


def check(placement, models, machines):
    """Every model is in one unit, all GPUs are there, and everything fits."""
    by_name = {model.name: model for model in models}
    placed = [each for unit in placement.units for each in unit.models]
    assert sorted(each.model for each in placed) == sorted(by_name)
    assert sum(unit.gpus for unit in placement.units) <= machines.nodes * machines.gpus
    assert placement.throughput == pytest.approx(sum(each.throughput for each in placed))
    assert placement.unmet == any(each.unmet for each in placed)
    for unit in placement.units:
        assert unit.gpus <= machines.gpus
        held = sum(by_name[each.model].weight_bytes + each.batch * by_name[each.model].request_bytes
                   for each in unit.models)  # fmt: skip
        assert held <= machines.mesh_bytes(unit.gpus)
    for each in placed:
        assert each.throughput <= by_name[each.model].rate
        assert each.unmet == (each.throughput < by_name[each.model].rate * (1 - 1e-6))


@settings(max_examples=15)
@given(workloads())
def test_placement_serves_no_less_than_models_by_themselves(models):
    """Found by a simulation: of 19 models on 32 GPUs it served less than spatial partitioning, by its own estimate."""
    try:
        apart = mux.spatial(models, FOUR)
    except OutOfMemory:
        return
    assert searched(models, FOUR).throughput >= apart.throughput * (1 - 1e-9)


def test_a_popular_model_shares_with_an_unpopular_one_rather_than_with_a_popular_one():
    rates = {"hot": 20.0, "warm": 18.0, "cold": 0.1, "icy": 0.1}
    models = [served(name, rate, tp_degrees=(1,)) for name, rate in rates.items()]
    for place in (searched, mux.place):
        found = place(models, Machines(1, 2, 80 * GIB))
        assert len(found.units) == 2
        assert not any({"hot", "warm"} <= {each.model for each in unit.models} for unit in found.units)


def test_equally_good_meshes_are_loaded_equally():
    found = searched([served(name, 0.5, tp_degrees=(1,)) for name in "abcd"], Machines(1, 2, 80 * GIB))
    assert not found.unmet
    assert [len(unit.models) for unit in found.units] == [2, 2]


def test_a_rate_that_nothing_meets_is_marked_and_the_best_is_taken():
    (unit,) = mux.place([served("a", 1e6)], FOUR).units
    (only,) = unit.models
    assert unit.gpus == 4
    assert only.unmet
    alone = mux.candidates(served("a", 1e6), FOUR)
    assert [each.unmet for each in alone] == [True] * 3
    assert only.throughput >= max(each.throughput for each in alone)


def test_an_unmet_rate_takes_no_share_that_serves_hardly_more():
    """Decode that mostly reads serves nearly as much with 0.4 of the compute: with all of it, it would block others."""
    model = served("a", 1e6, tp_degrees=(1,))
    (found,) = mux.candidates(model, FOUR)
    most = max(mux.candidates(model, FOUR, [share])[0].throughput for share in mux.SHARES)
    assert found.unmet
    assert found.share < 1
    assert found.throughput >= 0.95 * most
    below = mux.candidates(model, FOUR, [share for share in mux.SHARES if share < found.share])[0]
    assert below.throughput < 0.95 * most


def test_shares_of_a_unit_fill_the_mesh_and_no_more():
    assert levelled([0.4, 0.2, 0.1]) == pytest.approx([0.4, 0.3, 0.3])
    assert levelled([0.1]) == pytest.approx([1.0])
    assert levelled([0.9, 0.05]) == pytest.approx([0.9, 0.1])
    assert levelled([0.8, 0.7, 0.1]) == pytest.approx([0.45, 0.45, 0.1])
    assert levelled([1.0]) == pytest.approx([1.0])
    models = [served(name, rate, tp_degrees=(1,)) for name, rate in {"a": 6.0, "b": 0.1}.items()]
    (unit,) = mux.place(models, Machines(1, 1, 80 * GIB)).units
    assert [each.share for each in unit.models] == pytest.approx([0.5, 0.5])


@given(st.lists(st.integers(1, 10), min_size=1, max_size=9))
def test_levelled_shares_never_exceed_the_mesh(tenths):
    shares = [each / 10 for each in tenths]
    found = levelled(shares)
    assert sum(found) == pytest.approx(1)
    assert sum(found) <= 1 + 1e-9
    assert all(share > 0 for share in found)
    if sum(shares) <= 1:
        assert all(after >= before for before, after in zip(shares, found, strict=True))


def test_reads_of_all_models_share_one_bandwidth():
    """Two models that each read for nearly all of the time: together on a GPU each decodes at half the rate."""
    first, second = (served(name, 1e9, prompt_tokens=1) for name in "ab")
    bytes_ = 2 * (first.weight_bytes + first.request_bytes)
    (alone, *_) = mux.estimate_unit([first], 1, [0.4], Machines(1, 1, bytes_)).throughputs
    both = mux.estimate_unit([first, second], 1, [0.4, 0.4], Machines(1, 1, bytes_))
    reads = 2 * first.timing.decode_reads_s(1, 1, 1) / first.timing.decode_s(0.4, 1, 1, 1)
    assert reads == pytest.approx(1.7, abs=0.05)
    assert both.batches == (1, 1)
    assert both.throughputs[0] == pytest.approx(1 / (2 * 0.0052 + reads * 338 * 0.01402), rel=0.01)
    assert both.throughputs[0] < 0.6 * alone
    idle = replace(second, rate=0.01)
    pair = mux.estimate_unit([replace(first, rate=0.2), idle], 1, [0.4, 0.4], Machines(1, 1, 80 * GIB))
    assert pair.throughputs == (0.2, 0.01)
    assert pair.batches == (1, 1)  # one that decodes now and then does not slow the other down


def test_candidates_have_the_smallest_share_that_meets_the_rate():
    model = served("a", 5.0)
    found = mux.candidates(model, FOUR)
    assert [each.tp for each in found] == [1, 2, 4]
    for each in found:
        assert not each.unmet
        assert each.throughput == 5.0
        smaller = [share for share in mux.SHARES if share < each.share]
        if smaller:
            assert mux.candidates(replace(model, tp_degrees=(each.tp,)), FOUR, smaller)[0].unmet
    large = mux.candidates(served("b", 1.0, 8.0), FOUR)  # 104 GiB: not on one GPU
    assert [each.tp for each in large] == [2, 4]
    assert [each.tp for each in mux.candidates(served("c", 1.0), Machines(9, 2, 80 * GIB))] == [1, 2]


def test_the_batch_is_the_smallest_that_serves_the_rate():
    model = served("a", 5.0)
    (unit,) = [mux.estimate_unit([model], 1, [0.4], FOUR)]
    (batch,) = unit.batches

    def eq_3(batch):
        middle = 161 + 338 // 2
        timing = model.timing
        return batch / (timing.prefill_s(0.5, batch, 161, 1) + 338 * timing.decode_s(0.4, batch, middle, 1))

    assert eq_3(batch) >= 5.0 > eq_3(batch - 1)
    assert unit.throughputs == (5.0,)


def test_prefills_of_all_models_and_crowded_decode_count():
    """Eq. 3 by hand, with rates that nothing meets and memory for one request of each."""
    first, second = (
        replace(each, timing=NoReads(size)) for each, size in ((served("a", 1e9), 1.0), (served("b", 1e9, 2.0), 2.0))
    )
    bytes_ = first.weight_bytes + second.weight_bytes + first.request_bytes + second.request_bytes
    unit = mux.estimate_unit([first, second], 1, [0.8, 0.6], Machines(1, 1, bytes_))
    assert unit.batches == (1, 1)
    prefills = first.timing.prefill_s(0.8, 1, 161, 1) + second.timing.prefill_s(0.6, 1, 161, 1)
    for at, (model, share) in enumerate([(first, 0.8), (second, 0.6)]):
        decode_s = 1.4 * 338 * model.timing.decode_s(share, 1, 330, 1)
        assert unit.throughputs[at] == pytest.approx(1 / (prefills + decode_s))
    assert unit.load == pytest.approx(1.4)
    assert mux.estimate_unit([first, second], 1, [0.8, 0.6], Machines(1, 1, bytes_ - 1)) is None


def test_groups_of_meshes_are_the_ways_to_cut_nodes():
    assert mux.mesh_groups(FOUR, 9) == [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    assert mux.mesh_groups(FOUR, 2) == [(4,), (2, 2), (2, 1), (1, 1)]
    assert mux.mesh_groups(Machines(2, 2, 1), 9) == [(2, 2), (2, 1, 1), (1, 1, 1, 1)]
    assert (4, 2) in mux.mesh_groups(Machines(1, 6, 1), 9)
    assert len(mux.mesh_groups(Machines(4, 8, 1), 99)) == 165
    for group in mux.mesh_groups(Machines(3, 6, 1), 99):
        assert sum(group) == 18
        assert max(group) <= 4


# ---- times


def test_shares_slow_prefill_down_and_leave_decode_alone_until_bandwidth_is_short():
    """Fig 3 of the paper, for a 7B model on an A100, by the roofline."""
    gpu = mux.CostTiming(roofline(MODELS["llama-2-7b"], GPUS["A100-80GB"]))
    for batch in (1, 16):
        prefill = [gpu.prefill_s(share, batch, 128, 1) for share in (0.3, 0.5, 1.0)]
        assert prefill[0] > 1.4 * prefill[1] > 1.9 * prefill[2]
        decode = [gpu.decode_s(share, batch, 128, 1) for share in (0.2, 0.4, 1.0)]
        assert decode[1] < 1.15 * decode[2]
        assert decode[0] > 1.7 * decode[2]
        reads = gpu.decode_reads_s(batch, 128, 1)
        assert reads == pytest.approx((13.2e9 + batch * 128 * (512 << 10)) / (0.8 * 2.039e12), rel=0.05)
        assert reads < decode[2]
    timing = mux.CostTiming(made_model())
    assert timing.prefill_s(1.0, 3, 100, 1) == pytest.approx(made_model().batch_s([(100, 0)] * 3))
    assert timing.decode_s(1.0, 3, 100, 1) == pytest.approx(made_model().batch_s([(101, 100)] * 3))
    split = made_model(cost.Parallel(tp=2))
    assert timing.prefill_s(1.0, 3, 100, 2) == pytest.approx(split.batch_s([(100, 0)] * 3))
    with pytest.raises(ArgumentError):
        timing.prefill_s(1.0, 3, 100, 3)


@given(st.integers(1, 40), st.integers(1, 900), st.integers(0, 900))
def test_a_batch_of_equal_prompts_takes_what_they_take_one_by_one(prompts, new, cached):
    model = made_model()
    each_s = model.batch_s([(new + cached, cached)] * prompts)
    assert model.equal_batch_s(prompts, new + cached, cached) == pytest.approx(each_s)
    with pytest.raises(ArgumentError):
        model.equal_batch_s(0, 5)


def test_a_fit_finds_what_its_samples_were_made_with():
    true = mux.StepFit((0.001, 0.0, 2e-6, 1e-9, 0.004, 1e-5, 3e-8), 0.4)
    samples = [
        mux.StepSample(share, batch, tokens, true.time_s(share, batch, tokens))
        for share in (0.1, 0.2, 0.4, 0.6, 1.0)
        for batch in (1, 4, 32)
        for tokens in (16, 300, 2000)
    ]
    fitted = mux.StepFit.fit(samples)
    assert fitted.bandwidth_share == 0.4
    for share, batch, tokens, seconds in samples:
        assert fitted.time_s(share, batch, tokens) == pytest.approx(seconds, rel=1e-6)
    timing = mux.FittedTiming({1: fitted}, {1: true})
    assert timing.decode_s(0.3, 7, 50, 1) == pytest.approx(timing.prefill_s(0.3, 7, 50, 1), rel=1e-5)
    with pytest.raises(ArgumentError, match="tp 2 was not measured"):
        timing.prefill_s(0.3, 7, 50, 2)
    measured = replace(served("a", 1.0), timing=timing)
    assert [each.tp for each in mux.candidates(measured, FOUR)] == [1]
    with pytest.raises(ArgumentError, match="whose times are known: tp 2 was not measured"):
        mux.candidates(replace(measured, tp_degrees=(2,)), FOUR)
    with pytest.raises(ArgumentError, match="6 measurements"):
        mux.StepFit.fit(samples[:6])
    with pytest.raises(ArgumentError, match="share"):
        mux.StepFit.fit([*samples, mux.StepSample(0.0, 1, 1, 1.0)])


# ---- bad input


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: mux.place([], FOUR), "no models"),
        (lambda: mux.place([served("a", 1.0), served("a", 2.0)], FOUR), "same name"),
        (lambda: mux.place([served("a", 0.0), served("b", 0.0)], FOUR), "rates are 0"),
        (lambda: mux.place([served("a", 1.0), served("b", 1.0, 40.0)], FOUR), "'b'.*larger than every mesh"),
        (lambda: mux.place([served("a", 1.0, tp_degrees=(8,))], FOUR), "larger than every mesh"),
        (lambda: mux.place([served("a", 1.0)], FOUR, shares=(0.0,)), "share"),
        (lambda: mux.place([served("a", 1.0)], FOUR, shares=(1.5,)), "share"),
        (lambda: mux.place([served("a", 1.0)], FOUR, shares=(nan,)), "share"),
        (lambda: served("a", nan), "rate"),
        (lambda: served("a", inf), "rate"),
        (lambda: served("a", -1.0), "rate"),
        (lambda: served("a", 1.0, prompt_tokens=0), "prompt_tokens"),
        (lambda: served("a", 1.0, tp_degrees=()), "parallelism"),
        (lambda: served("a", 1.0, tp_degrees=(1, 3)), "a parallelism of 'a' is 3; it must be a power of two"),
        (lambda: served("a", 1.0, tp_degrees=(0,)), "must be at least 1"),
        (lambda: served("a", 1.0, prefill_share=0.0), "prefill_share"),
        (lambda: Machines(0, 4, 1), "nodes"),
        (lambda: Machines(1, 4, 10, 10), "activations"),
        (lambda: mux.exhaustive([served(f"m{at}", 1.0) for at in range(9)], FOUR), "too many"),
        (lambda: mux.CostTiming(made_model(), bandwidth_share=0.0), "bandwidth_share"),
    ],
)
def test_bad_workloads_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_wrong_types_are_refused():
    with pytest.raises(ArgumentTypeError):
        served("a", "1")
    with pytest.raises(ArgumentTypeError):
        Machines(1.0, 4, 10)


def test_models_that_do_not_fit_together_are_refused():
    with pytest.raises(OutOfMemory) as caught:
        mux.place([served(f"m{at}", 1.0, 5.0) for at in range(5)], FOUR)
    assert caught.value.needed_bytes > caught.value.available_bytes == 320 * GIB
    with pytest.raises(OutOfMemory):
        mux.exhaustive([served(f"m{at}", 1.0, 5.0) for at in range(5)], FOUR)


def test_an_idle_model_is_placed_too():
    found = mux.place([served("a", 5.0), served("b", 0.0)], FOUR)
    check(found, [served("a", 5.0), served("b", 0.0)], FOUR)
    assert not found.unmet
