"""Reshard plans beside an unsharded cache: cut it as the sender does, apply the plan, find the receiver's shards.

The model cuts shards out of a NumPy array by the rules of the engines, written down here once more, and applies
strips to flat contents, so it shares no arithmetic with the planner. tests/cpp/reshard_test.cpp does the same in C++.
"""

from __future__ import annotations

import runpy
import sys
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import KVLayout, LayoutMismatch, Pool, RawLayout, types
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.transfer.reshard import ParallelConfig, ReshardPlan, plan_reshard

UNWRITTEN = 0xFFFFFFFF
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reshard.py"


def stages_of(layers: int, config: ParallelConfig) -> list[int]:
    """Layers of each stage, as vllm/distributed/utils.py and sglang/srt/distributed/utils.py have it."""
    if config.stage_layers is not None:
        return list(config.stage_layers)
    partitions = [layers // config.pp] * config.pp
    for i in range(layers % config.pp):
        partitions[-(i + 2) if config.split == "vllm" else -(i + 1)] += 1
    return partitions


def shards(kv: np.ndarray, config: ParallelConfig) -> list[np.ndarray]:
    """The part of [layer, k/v, head, ...] that each rank holds: layers by stage, heads as in QKVParallelLinear."""
    bounds = np.cumsum([0, *stages_of(kv.shape[0], config)])
    heads = kv.shape[2]
    found = []
    for rank in range(config.tp * config.pp):
        stage, tp_rank = divmod(rank, config.tp)
        layers = kv[bounds[stage] : bounds[stage + 1]]
        if config.tp >= heads:
            head = tp_rank // (config.tp // heads)
            found.append(layers[:, :, head : head + 1])
        else:
            each = heads // config.tp
            found.append(layers[:, :, tp_rank * each : (tp_rank + 1) * each])
    return found


def verify(plan: ReshardPlan) -> None:
    """Each byte of each receiving rank is written once, and is the byte of the unsharded cache that belongs there."""
    layout = plan.layout
    # Every byte of the logical block has its own number.
    kv = np.arange(layout.block_bytes, dtype=np.uint32).reshape(*layout.shape, layout.itemsize)
    if layout.pages == "fused":
        kv = kv[:, None]  # one piece a layer
    inner = (0, 1, 3, 2, 4, 5) if layout.dims == "NHD" else (0, 1, 2, 3, 4, 5)  # heads first, and back again
    held = [shard.transpose(inner).ravel() for shard in shards(kv.transpose(inner), plan.sender)]
    wanted = [shard.transpose(inner).ravel() for shard in shards(kv.transpose(inner), plan.receiver)]
    received = [np.full(shard.size, UNWRITTEN, np.uint32) for shard in wanted]
    written = [np.zeros(shard.size, np.int64) for shard in wanted]
    for pair in plan.pairs:
        assert pair.bytes == int(pair.strips[:, 2].sum()) > 0
        for start, target, size in pair.strips.tolist():
            assert size > 0
            assert start + size <= held[pair.from_rank].size
            assert target + size <= wanted[pair.to_rank].size
            received[pair.to_rank][target : target + size] = held[pair.from_rank][start : start + size]
            written[pair.to_rank][target : target + size] += 1
    for rank in range(plan.receiver.ranks):
        assert (written[rank] == 1).all(), rank
        np.testing.assert_array_equal(received[rank], wanted[rank])
    verify_balance(plan)


def verify_balance(plan: ReshardPlan) -> None:
    """Ranks that hold the same send the same, to 1/32 and a token of a head."""
    row = plan.layout.shape[-1] * plan.layout.itemsize
    groups: dict[tuple[int, int], list[int]] = {}
    for slice_ in plan.senders:
        groups.setdefault((slice_.stage, slice_.heads.start), []).append(plan.bytes_sent[slice_.rank])
    for sent in groups.values():
        share = sum(sent) / len(sent)
        assert max(sent) <= share * (1 + 1 / 32) + row


@st.composite
def configs(draw: st.DrawFn, layers: int, kv_heads: int) -> ParallelConfig:
    sizes = [tp for tp in range(1, 2 * kv_heads + 9) if tp % kv_heads == 0 or kv_heads % tp == 0]
    tp = draw(st.sampled_from(sizes))
    pp = draw(st.integers(1, 5))
    split = draw(st.sampled_from(["vllm", "sglang"]))
    if not draw(st.booleans()):
        return ParallelConfig(tp, pp, split)
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp - 1, max_size=pp - 1)))
    bounds = [0, *cuts, layers]
    return ParallelConfig(tp, pp, split, tuple(b - a for a, b in pairwise(bounds)))


