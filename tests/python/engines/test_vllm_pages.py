"""The pages that vLLM says it has, and the tensors in which they lie."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvpool
from kvpool.engines.vllm.layouts import Pages, adoptable, adoption_of, pages_of
from kvpool.engines.vllm.options import Options
from kvpool.engines.vllm.supported import check_alone, check_shared, check_stages, check_supported


class FullAttentionSpec(SimpleNamespace):
    """By this name vLLM's layers are known."""


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


class RSWASpec(FullAttentionSpec):
    """Drops blocks between a prompt and the window of its answer."""


def config(spec=None, groups=1, **more):
    page = {"num_kv_heads": 2, "head_size": 8, "dtype": "torch.bfloat16", "block_size": 16, "page_size_bytes": 1024}
    spec = spec or FullAttentionSpec(**{**page, **more})
    group = SimpleNamespace(layer_names=["one", "two"], kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group] * groups, num_blocks=5)


def hybrid(*groups):
    """Of layers as in `config`: for each group its kind of layer, its names, and what differs of its page."""
    found = [config(kind(**(vars(config(**more).kv_cache_groups[0].kv_cache_spec)))) for kind, _, more in groups]
    for each, (_, names, _) in zip(found, groups, strict=True):
        each.kv_cache_groups[0].layer_names = names
    return SimpleNamespace(kv_cache_groups=[each.kv_cache_groups[0] for each in found], num_blocks=5)


def state(**more):
    """Of layers as in `config`, each with a state that is padded to the size of a page."""
    plain = {"mamba_cache_mode": "align", "num_speculative_blocks": 0, "num_prefill_checkpoint_blocks": 0}
    return MambaSpec(**{"block_size": 16, "page_size_bytes": 1024, **plain, **more})


PAGES = Pages(("one", "two"), 2, 8, "bfloat16", 16, 5)


def test_the_pages_are_what_vllm_says():
    assert pages_of(config()) == PAGES
    latent = MLAAttentionSpec(num_kv_heads=1, head_size=10, dtype="torch.float16", block_size=16, page_size_bytes=320)
    assert pages_of(config(latent)) == Pages(("one", "two"), 1, 10, "float16", 16, 5, latent=True)


def test_groups_of_layers_have_one_page():
    two = hybrid((SlidingWindowSpec, ["b"], {"sliding_window": 64}), (FullAttentionSpec, ["a", "c"], {}))
    names = (("b",), ("a", "c"))
    assert pages_of(two) == Pages(("a", "c"), 2, 8, "bfloat16", 16, 5, windows=(64, None), groups=names)
    alone = hybrid((SlidingWindowSpec, ["one", "two"], {"sliding_window": 64, "extra_retained_tokens": 3}))
    assert pages_of(alone) == Pages(("one", "two"), 2, 8, "bfloat16", 16, 5, windows=(67,))
    stage = hybrid(
        (SlidingWindowSpec, [], {"sliding_window": 64}), (FullAttentionSpec, ["a"], {})
    )  # of a pipeline, without layers of a group
    assert pages_of(stage).windows == (64, None)
    assert [pages_of(one).begins_anew for one in (two, alone, stage, config())] == [True, True, True, False]


def test_groups_whose_pages_differ_inside_are_moved_as_bytes():
    mixed = hybrid((FullAttentionSpec, ["a", "c"], {}), (FullAttentionSpec, ["b"], {}))
    mixed.kv_cache_groups[1].kv_cache_spec = state()
    found = pages_of(mixed)
    names = (("a", "c"), ("b",))
    states = {"windows": (None, None), "groups": names, "states": (False, True), "page_bytes": 1024}
    assert found == Pages(("a", "c"), 1, 32, "uint8", 16, 5, **states)
    assert found.begins_anew
    assert adoption_of(found, (5, 1024), (1024, 1)).layout.block_bytes == 2 * 1024
    heads = hybrid(
        (FullAttentionSpec, ["a"], {}), (SlidingWindowSpec, ["b"], {"head_size": 4, "sliding_window": 9})
    )  # whose pages vLLM has padded
    assert (pages_of(heads).page_bytes, pages_of(heads).windows) == (1024, (None, 9))
    assert pages_of(config(state())).states == (True,)
    with pytest.raises(kvpool.Unsupported, match="equal pages, not with Mamba"):
        check_alone(found, Options(cluster="local://demo"))
    check_alone(found, Options())
    check_alone(PAGES, Options(cluster="local://demo"))


