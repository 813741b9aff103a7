"""Questions to the simulator: a cluster by names and gigabytes, the fewest GPUs for a promise, packing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kvpool import ArgumentError
from kvpool.policy import cost
from kvpool.sim.hardware import GPUS, MODELS, kv_room_gb, roofline, weight_bytes
from kvpool.sim.measures import Measures
from kvpool.sim.packed import PACKERS, pack
from kvpool.sim.setup import Setup
from kvpool.sim.sizing import Slo, find_gpus
from kvpool.sim.times import DecodeTimes

SMALL = Setup(workload="poisson", requests=300, rate=6.0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-2-7b", 6.7), ("llama-2-13b", 13.0), ("llama-2-70b", 69.0), ("llama-3-8b", 8.0), ("qwen2.5-32b", 32.8)],
)
def test_models_have_about_the_weights_of_their_names(name, billions):
    assert weight_bytes(MODELS[name]) / 2e9 == pytest.approx(billions, rel=0.02)


def test_a_roofline_is_between_the_data_sheet_and_a_few_times_that():
    shape, gpu = MODELS["llama-2-13b"], GPUS["A100-80GB"]
    model = roofline(shape, gpu)
    least_prefill_s = weight_bytes(shape) * 2048 / gpu.flops
    assert least_prefill_s < model.exec_s(2048) < 3 * least_prefill_s
    least_step_s = weight_bytes(shape) / gpu.bytes_per_s
    assert least_step_s < DecodeTimes(model).run_s(1, 1, 1000) < 3 * least_step_s
    assert roofline(shape, gpu, tp=4).exec_s(2048) < model.exec_s(2048) / 2
    least_swap_s = 2048 * shape.kv_bytes_per_token / gpu.host_bytes_per_s
    assert least_swap_s < model.swap_in_s(2048) < 2 * least_swap_s


def test_kv_gets_the_memory_that_the_weights_leave():
    assert kv_room_gb(MODELS["llama-3-8b"], GPUS["A100-80GB"]) == pytest.approx(0.9 * 80 - 16.06, abs=0.1)
    with pytest.raises(ArgumentError, match="more GPUs"):
        kv_room_gb(MODELS["llama-2-70b"], GPUS["A100-80GB"])
    assert kv_room_gb(MODELS["llama-2-70b"], GPUS["A100-80GB"], tp=4) > 100


def test_gigabytes_become_blocks():
    cluster = Setup(tp=2, gpus=4, hbm_gb=1.0, dram_gb=3.0).make_cluster(16)
    block_bytes = 16 * MODELS["llama-3-8b"].kv_bytes_per_token
    assert cluster.colocated == 2
    assert cluster.hbm_blocks == int(2e9 / block_bytes)
    assert cluster.dram_blocks == int(6e9 / block_bytes)
    assert Setup(prefill=3, decode=1).make_cluster(16).instances == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt-9"},
        {"hardware": "abacus"},
        {"policy": "random"},
        {"workload": "nonsense"},
        {"workload": None},
        {"gpus": 0},
        {"gpus": 3, "tp": 2},
        {"hbm_gb": 0.0},
        {"dram_gb": -1.0},
        {"rate": 0.0},
        {"rate_scale": -1.0},
        {"requests": 0},
        {"skip": -1},
        {"skip": 20_000},
        {"requests": 10, "skip": 10},
        {"seed": -1},
        {"prefill": -1, "decode": 2},
        {"prefill": 2, "decode": -1},
        {"dram_gb": float("inf")},
        {"dram_gb": float("nan")},
        {"hbm_gb": float("inf")},
        {"rate": float("inf")},
        {"rate_scale": float("inf")},
        {"link_gb_s": float("inf")},
        {"link_gb_s": 0.0},
        {"hbm_gb": 1e-6},
        {"prefill": 1},
        {"model": "llama-2-70b"},
        {"tp": 3, "gpus": 3},
    ],
)
def test_impossible_clusters_are_refused(changes):
    with pytest.raises(ArgumentError):
        replace(Setup(), **changes).make_cluster(16)


def test_a_promise_takes_the_fewest_gpus_that_keep_it():
    slo = Slo(ttft_s=1.0, quantile=0.9)
    setup = replace(SMALL, rate=20.0, model="llama-2-13b")
    found, tries = find_gpus(setup, slo)
    assert found is not None
    assert [each.setup.gpus for each in tries] == sorted(each.setup.gpus for each in tries)
    for each in tries:
        assert each.kept == (each.measures.ttft_s.quantile(0.9) <= 1.0)
        assert each.kept == (each.setup.gpus >= found.setup.gpus)
    assert found.setup.gpus - 1 in {each.setup.gpus for each in tries} or found.setup.gpus == 1
    assert found.setup.gpus > 1


def test_engines_batch_as_vllms_server_does_on_the_hardware():
    def batching(**changes):
        made = replace(SMALL, **changes).make_cluster(16).batching
        return made.batch_tokens, made.batch_requests, made.chunked

    assert batching() == (2048, 256, True)
    assert [batching(hardware=name)[:2] for name in ("A100-40GB", "L40S-48GB")] == [(2048, 256)] * 2
    assert [batching(hardware=name)[:2] for name in ("H100-80GB", "H200-141GB")] == [(8192, 1024)] * 2
    assert batching(batch_tokens=512, batch_requests=16) == (512, 16, True)
    assert batching(chunked=False) == (8192, 256, False)
    assert batching(chunked=False, batch_tokens=0) == (0, 256, False)
    assert batching(chunked=False, hardware="H100-80GB") == (8192, 256, False)
    assert batching(batch_tokens=128) == (128, 128, True)
    assert batching(batch_tokens=512, hardware="H200-141GB") == (512, 512, True)
    with pytest.raises(ArgumentError, match="takes one of them in each step"):
        batching(batch_tokens=128, batch_requests=256)
    with pytest.raises(ArgumentError, match="takes one of them in each step"):
        batching(batch_tokens=0)


def test_ttl_and_cap_are_the_schedulers():
    cluster = replace(SMALL, ttl_s=7.0, cap=1.5).make_cluster(16)
    assert (cluster.ttl_s, cluster.balance.cap, cluster.balance.warmup_s) == (7.0, 1.5, 0.0)
    assert replace(SMALL, ttl_s=0.0).make_cluster(16).ttl_s is None


def test_a_promise_that_no_cluster_keeps_and_one_of_split_clusters():
    reasons = []
    nothing, tries = find_gpus(SMALL, Slo(tpot_s=1e-6), gpus_max=3, hopeless=reasons.append)
    assert nothing is None
    assert [each.setup.gpus for each in tries] == [1]  # one request alone is slower
    assert "waits for no other" in reasons[0]
    assert "TPOT" in reasons[0]
    crowded = replace(SMALL, rate=200.0, model="llama-2-13b")
    best = replace(crowded, rate=0.001, gpus=1, hbm_gb=1e6).run().ttft_s.quantile(0.9)
    nothing, tries = find_gpus(crowded, Slo(ttft_s=best * 1.02, quantile=0.9), gpus_max=3, hopeless=reasons.append)
    assert nothing is None
    assert [each.setup.gpus for each in tries] == [1, 2, 3]  # more might do
    assert len(reasons) == 1
    nothing, tries = find_gpus(crowded, Slo(ttft_s=best * 0.98, quantile=0.9), gpus_max=3, hopeless=reasons.append)
    assert (nothing, len(tries), len(reasons)) == (None, 1, 2)
    found, _ = find_gpus(replace(SMALL, prefill=2, decode=1), Slo(ttft_s=100.0))
    assert found is not None
    assert (found.setup.prefill, found.setup.decode, found.setup.gpu_count) == (2, 1, 3)
    with pytest.raises(ArgumentError):
        find_gpus(replace(SMALL, prefill=2, decode=1), Slo(ttft_s=1.0), gpus_max=2)


def test_refused_requests_break_a_promise_and_none_is_kept_by_no_requests():
    slo = Slo(ttft_s=1.0, tpot_s=1.0, quantile=0.9)
    measures = Measures()
    with pytest.raises(ArgumentError, match="no request was measured"):
        slo.kept(measures)
    for _ in range(90):
        measures.ttft_s.add(0.5)
    with pytest.raises(ArgumentError, match="no request was measured"):
        slo.kept(measures)  # all answers had one token
    for _ in range(90):
        measures.tpot_s.add(0.5)
    measures.refused = 9
    assert slo.kept(measures)
    measures.refused = 20
    assert not slo.kept(measures)
    assert not slo.can_be_kept(measures)
    measures.refused = 5
    for _ in range(10):  # with these 15 of 105 are broken, each for itself less than a tenth
        measures.ttft_s.add(2.0)
    assert not slo.kept(measures)
    assert slo.can_be_kept(measures)
    assert slo.within(measures) == {"ttft_s": 90 / 105, "tpot_s": 90 / 95}
    only_refused = Measures(refused=3)
    assert not slo.kept(only_refused)


def test_more_gpus_are_not_tried_if_too_much_is_refused():
    found, tries = find_gpus(replace(SMALL, hbm_gb=0.05), Slo(ttft_s=1000.0))
    assert found is None
    assert len(tries) == 1
    assert tries[0].measures.refused > 3


@pytest.mark.parametrize("promise", [{}, {"ttft_s": 0.0}, {"tpot_s": -1.0}, {"ttft_s": 1.0, "quantile": 1.0}])
def test_invalid_promises_are_refused(promise):
    with pytest.raises(ArgumentError):
        Slo(**promise)


def test_more_dram_hits_more():
    setup = Setup(workload="documents", requests=300, rate=4.0, gpus=2, hbm_gb=2.0)
    ratios = [replace(setup, dram_gb=gb).run().hit_ratio for gb in (0.0, 4.0, 64.0)]
    assert ratios[0] < ratios[1] < ratios[2]


def test_sessions_too_are_as_many_requests_as_asked_for_so_the_last_is_measured_alone():
    done = Setup(requests=50, gpus=2, skip=49).run()
    assert (done.arrived, done.ended, done.refused) == (50, 50, 0)
    assert done.ttft_s.count == done.jct_s.count == 1


def test_a_measured_profile_takes_the_place_of_the_roofline():
    shape = cost.ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256)
    model = cost.CostModel(shape, cost.Fits(cost.WaveModel(1, 16, 16, 1e12, 1e10, 1e-6), {}))
    done = replace(SMALL, profile=model, hbm_gb=0.1).run()
    assert done.ended == 300
    assert 0 < done.ttft_s.mean < 0.1


def test_packing_needs_at_least_the_bound_and_mell_at_most_what_others_need():
    setup = replace(SMALL, requests=400, hbm_gb=2.0)
    packed = {name: pack(setup, name) for name in PACKERS}
    for each in packed.values():
        assert each["instances"]["mean"] >= each["lower_bound"]["mean"] > 0
        assert 0 < each["utilisation"] <= 1
        json.dumps(each)
    assert packed["mell"]["instances"]["mean"] == min(each["instances"]["mean"] for each in packed.values())
    assert packed["mell"]["moves_per_s"] > 0

    # From the epoch on in which the first request that is not skipped arrives: as if nothing had been before.
    steps = pack(setup, "mell")["gpus_over_time"]
    assert steps["step_s"] == 1.0
    arrived_s = [request.time_s for request in setup.make_workload().start()]
    for skip in (1, 200, 399):
        late, first = pack(replace(setup, skip=skip), "mell"), int(arrived_s[skip])
        assert late["measured_from_s"] == first
        assert late["gpus_over_time"] == steps
        assert late["gpus"]["mean"] == pytest.approx(np.mean(steps["mean"][first:]))
        assert late["gpus"]["peak"] == max(steps["peak"][first:])
        assert late["lower_bound"]["mean"] == pytest.approx(np.mean(steps["lower_bound"][first:]))
    seen = []
    pack(setup, "mell", lambda *told: seen.append(told))
    assert [now_s for _, now_s in seen] == [float(at + 1) for at in range(len(steps["mean"]))]
    assert 0 < seen[-1][0] <= 400
    assert seen == sorted(seen)


def test_gpus_over_time_are_few_points_that_keep_mean_and_peak():
    packed = pack(replace(SMALL, requests=900, rate=1.0, tp=2, gpus=2, hbm_gb=0.3), "mell")
    steps = packed["gpus_over_time"]
    assert steps["step_s"] > 1
    assert len(steps["mean"]) <= 200
    assert max(steps["peak"]) == packed["gpus"]["peak"]
    assert np.mean(steps["mean"]) == pytest.approx(packed["gpus"]["mean"], rel=0.02)  # the last step may be shorter


def test_requests_that_cannot_be_packed_are_refused():
    with pytest.raises(ArgumentError, match="no packer"):
        pack(SMALL, "tetris")
    with pytest.raises(ArgumentError, match="wait for answers"):
        pack(Setup(requests=100), "mell")