@st.composite
def plans(draw: st.DrawFn) -> ReshardPlan:
    layout = KVLayout(
        layers=draw(st.integers(1, 9)),
        kv_heads=draw(st.integers(1, 12)),
        head_dim=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "uint8"])),
        block_tokens=draw(st.integers(1, 5)),
        dims=draw(st.sampled_from(["HND", "NHD"])),
        pages=draw(st.sampled_from(["split", "fused"])),
    )
    sender = draw(configs(layout.layers, layout.kv_heads))
    receiver = draw(configs(layout.layers, layout.kv_heads))
    return plan_reshard(layout, sender, receiver)


@given(plans())
def test_every_plan_gives_the_shards_of_the_receiver_and_writes_each_byte_once(plan):
    verify(plan)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
@pytest.mark.parametrize("layers", [4, 5, 32])
def test_all_changes_among_tp_1_2_4_8_and_pp_1_2_4(kv_heads, layers):
    layout = KVLayout(layers, kv_heads, head_dim=1, dtype="uint8", block_tokens=2)
    configurations = [ParallelConfig(tp, pp) for tp, pp in product((1, 2, 4, 8), (1, 2, 4))]
    for sender, receiver in product(configurations, configurations):
        verify(plan_reshard(layout, sender, receiver))


@given(plans(), st.data())
def test_the_strips_of_all_layers_together_are_the_plan(plan, data):
    for pair in plan.pairs:
        parts = [plan.layer_strips(pair, layer) for layer in range(plan.layout.layers)]
        layer = data.draw(st.integers(0, plan.layout.layers - 1))
        if layer not in plan.senders[pair.from_rank].layers:
            assert len(parts[layer]) == 0
        pieces = np.concatenate(parts)
        # Strips that were cut at the end of a layer are put together again.
        joined: list[list[int]] = []
        for start, target, size in pieces.tolist():
            if joined and joined[-1][0] + joined[-1][2] == start and joined[-1][1] + joined[-1][2] == target:
                joined[-1][2] += size
            else:
                joined.append([start, target, size])
        assert joined == pair.strips.tolist()


@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_the_plan_moves_blocks_between_the_pools_of_two_instances(order):
    layout = KVLayout(layers=5, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4)
    other = KVLayout(layers=5, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4, order=order)
    plan = plan_reshard(layout, ParallelConfig(tp=1, pp=2), ParallelConfig(tp=4, pp=1), receiver_layout=other)
    assert {slice_.layout.order for slice_ in plan.receivers} == {order}
    senders = [Pool(slice_.layout, dram_blocks=8) for slice_ in plan.senders]
    receivers = [Pool(slice_.layout, dram_blocks=8) for slice_ in plan.receivers]
    kv = np.random.default_rng(3).random((3, *layout.shape), np.float32)
    source, target = [6, 0, 3], [2, 7, 1]
    for slice_, pool in zip(plan.senders, senders, strict=True):
        pool.tensor(types.DRAM).numpy()[source] = kv[slice_.index]
    plan.apply(
        [pool.tensor(types.DRAM).numpy() for pool in senders],
        [pool.tensor(types.DRAM).numpy() for pool in receivers],
        source,
        target,
    )
    for slice_, pool in zip(plan.receivers, receivers, strict=True):
        np.testing.assert_array_equal(pool.tensor(types.DRAM).numpy()[target], kv[slice_.index])