def test_the_bytes_of_pages_are_the_memory_of_all_their_tensors():
    pages = Pages(("a",), 1, 32, "uint8", 16, 3, groups=(("a",), ("b",)), states=(False, True), page_bytes=1024)
    memory = torch.zeros(2 * 3 * 1024, dtype=torch.uint8)
    attention = memory.view(torch.float32).view(2, 3, 2, 128)[1]
    convolution = attention.view(3, 256).as_strided((3, 4), (256, 1))
    raw = adoptable(pages, [convolution, convolution[:, 2:]])
    raw[2] = 9
    assert raw.data_ptr() == attention.data_ptr()
    assert (memory[-1024:] == 9).all()
    assert not memory[:-1024].any()
    check_shared(pages, {"a": attention, "b": (convolution,)})
    with pytest.raises(kvpool.Unsupported, match="tensors of b and a differ"):
        check_shared(pages, {"a": attention, "b": memory.view(torch.float32).view(2, 3, 256)[0]})
    halves = attention.view(6, 128)  # as for attention kernels that take smaller blocks
    assert adoptable(pages, halves).data_ptr() == attention.data_ptr()
    assert adoptable(pages, halves).shape == (3, 1024)
    for wrong in (
        attention[:2],
        attention.view(6, 128)[:5],
        attention.view(3, 256)[:, :128].contiguous(),
        attention.permute(1, 0, 2),
    ):
        with pytest.raises(kvpool.LayoutMismatch, match="one after another"):
            adoptable(pages, wrong)


def test_memory_that_ends_before_the_last_page_is_refused_and_stays_where_it_is():
    pages = Pages(("a",), 1, 32, "uint8", 16, 3, states=(True,), page_bytes=1024)
    memory = torch.zeros(3 * 1024 - 24, dtype=torch.uint8)
    where = memory.data_ptr()
    with pytest.raises(kvpool.LayoutMismatch, match="has 3048 bytes, not 3 pages of 1024"):
        adoptable(pages, memory.as_strided((3, 1000), (1024, 1)))
    assert (memory.data_ptr(), memory.untyped_storage().nbytes()) == (where, 3048)


def test_workers_on_several_machines_are_refused_in_a_cluster():
    parallel = SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1, nnodes_within_dp=2)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(enable_sleep_mode=False))
    check_supported(config, Options())
    with pytest.raises(kvpool.Unsupported, match="on 2"):
        check_supported(config, Options(cluster="local://demo"))
    parallel.nnodes_within_dp = 1
    check_supported(config, Options(cluster="local://demo"))


def test_groups_in_stages_of_a_pipeline_are_refused_in_a_cluster():
    """Layers would be at other places than those of an engine without stages, and the layouts the same."""
    two = Pages(("a", "c"), 2, 8, "bfloat16", 16, 5, windows=(64, None), groups=(("b",), ("a", "c")))
    with pytest.raises(kvpool.Unsupported, match=r"2 groups .* and there are 3 stages"):
        check_stages(two, Options(cluster="local://demo"), 3)
    check_stages(two, Options(cluster="local://demo"), 1)
    check_stages(two, Options(), 3)
    check_stages(PAGES, Options(cluster="local://demo"), 3)


@pytest.mark.parametrize("stage", [["a"], []])
def test_models_with_states_are_refused_in_stages_of_a_pipeline(stage):
    """A stage may have layers of one kind alone, and all of them say so."""
    mixed = hybrid((FullAttentionSpec, ["b"], {}), (FullAttentionSpec, stage, {}))
    mixed.kv_cache_groups[1].kv_cache_spec = state()
    check_stages(pages_of(mixed), Options(), 1)
    with pytest.raises(kvpool.Unsupported, match="only without pipeline parallelism, and there are 2 stages"):
        check_stages(pages_of(mixed), Options(), 2)


def test_groups_that_do_not_share_memory_are_refused():
    one, other = torch.zeros(4, 2), torch.zeros(4, 2)
    pages = Pages(("a", "c"), 2, 8, "bfloat16", 16, 5, windows=(64, None), groups=(("b",), ("a", "c")))
    check_shared(pages, {"a": one, "b": one.view(4, 2), "c": other})
    for wrong in (other, one.view(2, 4), one.T):
        with pytest.raises(kvpool.Unsupported, match="tensors of b and a differ"):
            check_shared(pages, {"a": one, "b": wrong, "c": other})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (config(groups=0), "no KV layers"),
        (config(state(mamba_cache_mode="none")), 'boundaries of blocks: .* "align", not "none"'),
        (config(state(num_speculative_blocks=2)), "without speculative decoding"),
        (config(state(num_prefill_checkpoint_blocks=1)), "without checkpoints"),
        (config(state(page_size_bytes=1000)), "1000 bytes for 16 tokens"),
        (config(RSWASpec(**vars(config().kv_cache_groups[0].kv_cache_spec))), "RSWASpec"),
        (
            hybrid((FullAttentionSpec, ["a"], {}), (SlidingWindowSpec, ["b"], {"block_size": 32, "sliding_window": 9})),
            r"\[\(16, 1024\), \(32, 1024\)\]",
        ),
        (
            hybrid((FullAttentionSpec, ["a"], {}), (SlidingWindowSpec, ["b"], {"page_size_bytes": 2048})),
            r"\[\(16, 1024\), \(16, 2048\)\]",
        ),
        (config(dtype="torch.float4_e2m1fn_x2"), "float4"),
        (config(page_size_bytes=1040), "1040 bytes"),
        (
            config(
                MLAAttentionSpec(num_kv_heads=1, head_size=9, dtype="torch.uint8", block_size=4, page_size_bytes=36)
            ),
            "odd",
        ),
    ],
)
def test_models_that_cannot_be_cached_are_refused(wrong, words):
    with pytest.raises(kvpool.Unsupported, match=words):
        pages_of(wrong)


