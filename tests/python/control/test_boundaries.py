"""Boundaries are measured by real transfers and real iterations, and the planner uses them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit import small_layout
from transfer.kit import pair_of

import kvpool
from kvpool import ArgumentError, Unsupported
from kvpool.control import MeasuredLink, load_boundaries, profile_boundaries, save_boundaries
from kvpool.control.iteration import attend, iterate
from kvpool.control.numpy_rank import NumpyRank
from kvpool.control.torch_rank import TorchRank
from kvpool.policy import cost, mell

TINY = cost.ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50)
SMALL = {"batches": (1, 3), "tokens": (4, 16), "context": 16, "block_tokens": 8, "rounds": 1, "units": 1}


@pytest.mark.parametrize("route", ["shm", "sock-unix"])
def test_links_are_measured_between_processes_and_the_planner_takes_them(route, tmp_path):
    with pair_of(route) as pair:
        link = MeasuredLink(pair.a, pair.to_b, route.partition("-")[0])
        before = pair.a.audit().hbm
        profile = profile_boundaries(TINY, {"near": link}, blocks=(4, 1, 2, 2), **SMALL)
        assert pair.a.audit().hbm == before
    block = small_layout().block_bytes
    assert [sample.bytes for sample in profile.links["near"]] == [block, 2 * block, 4 * block]
    assert all(sample.seconds > 0 for sample in profile.links["near"])
    assert profile.link("near").bytes_per_s > 0
    assert {sample[:2] for sample in profile.iterations} == {(b, t) for b in (1, 3) for t in (0, 4, 16)}
    assert all(sample.seconds > 0 for sample in profile.iterations)
    save_boundaries(profile, tmp_path / "boundaries.json")
    again = load_boundaries(tmp_path / "boundaries.json")
    assert again == profile
    limits = again.boundaries(lambda *_: ["link"], {"link": "near"}, [0, 1], epoch_s=60.0, slowdown=10.0)
    assert limits.link_tokens["link"] > 0
    assert limits.compute_tokens(1, 3) > 0
    move = mell.Move(("a",), 0, 1, 1)
    assert mell.divide([move], limits, {1: 3}).as_kv == [move]


def test_a_failure_leaves_the_pools_as_they_were():
    with pair_of("sock-unix") as pair:
        before = pair.a.audit().hbm
        for error, link, blocks in (
            (Unsupported, MeasuredLink(pair.a, pair.to_b, "carrier pigeon"), (1, 2)),
            (kvpool.OutOfBlocks, MeasuredLink(pair.a, pair.to_b), (1, 1000)),
            (kvpool.Error, MeasuredLink(pair.a, "nobody"), (1, 2)),
        ):
            with pytest.raises(error):
                profile_boundaries(TINY, {"x": link}, blocks=blocks, **SMALL)
            assert pair.a.audit().hbm == before


def test_cached_prompts_are_not_evicted_to_measure():
    with pair_of("sock-unix") as pair:
        size = pair.a.stats().hbm.capacity
        tokens = np.arange((size - 1) * small_layout().block_tokens)
        pair.a.insert(tokens, pair.a.alloc(size - 1)).close()
        with pytest.raises(kvpool.OutOfBlocks):
            profile_boundaries(TINY, {"x": MeasuredLink(pair.a, pair.to_b)}, blocks=(1, 2), **SMALL)
        with pair.a.match(tokens) as hit:
            assert hit.tokens == len(tokens)


def test_an_instance_without_links_can_be_measured_alone_with_the_torch_that_is_given():
    torch = pytest.importorskip("torch")
    shape = cost.ModelShape(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, dtype="bfloat16")
    profile = profile_boundaries(shape, {}, torch=torch, **SMALL)
    assert profile.links == {}
    assert profile.machine.library.startswith("torch")
    assert profile.compute(60.0, 10.0).boundary(3) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": (2, 2)},
        {"blocks": (0, 2)},
        {"batches": ()},
        {"batches": (0,)},
        {"tokens": ()},
        {"tokens": (17,)},
        {"tokens": (-1,)},
        {"rounds": 0},
        {"context": 0},
        {"block_tokens": 0},
    ],
)
def test_a_plan_that_measures_nothing_is_refused(wrong):
    with pytest.raises(ArgumentError):
        profile_boundaries(TINY, {}, **(SMALL | wrong))


def test_a_dtype_that_numpy_lacks_is_unsupported():
    with pytest.raises(Unsupported, match="bfloat16"):
        profile_boundaries(cost.ModelShape(1, 8, 1, 1, 8, 8, dtype="bfloat16"), {}, **SMALL)


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"format": "x"})])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    file = tmp_path / "boundaries.json"
    file.write_text(text)
    with pytest.raises(ArgumentError, match=r"boundaries\.json"):
        load_boundaries(file)


# ---- the measured code computes the right results


def test_each_request_of_an_iteration_sees_only_its_own_cache():
    """Beside a loop over the requests, and over the piece of the prompt."""
    rank, batch, context, piece = NumpyRank(TINY, 200, block_tokens=8), 3, 16, 5
    q = rank.normal(rank.kv_heads, rank.heads // rank.kv_heads, batch + piece, TINY.head_dim)
    mixed = attend(rank, 1, q, batch, context)
    keys, values = rank.gather(1, batch * context)
    for at in range(batch):
        own = slice(at * context, (at + 1) * context)
        expected = rank.attention(q[:, :, at : at + 1], keys[:, own], values[:, own], context - 1)
        assert mixed[at] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    expected = rank.attention(q[:, :, batch:], keys[:, :context], values[:, :context], context - piece)
    assert mixed[batch:] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_both_libraries_compute_the_same_iteration():
    torch = pytest.importorskip("torch")
    ours, theirs = NumpyRank(TINY, 200, block_tokens=8), TorchRank(torch, "cpu", TINY, 200, block_tokens=8)
    for name in ("vocabulary", "head", "table"):
        setattr(theirs, name, torch.from_numpy(getattr(ours, name)))
    for weights, layer in zip(theirs._weights, ours.layers, strict=True):
        weights.update({name: torch.from_numpy(getattr(layer, name)) for name in weights})
    theirs._kv = torch.from_numpy(np.stack([layer.kv for layer in ours.layers]).copy())
    ids = ours.ids(3 + 5)
    for count in (3, 8):
        logits = iterate(theirs, torch.from_numpy(ids[:count]), 3, 16)
        expected = iterate(ours, ids[:count], 3, 16)
        assert expected.shape == (3, 50)
        assert logits.numpy() == pytest.approx(expected, rel=1e-3, abs=1e-4)