def test_a_rank_without_layers_takes_no_part():
    layout = KVLayout(layers=2, kv_heads=1, head_dim=2, dtype="uint8", block_tokens=2)
    plan = plan_reshard(layout, ParallelConfig(pp=3, stage_layers=(1, 0, 1)), ParallelConfig())
    assert plan.senders[1].layout is None
    assert plan.of_sender(1) == ()
    kv = np.arange(2 * 16, dtype=np.uint8).reshape(2, *layout.shape)
    received = np.zeros_like(kv)
    plan.apply([kv[:, :1], None, kv[:, 1:]], [received], [0, 1], [1, 0])
    np.testing.assert_array_equal(received, kv[::-1])
    plan.apply([kv[:, :1], None, kv[:, 1:]], [received], [], [])


def test_slices_name_layers_heads_and_the_layout_of_the_ranks_pool():
    layout = KVLayout(layers=6, kv_heads=2, head_dim=8, block_tokens=4, order="discrete")
    slice_ = ParallelConfig(tp=4, pp=2).slices(layout)[6]
    assert (slice_.stage, slice_.tp_rank, slice_.layers, slice_.heads) == (1, 2, range(3, 6), range(1, 2))
    assert (slice_.replica, slice_.replicas) == (0, 2)
    assert slice_.layout == KVLayout(layers=3, kv_heads=1, head_dim=8, block_tokens=4, order="discrete")
    assert [slice_.layers for slice_ in ParallelConfig(pp=4).slices(KVLayout(5, 1, 1))] == [
        range(1),
        range(1, 2),
        range(2, 4),
        range(4, 5),
    ]
    assert [len(slice_.layers) for slice_ in ParallelConfig(pp=4, split="sglang").slices(KVLayout(5, 1, 1))] == [
        1,
        1,
        1,
        2,
    ]


def test_a_plan_is_the_same_for_any_number_of_blocks_and_small():
    layout = KVLayout(layers=80, kv_heads=8, head_dim=128, block_tokens=16)
    same_heads = plan_reshard(layout, ParallelConfig(8, 4), ParallelConfig(8, 1))
    assert (len(same_heads.pairs), same_heads.strips) == (32, 32)
    other_heads = plan_reshard(layout, ParallelConfig(8, 4), ParallelConfig(4, 2))
    assert other_heads.strips == 2 * 80 * 8
    assert str(same_heads).splitlines()[:2] == [
        "TP 8 PP 4 -> TP 8 PP 1: 32 strips a block, 32 pairs",
        "  rank 0 -> rank 0: 163840 bytes in 1",
    ]


def test_strips_cannot_be_written_to():
    plan = plan_reshard(KVLayout(2, 2, 4), ParallelConfig(2), ParallelConfig(1))
    with pytest.raises(ValueError, match="read-only"):
        plan.pairs[0].strips[0, 0] = 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layers": 5}, "layers is 4 at the sender and 5 at the receiver"),
        ({"kv_heads": 4}, "kv_heads is 2 at the sender and 4 at the receiver"),
        ({"head_dim": 64}, "head_dim is 128 at the sender and 64 at the receiver"),
        ({"pages": "fused"}, "the page format is split at the sender and fused at the receiver"),
        ({"dtype": "float16"}, "dtype is bfloat16 at the sender and float16 at the receiver"),
        ({"block_tokens": 32}, "block_tokens is 16 at the sender and 32 at the receiver"),
        ({"dims": "NHD"}, "heads and tokens is HND at the sender and NHD at the receiver"),
    ],
)
def test_instances_whose_blocks_have_other_contents_are_refused(changed, text):
    shape = {"layers": 4, "kv_heads": 2, "head_dim": 128, "dtype": "bfloat16", "block_tokens": 16}
    with pytest.raises(LayoutMismatch, match=text):
        plan_reshard(
            KVLayout(**shape), ParallelConfig(), ParallelConfig(), receiver_layout=KVLayout(**{**shape, **changed})
        )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tp": 0}, ArgumentError, "tp is 0; it must be from 1 to 4096"),
        ({"pp": -1}, ArgumentError, "pp is -1"),
        ({"tp": 65, "pp": 64}, ArgumentError, "65 x 64 are 4160 ranks"),
        ({"tp": 2.0}, ArgumentTypeError, "tp must be an int, not float"),
        ({"tp": True}, ArgumentTypeError, "tp must be an int, not bool"),
        ({"split": "even"}, ArgumentError, "one of vllm, sglang"),
        ({"pp": 2, "stage_layers": (4,)}, ArgumentError, "the layers of 1 stages are given, and there are 2 stages"),
        ({"pp": 2, "stage_layers": (-1, 5)}, ArgumentError, "stage_layers is -1"),
        ({"pp": 2, "stage_layers": "22"}, ArgumentTypeError, "must be a tuple of ints, not str"),
        ({"stage_layers": 4}, ArgumentTypeError, "must be a tuple of ints, not int"),
    ],
)
def test_an_impossible_configuration_is_refused_at_once(arguments, error, text):
    with pytest.raises(error, match=text):
        ParallelConfig(**arguments)