# Shape of a layer's tensor, the order of its dimensions in memory, and what it is.
TENSORS = [
    ((5, 2, 16, 16), (0, 1, 2, 3), ("HND", "fused", 0)),  # vLLM on a CPU
    ((5, 16, 2, 16), (0, 1, 2, 3), ("NHD", "fused", 0)),
    ((5, 16, 2, 16), (0, 2, 1, 3), ("HND", "fused", 0)),
    ((2, 5, 16, 2, 8), (0, 1, 2, 3, 4), ("NHD", "split", 1)),
    ((5, 2, 16, 2, 8), (0, 1, 2, 3, 4), ("NHD", "split", 0)),
    ((5, 2, 16, 2, 8), (0, 1, 3, 2, 4), ("HND", "split", 0)),
    ((2, 5, 16, 2, 8), (1, 0, 2, 3, 4), ("NHD", "split", 0)),
]


@pytest.mark.parametrize(("shape", "memory", "what"), TENSORS)
def test_a_tensor_is_taken_as_it_lies_in_memory(shape, memory, what):
    tensor = np.zeros([shape[dim] for dim in memory], np.uint16).transpose(np.argsort(memory))
    assert tensor.shape == shape
    strides = [stride // tensor.itemsize for stride in tensor.strides]
    found = adoption_of(PAGES, shape, strides)
    assert (found.layout.dims, found.layout.pages, found.block_dim) == what
    layers = [tensor.transpose(found.order), np.zeros_like(tensor.transpose(found.order))]
    with kvpool.Pool(
        found.layout, hbm=layers, block_dim=found.block_dim, engine_allocates=True, dram_blocks=2, huge_pages="never"
    ) as pool:
        addrs = pool.adopt([3, 1])
        tensor[:] = 7
        assert pool.save(np.arange(32), addrs) == 2


def test_blocks_that_hold_all_layers_are_taken_too():
    """vLLM's layouts BLHNC and BLNHC: a layer's pages have those of other layers between them."""
    memory = np.zeros((5, 2, 16, 2, 16), np.uint16)  # [block, layer, token, head, k|v]
    views = [memory[:, layer].transpose(0, 2, 1, 3) for layer in range(2)]
    found = adoption_of(PAGES, views[0].shape, [stride // 2 for stride in views[0].strides])
    assert (found.layout.dims, found.layout.pages) == ("NHD", "fused")
    layers = [view.transpose(found.order) for view in views]
    with kvpool.Pool(found.layout, hbm=layers, engine_allocates=True, dram_blocks=2, huge_pages="never") as pool:
        addrs = pool.adopt([3, 1, 4])
        memory[3], memory[1] = 7, 8
        assert pool.save(np.arange(32), addrs[:2]) == 2
        memory[:] = 0
        with pool.match(np.arange(32)) as hit:
            pool.load(hit.addrs[1:], addrs[2:])
        assert (memory[4] == 8).all()
        assert not memory[:4].any()


def test_what_may_help_is_said():
    with pytest.raises(kvpool.LayoutMismatch, match=r"cut into 2. Set --block-size 8"):
        adoption_of(PAGES, (10, 2, 8, 16), (256, 128, 16, 1))
    with pytest.raises(kvpool.LayoutMismatch, match="VLLM_KV_CACHE_LAYOUT"):
        adoption_of(PAGES, (5, 2, 16, 16), (256, 1280, 16, 1))  # heads outermost


def test_a_latent_page_is_one_head_of_halves():
    pages = Pages(("one",), 1, 10, "float16", 16, 5, latent=True)
    found = adoption_of(pages, (5, 16, 10), (160, 10, 1))
    assert (found.layout.kv_heads, found.layout.head_dim, found.layout.pages) == (1, 5, "fused")


@pytest.mark.parametrize("shape", [(5, 2, 16, 8), (10, 2, 8, 16), (6, 2, 16, 16), (5, 512)])
def test_a_tensor_that_is_not_what_vllm_says_is_refused(shape):
    strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    with pytest.raises(kvpool.LayoutMismatch, match=r"layer one.*2 heads, 16 tokens and 8 elements"):
        adoption_of(PAGES, shape, strides)
