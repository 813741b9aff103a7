"""Profiles: measured, saved, read back; what is not a profile is refused with the name of the field."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from policy.kit import made_model, made_profile

from kvpool import ArgumentError, Unsupported
from kvpool.control import load_profile, profile_ops, save_profile
from kvpool.control.numpy_rank import NumpyRank
from kvpool.control.torch_rank import TorchRank
from kvpool.policy import cost

TINY = cost.ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50)


@pytest.fixture(scope="module")
def measured():
    return profile_ops(TINY, lengths=(16, 48, 64, 160), shares=(0.0, 0.5), block_tokens=8, rounds=1)


def test_every_operator_is_measured_on_every_length(measured):
    assert set(measured.operators) == set(cost.OPERATORS)
    assert {(s.work.new, s.work.cached) for s in measured.prefills} == {
        (16, 0), (8, 8), (48, 0), (24, 24), (64, 0), (32, 32), (160, 0), (80, 80),
    }  # fmt: skip
    assert {s.work.new for s in measured.operators["qkv"]} == {8, 16, 24, 32, 48, 64, 80, 160}
    assert all(sample.seconds > 0 for samples in measured.operators.values() for sample in samples)
    assert measured.machine.units >= 1


def test_measurements_can_be_fitted(measured):
    model = cost.CostModel.fit(measured)
    assert model.exec_s(160) > model.exec_s(160, 80) > 0
    assert model.report(measured.prefills).n == len(measured.prefills)
    assert cost.ArchitectureModel.fit(measured.prefills).exec_s(100, 10) > 0


def test_a_profile_is_the_same_when_it_is_read_back(measured, tmp_path):
    file = tmp_path / "profile.json"
    save_profile(measured, file)
    again = load_profile(file)
    assert again.as_json() == measured.as_json()
    assert again.model == TINY
    assert cost.CostModel.fit(again).exec_s(100, 20) == cost.CostModel.fit(measured).exec_s(100, 20)


def _without(name):
    return lambda value: value.pop(name)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda v: v.update(version=2), "version 2"),
        (lambda v: v.update(format="x"), "format 'x'"),
        (_without("machine"), "no machine"),
        (_without("operators"), "no operators"),
        (lambda v: v["machine"].update(units=0), r"machine\.units is 0"),
        (lambda v: v["machine"].update(device=7), r"machine\.device"),
        (lambda v: v["model"].pop("ffn"), "ffn missing"),
        (lambda v: v["model"].update(colour="red"), "unknown colour"),
        (lambda v: v["model"].update(layers=0), "layers"),
        (lambda v: v["model"].update(layers="4"), "layers"),
        (lambda v: v.update(block_tokens=1.5), "block_tokens is 1.5"),
        (lambda v: v["operators"].update(magic=[]), "unknown magic"),
        (lambda v: v["operators"].update(qkv={}), r"operators\.qkv is dict"),
        (lambda v: v["operators"]["qkv"].append(3), r"operators\.qkv\[\d+\] is int"),
        (lambda v: v["operators"]["qkv"][1].pop("new"), r"operators\.qkv\[1\] has no new"),
        (lambda v: v["operators"]["qkv"][1].update(new=-1), r"operators\.qkv\[1\]\.new is -1"),
        (lambda v: v["operators"]["qkv"][1].update(new=True), r"operators\.qkv\[1\]\.new is True"),
        (lambda v: v["operators"]["norm"][0].update(seconds=0), r"operators\.norm\[0\]\.seconds is 0"),
        (lambda v: v["operators"]["norm"][0].update(seconds=float("nan")), r"seconds is nan"),
        (lambda v: v["operators"]["norm"][0].update(seconds="1"), r"seconds is '1'"),
        (lambda v: v["operators"]["norm"][0].update(prompts=0), r"prompts is 0"),
        (lambda v: v.update(prefills=3), "prefills is int"),
    ],
)
def test_an_error_in_a_profile_is_named(spoil, text, tmp_path):
    value = copy.deepcopy(made_profile(made_model()).as_json())
    spoil(value)
    with pytest.raises(ArgumentError, match=text):
        cost.Profile.from_json(value)
    file = tmp_path / "spoilt.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ArgumentError, match=r"spoilt\.json"):
        load_profile(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null"])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=r"profile\.json"):
        load_profile(file)


@pytest.mark.parametrize(
    "arguments",
    [{"lengths": ()}, {"lengths": (0,)}, {"shares": ()}, {"shares": (1.0,)}, {"shares": (-0.1,)}, {"rounds": 0}],
)
def test_a_plan_that_measures_nothing_is_refused(arguments):
    with pytest.raises(ArgumentError):
        profile_ops(TINY, **arguments)


def test_a_dtype_that_numpy_lacks_is_unsupported():
    with pytest.raises(Unsupported, match="bfloat16"):
        profile_ops(cost.ModelShape(1, 8, 1, 1, 8, 8, dtype="bfloat16"))


# ---- the measured code computes the right results


def test_a_profile_can_be_taken_with_the_torch_that_is_given():
    torch = pytest.importorskip("torch")
    shape = cost.ModelShape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, dtype="bfloat16")
    profile = profile_ops(shape, lengths=(16, 48, 160), shares=(0.0, 0.5), block_tokens=8, rounds=1, torch=torch)
    assert set(profile.operators) == set(cost.OPERATORS)
    assert profile.machine.library.startswith("torch")
    assert cost.CostModel.fit(profile).exec_s(100) > 0
    with pytest.raises(Unsupported, match="int8"):
        profile_ops(cost.ModelShape(1, 8, 1, 1, 8, 8, dtype="int8"), torch=torch)


def test_both_libraries_compute_the_same():
    torch = pytest.importorskip("torch")
    ours, theirs = NumpyRank(TINY, 200, block_tokens=8), TorchRank(torch, "cpu", TINY, 200, block_tokens=8)
    for name in ("vocabulary", "head", "table"):
        setattr(theirs, name, torch.from_numpy(getattr(ours, name)))
    for weights, layer in zip(theirs._weights, ours.layers, strict=True):
        weights.update({name: torch.from_numpy(getattr(layer, name)) for name in weights})
    ids = ours.ids(200)
    for cached in (0, 64):
        logits = theirs.prefill(torch.from_numpy(ids), cached)
        assert logits.numpy() == pytest.approx(ours.prefill(ids, cached), rel=1e-3, abs=1e-4)


def test_a_cached_prefix_changes_the_time_and_not_the_logits():
    rank = NumpyRank(TINY, 300, block_tokens=8)
    ids = np.random.default_rng(0).integers(0, 50, 300)
    whole = rank.prefill(ids)
    for cached in (8, 128, 296):
        rank.prefill(ids[:cached])
        assert rank.prefill(ids, cached) == pytest.approx(whole, rel=1e-3, abs=1e-4)


def test_attention_over_tiles_is_attention():
    rank = NumpyRank(TINY, 300)
    random = np.random.default_rng(1)
    q = random.standard_normal((2, 2, 200, 8)).astype(np.float32)
    k, v = random.standard_normal((2, 2, 300, 8)).astype(np.float32)
    scores = np.einsum("kgnd,kxd->kgnx", q, k) * 8**-0.5
    scores[..., np.arange(300)[None, :] > 100 + np.arange(200)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("kgnx,kxd->nkgd", weights, v).reshape(200, -1)
    assert rank.attention(q, k, v, 100) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_blocks_of_another_size_are_the_same_memory():
    rank = NumpyRank(TINY, 128, block_tokens=8)
    rank.table = np.arange(16)[::-1]
    one = [part.copy() for part in rank.gather(0, 128)]
    large = rank.gather(0, 128, 32)
    assert [part.shape for part in large] == [part.shape for part in one]
