"""kvpool.policy.cost: the cost model of MemServe §5.3, by examples worked by hand and by properties."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.kit import LINEAR, SHAPE, WAVES, made_model, made_profile

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy import cost
from kvpool.policy.cost.fit import fit_nonnegative, relative_residual

LENGTHS = st.integers(1, 5000)


@st.composite
def prompts(draw):
    """(tokens, cached)"""
    tokens = draw(LENGTHS)
    return tokens, draw(st.integers(0, tokens - 1))


# ---- waves


def test_the_example_of_the_paper():
    """§5.3.2 (a): attention output, [l, h] x [h, h], b = ceil(l / t) ceil(h / t), eta = ceil(b / SMs)."""
    waves = cost.WaveModel(
        units=132, tile_rows=128, tile_columns=128, flops_per_s=1e14, weight_bytes_per_s=float("inf"), call_s=0.0
    )
    full_wave_s = 132 * (2 * 128 * 128 * 5120) / 1e14  # 221.5 us: M / N
    blocks = 8 * 40  # l = 1000, h = 5120
    assert ceil(blocks / 132) == 3
    assert waves.time_s(1000, cost.Matmul(5120, 5120), 2) == pytest.approx(3 * full_wave_s)
    assert waves.time_s(1, cost.Matmul(5120, 5120), 2) == pytest.approx(1 * full_wave_s)  # 40 blocks: one wave
    assert waves.time_s(385, cost.Matmul(5120, 5120), 2) == pytest.approx(2 * full_wave_s)  # 4 * 40 = 160 blocks


def test_reading_the_weights_and_the_call_are_counted_once():
    product = cost.Matmul(100, 200)
    free = cost.WaveModel(1, 16, 16, 1e9, float("inf"), 0.0)
    real = cost.WaveModel(1, 16, 16, 1e9, 1e6, 0.5)
    for rows in (1, 100):
        assert real.time_s(rows, product, 2) - free.time_s(rows, product, 2) == pytest.approx(0.5 + 100 * 200 * 2 / 1e6)


def test_the_products_of_a_layer():
    """512 wide, 8 heads and 2 * 4 of K and V, of 64; a rank of two has half the columns or half the rows."""
    names = ("qkv", "attn_out", "gate_up", "down")
    assert [cost.matmul_of(name, SHAPE) for name in names] == [(512, 1024), (512, 512), (512, 2816), (1408, 512)]
    assert [cost.matmul_of(name, SHAPE, 2) for name in names] == [(512, 512), (256, 512), (512, 1408), (704, 512)]
    assert cost.matmul_of("qkv", SHAPE, 8) == (512, (1 + 2) * 64)  # more ranks than KV heads: each has one
    with pytest.raises(ArgumentError, match="norm"):
        cost.matmul_of("norm", SHAPE)


def test_the_fit_of_waves_finds_what_the_samples_were_made_with():
    products = [cost.matmul_of(name, SHAPE) for name in ("qkv", "gate_up", "down")]
    samples = [(n, p, WAVES.time_s(n, p, 2)) for n in (1, 16, 100, 512, 1000, 2048, 4096) for p in products]
    fitted = cost.WaveModel.fit(samples, units=8, itemsize=2)
    for rows, product, seconds in samples:
        assert fitted.time_s(rows, product, 2) == pytest.approx(seconds, rel=1e-6)
    assert fitted.flops_per_s == pytest.approx(1e12, rel=1e-3)
    assert fitted.tile_rows == 64


def test_products_too_small_to_show_their_work_cost_their_call():
    samples = [(n, cost.Matmul(8, 8), 1e-5) for n in (1, 2, 3, 4)]
    fitted = cost.WaveModel.fit(samples, units=1, itemsize=4)
    assert [fitted.time_s(n, cost.Matmul(8, 8), 4) for n in (1, 4)] == pytest.approx([1e-5, 1e-5])
    falling = cost.WaveModel.fit([(n, cost.Matmul(64, 64), 1 / n) for n in (1000, 2000, 4000)], units=1, itemsize=4)
    assert falling.flops_per_s == float("inf")  # never faster with more work
    with pytest.raises(ArgumentError, match="2 measurements do not determine 3"):
        cost.WaveModel.fit(samples[:2], units=1, itemsize=4)


# ---- exec(x, y)


def test_a_prefill_by_hand():
    """100 tokens, 32 of them cached: every operator, as often as a forward pass runs it."""
    model = made_model()
    n, c, x, blocks, layers = 68, 32, 100, 7, 4
    full = [8 * 2 * 64 * 32 * inner / 1e12 for inner in (512, 512, 512, 1408)]
    weights = [512 * 1024, 512 * 512, 512 * 2816, 1408 * 512]
    waves = [ceil(2 * columns / 8) for columns in (32, 16, 88, 16)]  # two tiles of rows
    products = sum(w * f + 2e-6 + 2 * b / 1e11 for w, f, b in zip(waves, full, weights, strict=True))
    attention = 3e-10 * n * c + 2e-10 * n * n + 4e-9 * x + 5e-8 * n + 6e-6
    gather = 2e-9 * x + 3e-8 * blocks + 1e-6
    norms = 2 * (2e-9 * n + 2e-6)
    residuals = 2 * (1e-9 * n + 1e-6)
    others = (3e-9 * n + 2e-6) + (4e-9 * n + 1e-6) + (1e-9 * n + 1e-6)
    once = (2e-6 + 8e-5) + (1e-9 * n + 1e-6)
    expected = layers * (products + attention + gather + norms + residuals + others) + once
    assert model.exec_s(x, c) == pytest.approx(expected)
    assert sum(model.operators_s(x, c).values()) == pytest.approx(expected)
    swapped = 5e-8 * 32 + 1e-7 * 2 + 4e-6
    assert model.exec_s(x, c, in_dram=32) == pytest.approx(expected + swapped)


def test_a_rank_of_two_does_half_of_the_split_work_and_all_of_the_rest():
    one, two = made_model().operators_s(640), made_model(cost.Parallel(tp=2)).operators_s(640)
    for name in ("norm", "residual", "embedding"):
        assert two[name] == one[name]
    assert two["lm_head"] == pytest.approx(one["lm_head"] / 2)
    for name in ("qkv", "attn_out", "gate_up", "down"):
        assert two[name] < one[name]
    attention = 4 * (2e-10 * 640**2 + 4e-9 * 640 + 5e-8 * 640)
    assert two["attention"] == pytest.approx(attention / 2 + 4 * 6e-6)  # the call is not halved
    assert made_model(cost.Parallel(tp=2)).exec_s(640) > made_model().exec_s(640) / 2  # Amdahl


def test_all_reduces_and_sends_by_hand():
    link = cost.Link(bytes_per_s=1e9, call_s=1e-6, latency_s=2e-6)
    parallel = cost.Parallel(tp=4, pp=2, tp_link=link, pp_link=link)
    bare = made_model(cost.Parallel(tp=4, pp=2)).exec_s(100, 40)
    token_bytes = 512 * 2
    steps = 2 * (4 - 1)
    all_reduce = steps * (3e-6 + 60 * token_bytes / 4 / 1e9)
    send = 3e-6 + 60 * token_bytes / 1e9
    assert made_model(parallel).exec_s(100, 40) == pytest.approx(bare + 2 * 4 * all_reduce + send)
    assert link.all_reduce_s(1000, 1) == 0.0


def test_a_stage_has_its_share_of_the_layers():
    alone = made_model()
    assert alone.stage_s(300, 20) == alone.exec_s(300, 20)
    parts = alone.operators_s(300, 20)
    once = parts["embedding"] + parts["lm_head"]
    staged = made_model(cost.Parallel(pp=2))
    assert staged.exec_s(300, 20) == pytest.approx(alone.exec_s(300, 20))
    assert staged.stage_s(300, 20) == pytest.approx((alone.exec_s(300, 20) - once) / 2 + once)
    assert made_model(cost.Parallel(pp=3)).stage_s(300) == pytest.approx(staged.stage_s(300))  # two layers each at most


def test_at_least_one_token_is_computed():
    model = made_model()
    assert model.exec_s(64, 64) == model.exec_s(64, 63) == model.exec_s(64, 1000)
    assert model.exec_many_s(64, np.array([64, 63])).tolist() == pytest.approx([model.exec_s(64, 63)] * 2)
    for tokens, cached in ((0, 0), (5, -1)):
        with pytest.raises(ArgumentError, match=str(tokens)):
            model.exec_s(tokens, cached)


@given(prompts(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_many_at_once_give_the_same_costs(prompt, tp, pp):
    tokens, cached = prompt
    link = cost.Link(1e9, 1e-6)
    model = made_model(cost.Parallel(tp, pp, link, link))
    lengths = np.unique([0, cached, tokens // 2, tokens])
    expected = [model.exec_s(tokens, int(length)) for length in lengths]
    assert model.exec_many_s(tokens, lengths).tolist() == pytest.approx(expected)


@given(prompts())
def test_more_cached_takes_less_and_more_tokens_take_more(prompt):
    tokens, cached = prompt
    model = made_model()
    assert model.exec_s(tokens, cached) <= model.exec_s(tokens, 0)
    assert model.exec_s(tokens, cached) <= model.exec_s(tokens + 1, cached)
    assert model.stage_s(tokens, cached) <= model.exec_s(tokens, cached)


@given(st.lists(prompts(), min_size=1, max_size=6))
def test_a_batch_takes_no_longer_than_its_prompts_one_by_one(batch):
    model = made_model()
    together = model.batch_s(batch)
    alone = [model.exec_s(*prompt) for prompt in batch]
    assert together <= sum(alone) * (1 + 1e-9)
    assert together >= max(alone) * (1 - 1e-9)
    if len(batch) == 1:
        assert together == pytest.approx(alone[0])


def test_the_prompts_of_a_batch_do_not_attend_to_each_other():
    model = made_model()
    eight = 4 * 8 * (2e-10 * 512**2 + (4e-9 + 5e-8) * 512 + 6e-6)
    one_long = model.operators_s(8 * 512)["attention"]
    assert eight < one_long / 2
    gather = 4 * 7 * 1e-6  # each prompt's call
    attention_and_call = eight - one_long + gather
    lm_head = 7 * 2e-6
    assert model.batch_s([(512, 0)] * 8) == pytest.approx(model.exec_s(8 * 512) + attention_and_call + lm_head)
    assert model.batch_s([]) == 0.0


# ---- fitting


def test_a_fit_predicts_what_it_was_made_from_and_other_parallelism():
    exact = made_model()
    fitted = cost.CostModel.fit(made_profile(exact))
    for tokens, cached in ((77, 5), (900, 600), (3000, 0)):
        assert fitted.exec_s(tokens, cached) == pytest.approx(exact.exec_s(tokens, cached), rel=0.02)
        two = cost.Parallel(tp=2)
        assert fitted.spread(two).exec_s(tokens, cached) == pytest.approx(
            exact.spread(two).exec_s(tokens, cached), rel=0.03
        )
    report = fitted.report(made_profile(exact).prefills)
    assert report.worst < 1e-3
    assert all(report.worst < 1e-3 for report in fitted.operator_reports(made_profile(exact)).values())


def test_one_product_is_enough_for_the_waves():
    profile = made_profile(made_model())
    fitted = cost.CostModel.fit(profile, waves_from=("gate_up",))
    assert fitted.operator_reports(profile)["gate_up"].worst < 1e-3
    assert fitted.operator_reports(profile)["down"].mean < 0.5


def test_halving_the_architecture_level_forgets_what_is_not_split():
    """Why the paper takes the operator level (Fig 14 b)."""
    exact = made_model()
    architecture = cost.ArchitectureModel.fit(made_profile(exact).prefills)
    two = exact.spread(cost.Parallel(tp=4))
    held_out = [(200, 64), (640, 320), (90, 0)]
    samples = [cost.Sample(cost.Work(x - c, c, -(-x // 16)), two.exec_s(x, c)) for x, c in held_out]
    fitted = cost.CostModel.fit(made_profile(exact)).spread(cost.Parallel(tp=4))
    assert fitted.report(samples).mean < architecture.scaled(4).report(samples).mean
    assert architecture.scaled(4).report(samples).bias < 0  # too short


def test_too_few_measurements_are_refused():
    profile = made_profile(made_model())
    few = {**profile.operators, "attention": profile.operators["attention"][:4]}
    with pytest.raises(ArgumentError, match=r"attention: 4 measurements.*5"):
        cost.CostModel.fit(cost.Profile(SHAPE, profile.machine, 16, few))
    no_products = {name: samples for name, samples in profile.operators.items() if name in LINEAR}
    with pytest.raises(ArgumentError, match="0 measurements of compute-bound"):
        cost.CostModel.fit(cost.Profile(SHAPE, profile.machine, 16, no_products))
    with pytest.raises(ArgumentError, match="2 prefills"):
        cost.ArchitectureModel.fit(profile.prefills[:2])


@given(
    st.integers(1, 4).flatmap(
        lambda columns: st.lists(
            st.lists(st.floats(0.01, 100), min_size=columns, max_size=columns), min_size=columns, max_size=9
        )
    ),
    st.data(),
)
def test_no_other_nonnegative_coefficients_fit_better(rows, data):
    features = np.array(rows)
    seconds = np.array(data.draw(st.lists(st.floats(0.01, 100), min_size=len(rows), max_size=len(rows))))
    best = fit_nonnegative(features, seconds)
    assert (best >= 0).all()
    other = np.array(data.draw(st.lists(st.floats(0, 10), min_size=features.shape[1], max_size=features.shape[1])))
    least = relative_residual(features @ best, seconds)
    assert least <= relative_residual(features @ other, seconds) * (1 + 1e-6) + 1e-9
    for nudge in np.eye(features.shape[1]) * 1e-3:
        assert least <= relative_residual(features @ (best + nudge), seconds) * (1 + 1e-6) + 1e-9


def test_an_error_report_by_hand():
    report = cost.ErrorReport.of([1.1, 0.8, 2.0], [1.0, 1.0, 1.0])
    assert (report.mean, report.median, report.worst) == pytest.approx((1.3 / 3, 0.2, 1.0))
    assert report.bias == pytest.approx(0.9 / 3)
    assert "mean 43.3%" in str(report)
    for predicted, measured in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ArgumentError):
            cost.ErrorReport.of(predicted, measured)


# ---- transfer or recompute


class Table:
    """exec(x, y) of one second a token that is not cached."""

    def exec_s(self, tokens, cached=0):
        return float(tokens - cached)


def test_equation_2_by_hand():
    """1,000 tokens, 200 cached here and 700 there: computing the 500 takes 500 s."""
    model = Table()

    def choose(bytes_per_s, call_s=0.0):
        link = cost.Link(bytes_per_s, call_s, latency_s=1.0)
        return cost.fetch_or_recompute(model, cost.KVTransfer(link, 10, block_tokens=16), 1000, 200, 700)

    assert choose(bytes_per_s=10) == (False, 501.0, 500.0)
    assert choose(bytes_per_s=11) == (True, pytest.approx(1 + 5000 / 11), 500.0)
    assert choose(bytes_per_s=11, call_s=2.0) == (False, pytest.approx(1 + 5000 / 11 + 32 * 2), 500.0)  # 32 blocks


def test_prompts_that_are_here_or_cannot_be_sent_are_not_fetched():
    transfer = cost.KVTransfer(cost.Link(1e12), 10)
    for cached, elsewhere in ((300, 300), (300, 200)):
        assert cost.fetch_or_recompute(Table(), transfer, 1000, cached, elsewhere) == (False, 0.0, 0.0)
    assert not cost.fetch_or_recompute(Table(), None, 1000, 0, 900).fetch
    assert cost.fetch_or_recompute(Table(), transfer, 1000, 0, 5000).saved_s == 1000  # there is no more than the prompt


@given(prompts(), st.integers(0, 6000), st.floats(1e6, 1e12))
def test_fetching_never_takes_longer_than_computing(prompt, elsewhere, bytes_per_s):
    tokens, cached = prompt
    model = made_model()
    transfer = cost.KVTransfer(cost.Link(bytes_per_s, 1e-5), SHAPE.kv_bytes_per_token)
    choice = cost.fetch_or_recompute(model, transfer, tokens, cached, elsewhere)
    fetched = choice.transfer_s + model.exec_s(tokens, max(cached, elsewhere)) if choice.fetch else None
    if fetched is not None:
        assert elsewhere > cached
        assert fetched <= model.exec_s(tokens, cached) * (1 + 1e-9)


def test_calls_are_those_of_the_strategy():
    """§5.2: a block is one call aggregated, and 2 L calls by layer."""
    link = cost.Link(bytes_per_s=1e9, call_s=1e-5)
    by_layer = cost.KVTransfer(link, 1000, block_tokens=16, calls_per_block=2 * 40)
    aggregated = cost.KVTransfer(link, 1000, block_tokens=16)
    assert aggregated.time_s(160) == pytest.approx(10 * 1e-5 + 160e3 / 1e9)
    assert by_layer.time_s(160) == pytest.approx(800 * 1e-5 + 160e3 / 1e9)
    assert aggregated.time_s(0) == 0.0


# ---- arguments


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: cost.ModelShape(1, 64, 3, 2, 8, 8), ArgumentError, "3 heads"),
        (lambda: cost.ModelShape(1, 65, 2, 2, 8, 8), ArgumentError, "65"),
        (lambda: cost.ModelShape(0, 64, 2, 2, 8, 8), ArgumentError, "layers"),
        (lambda: cost.ModelShape(1, 64, 2, 2, 8, "x"), ArgumentTypeError, "vocab"),
        (lambda: cost.ModelShape(1, 64, 2, 2, 8, 8, dtype="int3"), ArgumentError, "int3"),
        (lambda: cost.Parallel(tp=0), ArgumentError, "tp 0"),
        (lambda: made_model(cost.Parallel(tp=3)), ArgumentError, "tp 3"),
        (lambda: made_model(cost.Parallel(pp=5)), ArgumentError, "5 stages"),
        (lambda: cost.Link(0), ArgumentError, "bandwidth"),
        (lambda: cost.Link(1, -1), ArgumentError, "negative"),
        (lambda: cost.KVTransfer(cost.Link(1), 0), ArgumentError, "byte"),
    ],
)
def test_wrong_shapes_are_typed_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