def test_a_configuration_that_does_not_fit_the_layout_is_refused():
    layout = KVLayout(layers=4, kv_heads=6, head_dim=8)
    with pytest.raises(ArgumentError, match="6 KV heads cannot be shared by 4 tensor-parallel ranks") as caught:
        ParallelConfig(tp=4).slices(layout)
    assert (caught.value.kv_heads, caught.value.tp) == (6, 4)
    with pytest.raises(ArgumentError, match="the stages have 5 layers together, and the model has 4") as caught:
        plan_reshard(layout, ParallelConfig(pp=2, stage_layers=(2, 3)), ParallelConfig())
    assert (caught.value.given, caught.value.needed) == (5, 4)
    with pytest.raises(ArgumentTypeError, match="only a KVLayout"):
        ParallelConfig().slices(RawLayout(4096))
    for sides in (("2", ParallelConfig()), (ParallelConfig(), None)):
        with pytest.raises(ArgumentTypeError, match="must be a ParallelConfig"):
            plan_reshard(KVLayout(2, 2, 8, "uint8", 1), *sides)
    with pytest.raises(ArgumentError, match="more than 4194304 strips"):
        plan_reshard(KVLayout(1 << 20, 64, 1, "uint8", 1), ParallelConfig(1), ParallelConfig(64))


@pytest.mark.parametrize("arguments", [[], ["--from", "1x8", "--to", "2x4", "--layers", "5", "--kv-heads", "8"]])
def test_the_example_runs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reshard.py", *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.endswith("16 blocks moved; every rank has its part: True\n")


def test_apply_checks_its_arguments():
    layout = KVLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_tokens=2)
    plan = plan_reshard(layout, ParallelConfig(2), ParallelConfig(1))
    halves = [np.zeros((4, 2, 2, 1, 2, 4), np.float32) for _ in range(2)]
    whole = np.zeros((4, *layout.shape), np.float32)
    plan.apply(halves, [whole], [0], [1])
    with pytest.raises(ArgumentError, match="the sender has 2 ranks; arrays of 1 are given"):
        plan.apply(halves[:1], [whole], [0], [1])
    with pytest.raises(ArgumentError, match="rank 0 of the receiver holds blocks of float32"):
        plan.apply(halves, [halves[0]], [0], [1])
    with pytest.raises(ArgumentError, match=r"rank 1 of the sender holds .* given is nothing"):
        plan.apply([halves[0], None], [whole], [0], [1])
    with pytest.raises(ArgumentError, match="given is float64"):
        plan.apply(halves, [whole.astype(np.float64)], [0], [1])
    with pytest.raises(ArgumentError, match="1 blocks cannot become 2"):
        plan.apply(halves, [whole], [0], [1, 2])
