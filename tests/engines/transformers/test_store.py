"""A transformers model whose prompts come from a pool computes what it computes from its own cache."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import kvpool
from kvpool import DRAM, HBM
from kvpool.engines.transformers import TESTED, PromptStore

SIZE = 8  # tokens in a block
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def made(name: str, dtype: Any = torch.float32, **fields: Any) -> Any:
    """A small model with random weights."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SMALL | fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return made("Llama", num_key_value_heads=2)


@pytest.fixture
def store(model: Any) -> Iterator[PromptStore]:
    with PromptStore.of(model, dram_blocks=64, block_tokens=SIZE, audit=True) as made_store:
        yield made_store
        made_store.pool.audit()
        assert made_store.pool.stats().dram.active == 0


def ids(*rows: Any) -> Any:
    return torch.tensor([list(row) for row in rows])


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, length).tolist()


def scored(output: Any) -> tuple[list[list[int]], Any]:
    return output.sequences.tolist(), torch.stack(output.scores)


def alone(model: Any, tokens: list[int], prefix: int, **options: Any) -> Any:
    """transformers by itself, from a cache that holds the first `prefix` tokens."""
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        if prefix:
            model(ids(tokens[:prefix]), past_key_values=cache)
    return model.generate(ids(tokens), past_key_values=cache, attention_mask=torch.ones(1, len(tokens)), **options)


SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
        ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
        ("GPTNeoX", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_cached_gives_the_same_tokens_and_the_same_scores(name: str, fields: Any, dtype: Any) -> None:
    model = made(name, dtype, **fields)
    tokens = prompt(45)
    with PromptStore.of(model, dram_blocks=64, block_tokens=SIZE, audit=True) as store:
        cold = store.generate(model, ids(tokens), max_new_tokens=6, **SCORES)
        warm = store.generate(model, ids(tokens), max_new_tokens=6, **SCORES)
        assert store.counts().loaded_tokens == 40
        assert scored(cold)[0] == scored(warm)[0] == model.generate(ids(tokens), max_new_tokens=6).tolist()
        sequences, scores = scored(alone(model, tokens, 40, max_new_tokens=6, **SCORES))
        assert scored(warm)[0] == sequences
        assert torch.equal(scored(warm)[1], scores)


def test_the_content_really_comes_from_the_pool(model: Any, store: PromptStore) -> None:
    tokens = prompt(45)
    cold = store.generate(model, ids(tokens), max_new_tokens=6, **SCORES)
    torch.from_dlpack(store.pool.tensor(DRAM)).mul_(-1.5)
    poisoned = store.generate(model, ids(tokens), max_new_tokens=6, **SCORES)
    assert not torch.allclose(scored(cold)[1], scored(poisoned)[1], atol=1e-2)


def test_the_next_turn_finds_the_answer_of_the_last(model: Any, store: PromptStore) -> None:
    first = prompt(21)
    answered = store.generate(model, ids(first), max_new_tokens=12)[0].tolist()  # 33 tokens, 32 of them computed
    turn = answered + prompt(9, seed=1)
    with_cache = store.generate(model, ids(turn), max_new_tokens=5)
    assert store.counts().loaded_tokens == 32
    assert with_cache.tolist() == model.generate(ids(turn), max_new_tokens=5).tolist()


@pytest.mark.parametrize(("length", "loaded"), [(1, 0), (7, 0), (8, 0), (9, 8), (16, 8), (17, 16)])
def test_the_last_token_is_computed_always(model: Any, store: PromptStore, length: int, loaded: int) -> None:
    tokens = prompt(length)
    wanted = model.generate(ids(tokens), max_new_tokens=3).tolist()
    for _ in range(2):
        assert store.generate(model, ids(tokens), max_new_tokens=3).tolist() == wanted
    assert store.counts().loaded_tokens == loaded


def test_namespaces_share_nothing(model: Any, store: PromptStore) -> None:
    tokens = prompt(30)
    for namespace in ("a", "b", ""):
        store.generate(model, ids(tokens), max_new_tokens=2, namespace=namespace)
    assert store.counts().loaded_tokens == 0
    store.generate(model, ids(tokens), max_new_tokens=2, namespace="b")
    assert store.counts().loaded_tokens == 24


def test_a_batch_is_loaded_as_far_as_all_of_its_rows_are_there(model: Any, store: PromptStore) -> None:
    rows = [prompt(40), prompt(40, seed=1), prompt(24) + prompt(16, seed=2)]
    wanted = model.generate(ids(*rows), max_new_tokens=4).tolist()
    assert store.generate(model, ids(*rows), max_new_tokens=4).tolist() == wanted
    assert store.generate(model, ids(*rows), max_new_tokens=4).tolist() == wanted
    assert store.counts().loaded_tokens == 3 * 32
    mixed = [rows[0], rows[1][:16] + prompt(24, seed=5)]
    assert (
        store.generate(model, ids(*mixed), max_new_tokens=4).tolist()
        == model.generate(ids(*mixed), max_new_tokens=4).tolist()
    )
    assert store.counts().loaded_tokens == 3 * 32 + 2 * 16


@pytest.mark.parametrize("says", ["a mask", "a padding token"])
def test_rows_that_are_padded_on_the_left_are_cached_without_their_padding(
    model: Any, store: PromptStore, says: str
) -> None:
    rows = [prompt(37), prompt(29, seed=1), prompt(18, seed=2)]
    padded = ids(*[[0] * (37 - len(row)) + row for row in rows])
    options: dict[str, Any] = {"max_new_tokens": 4, **SCORES}
    if says == "a mask":
        options["attention_mask"] = (padded != 0).long()
    plain = model.generate(padded, **options)
    for turn in range(3):
        mine = store.generate(model, padded, **options)
        assert mine.sequences.tolist() == plain.sequences.tolist()
        torch.testing.assert_close(scored(mine)[1], scored(plain)[1], atol=1e-4, rtol=1e-4)
        # Positions [0, 32) of the padded batch: 32, 24 and 13 tokens.
        assert store.counts().loaded_tokens == turn * (32 + 24 + 13)
    store.generate(model, ids(rows[1]), max_new_tokens=1)  # as a prompt that was never padded
    assert store.counts().loaded_tokens == 2 * (32 + 24 + 13) + 24


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}])
def test_a_beam_search_uses_and_saves_its_prompts(model: Any, store: PromptStore, options: Any) -> None:
    rows = [prompt(20), prompt(20, seed=1)]
    wanted = model.generate(ids(*rows), max_new_tokens=5, **options).tolist()
    for _ in range(2):
        assert store.generate(model, ids(*rows), max_new_tokens=5, **options).tolist() == wanted
    assert store.counts().loaded_tokens == 2 * 16
    assert store.counts().saved_tokens == 2 * 16  # no beam is taken for another


def test_sequences_of_one_prompt_are_each_saved(model: Any, store: PromptStore) -> None:
    tokens = prompt(20)
    torch.manual_seed(11)
    out = store.generate(model, ids(tokens), max_new_tokens=14, do_sample=True, num_return_sequences=3).tolist()
    for sequence in out:
        longer = sequence + prompt(4, seed=9)
        before = store.counts().loaded_tokens
        mine = store.generate(model, ids(longer), max_new_tokens=3)
        assert store.counts().loaded_tokens - before == 32
        assert mine.tolist() == model.generate(ids(longer), max_new_tokens=3).tolist()


@pytest.mark.parametrize("how", ["lookup", "assistant", "early exit"])
@pytest.mark.parametrize("seed", range(3))
def test_assistants_load_nothing_and_save_what_was_accepted(
    model: Any, store: PromptStore, how: str, seed: int
) -> None:
    """With an assistant, transformers computes the whole prompt on top of a cache that has some of it."""
    options: dict[str, Any] = {
        "lookup": {"prompt_lookup_num_tokens": 3},
        "assistant": {"assistant_model": made("Llama", num_key_value_heads=2)},
        "early exit": {"assistant_early_exit": 1},
    }[how]
    tokens = prompt(41, seed)
    wanted = model.generate(ids(tokens), max_new_tokens=16).tolist()
    store.generate(model, ids(tokens), max_new_tokens=1)
    for _ in range(2):
        assert store.generate(model, ids(tokens), max_new_tokens=16, **options).tolist() == wanted
    assert store.counts().loaded_tokens == 0
    longer = wanted[0] + prompt(3, seed=4)
    all_of_it = {"attention_mask": torch.ones(1, len(longer)), "max_new_tokens": 3, **SCORES}
    mine = store.generate(model, ids(longer), **all_of_it)
    assert store.counts().loaded_tokens >= 48
    plain = model.generate(ids(longer), **all_of_it)
    torch.testing.assert_close(scored(mine)[1], scored(plain)[1], atol=1e-4, rtol=1e-4)


MODELS_SETTINGS = [
    {"num_beams": 3},
    {"num_beams": 2, "num_return_sequences": 2},
    {"prefill_chunk_size": 16},
    {"pad_token_id": 5},
]


@pytest.mark.parametrize("given", [False, True], ids=["by the model", "and another object"])
@pytest.mark.parametrize("fields", MODELS_SETTINGS, ids=lambda each: "-".join(each))
def test_what_the_models_generation_config_says_counts(fields: Any, given: bool) -> None:
    """Also for a GenerationConfig that leaves it out."""
    model = made("Llama", num_key_value_heads=2)
    model.generation_config.update(**fields)
    options: dict[str, Any] = {"max_new_tokens": 12}
    if given:
        options = {"generation_config": transformers.GenerationConfig(max_new_tokens=12)}
    pad = fields.get("pad_token_id", 0)
    rows = [[token for token in prompt(60, seed) if token != pad][:40] for seed in range(2)]
    batch = ids(*rows) if "pad_token_id" not in fields else ids(rows[0], [pad] * 9 + rows[1][:31])
    wanted = model.generate(batch, **options).tolist()
    with PromptStore.of(model, dram_blocks=64, block_tokens=SIZE, audit=True) as store:
        for _ in range(2):
            assert store.generate(model, batch, **options).tolist() == wanted
        for row in (rows[0], rows[1][:31], *wanted):
            tokens = [token for token in row if token != pad]
            longer = [*tokens, *prompt(3, seed=8)]
            plain = model.generate(ids(longer), max_new_tokens=2, num_beams=1, num_return_sequences=1, **SCORES)
            mine = store.generate(
                model, ids(longer), max_new_tokens=2, num_beams=1, num_return_sequences=1, prefill_chunk_size=None,
                **SCORES,
            )  # fmt: skip
            torch.testing.assert_close(scored(mine)[1], scored(plain)[1], atol=1e-4, rtol=1e-4)


def test_a_prefill_in_chunks_is_saved_and_not_loaded(model: Any, store: PromptStore) -> None:
    tokens = prompt(40)
    wanted = model.generate(ids(tokens), max_new_tokens=3).tolist()
    for _ in range(2):
        assert store.generate(model, ids(tokens), max_new_tokens=3, prefill_chunk_size=16).tolist() == wanted
    assert store.counts().loaded_tokens == 0
    assert store.generate(model, ids(tokens), max_new_tokens=3).tolist() == wanted
    assert store.counts().loaded_tokens == 32


LAYOUTS = [
    {"dims": "HND", "pages": "split"},
    {"dims": "NHD", "pages": "split"},
    {"dims": "HND", "pages": "fused"},
    {"dims": "NHD", "pages": "fused"},
]


@pytest.mark.parametrize("order", LAYOUTS, ids=lambda each: "-".join(each.values()))
@pytest.mark.parametrize("tiers", [(64, 0), (0, 64), (6, 64)], ids=["HBM", "DRAM", "both"])
def test_any_pool_with_this_models_content_will_do(model: Any, order: Any, tiers: tuple[int, int]) -> None:
    layout = kvpool.KVLayout(3, 2, 8, "float32", SIZE, **order)
    with kvpool.Pool(layout, *tiers, audit=True) as pool:
        store = PromptStore(pool, model.config)
        prompts = [prompt(37, seed=seed) for seed in range(4)]
        wanted = [model.generate(ids(tokens), max_new_tokens=3).tolist() for tokens in prompts]
        for _ in range(2):
            for tokens, answer in zip(prompts, wanted, strict=True):
                assert store.generate(model, ids(tokens), max_new_tokens=3).tolist() == answer
        assert store.counts().loaded_tokens == 4 * 32
        if all(tiers):  # some went down, and are read there
            with pool.match(prompts[0][:32]) as hit:
                assert (kvpool.media(hit.addrs) == DRAM).any()
        else:
            assert kvpool.media(pool.alloc(1, HBM if tiers[0] else DRAM)).size == 1


def test_a_cache_of_a_forward_pass_is_saved_and_loaded(model: Any, store: PromptStore) -> None:
    tokens = prompt(33)
    with torch.no_grad():
        whole = model(ids(tokens), past_key_values=(cache := store.load(tokens)))
        assert cache.loaded_tokens == 0
        assert cache.save(tokens) == 32
        assert cache.save(tokens) == 0
        again = store.load(tokens)
        assert again.loaded_tokens == again.get_seq_length() == 32
        rest = model(ids(tokens[32:]), past_key_values=again)
    for mine, other in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :32], other.keys[:, :, :32])
        assert torch.equal(mine.values[:, :, :32], other.values[:, :, :32])
    torch.testing.assert_close(rest.logits[0, -1], whole.logits[0, -1], atol=1e-4, rtol=1e-4)


def test_a_pool_without_room_costs_only_the_caching(model: Any) -> None:
    with PromptStore.of(model, dram_blocks=4, block_tokens=SIZE, audit=True) as store:
        tokens = prompt(60)
        out = store.generate(model, ids(tokens), max_new_tokens=3)
        assert out.tolist() == model.generate(ids(tokens), max_new_tokens=3).tolist()
        assert store.counts().unsaved == 1
        with pytest.raises(kvpool.OutOfBlocks), torch.no_grad():
            model(ids(tokens), past_key_values=(cache := store.load(tokens)))
            cache.save(tokens)
        assert store.pool.stats().dram.free == 4
        store.generate(model, ids(prompt(20)), max_new_tokens=3)
        assert store.counts().saved_tokens == 16


BAD = {
    "past_key_values": ({"past_key_values": object()}, "past_key_values"),
    "another cache": ({"cache_implementation": "static"}, "cache_implementation"),
    "no cache": ({"use_cache": False}, "use_cache"),
    "images": ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    "padding on the right": ({"attention_mask": torch.tensor([[1] * 15 + [0] * 5])}, "row 0"),
    "padding only": ({"attention_mask": torch.zeros(1, 20)}, "row 0"),
    "no cache, by an object": ({"generation_config": transformers.GenerationConfig(use_cache=False)}, "use_cache"),
    "healing": ({"token_healing": True}, "token_healing"),
    "a loop of one's own": ({"custom_generate": "somewhere"}, "custom_generate"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
    "another mask": ({"attention_mask": torch.ones(1, 19)}, "shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_it_cannot_cache_rightly_it_refuses(model: Any, store: PromptStore, case: str) -> None:
    options, says = BAD[case]
    with pytest.raises(kvpool.ArgumentError, match=says):
        store.generate(model, ids(prompt(20)), max_new_tokens=2, **options)
    assert store.counts().prompts == 0


@pytest.mark.parametrize(
    ("attribute", "value"), [("_hf_peft_config_loaded", True), ("peft_config", {"default": object()})]
)
def test_adapters_need_a_namespace(model: Any, store: PromptStore, attribute: str, value: Any) -> None:
    adapted = copy.copy(model)
    setattr(adapted, attribute, value)
    with pytest.raises(kvpool.ArgumentError, match="namespace"):
        store.generate(adapted, ids(prompt(20)), max_new_tokens=2)


def test_tokens_are_integers_in_a_row(model: Any, store: PromptStore) -> None:
    with pytest.raises(kvpool.ArgumentTypeError, match=r"\[row, token\]"):
        store.generate(model, torch.tensor(prompt(20)), max_new_tokens=2)
    for tokens in ([[1, 2]], [0.5, 1.0]):
        with pytest.raises(kvpool.ArgumentError, match=r"\[token\]"):
            store.load(tokens)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("Mistral", {"sliding_window": 16, "num_key_value_heads": 2}, "SlidingWindow"),
        ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8}, "SlidingWindow"),
    ],
)
def test_models_that_do_not_keep_all_tokens_are_refused(name: str, fields: Any, says: str) -> None:
    with pytest.raises(kvpool.Unsupported, match=says):
        PromptStore.of(made(name, **fields), dram_blocks=8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_keys_that_depend_on_the_length_of_the_prompt_are_refused(kind: str) -> None:
    rotation = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rotation |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = made("Llama", num_key_value_heads=2, max_position_embeddings=32, rope_parameters=rotation)
    with pytest.raises(kvpool.Unsupported, match=kind):
        PromptStore.of(model, dram_blocks=8)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_a_mask_may_have_any_type(model: Any, store: PromptStore, dtype: Any) -> None:
    tokens = prompt(20)
    wanted = model.generate(ids(tokens), max_new_tokens=3).tolist()
    mask = torch.ones(1, 20, dtype=dtype)
    for _ in range(2):
        assert store.generate(model, ids(tokens), max_new_tokens=3, attention_mask=mask).tolist() == wanted


def test_an_encoder_is_refused() -> None:
    with pytest.raises(kvpool.Unsupported, match="encoder"):
        PromptStore(kvpool.Pool(kvpool.KVLayout(1, 1, 8, "float32"), dram_blocks=1), transformers.T5Config())


def test_latent_attention_is_refused_when_it_is_to_be_saved() -> None:
    model = made(
        "DeepseekV3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=16, n_shared_experts=1,
    )  # fmt: skip
    with PromptStore.of(model, dram_blocks=8, block_tokens=SIZE) as store:
        wanted = model.generate(ids(prompt(20)), max_new_tokens=2).tolist()
        assert store.generate(model, ids(prompt(20)), max_new_tokens=2).tolist() == wanted
        assert store.counts().unsaved == 1
        with torch.no_grad():
            model(ids(prompt(20)), past_key_values=(cache := store.load(prompt(20))))
        with pytest.raises(kvpool.LayoutMismatch, match="layer 0"):
            cache.save(prompt(20))
        assert store.pool.stats().dram.free == 8


def test_a_pool_with_other_content_is_refused(model: Any) -> None:
    for layout, says in (
        (kvpool.KVLayout(2, 2, 8, "float32", SIZE), "layers"),
        (kvpool.KVLayout(3, 4, 8, "float32", SIZE), "kv_heads"),
        (kvpool.RawLayout(1 << 10, SIZE), "raw bytes"),
    ):
        with kvpool.Pool(layout, dram_blocks=4) as pool, pytest.raises(kvpool.LayoutMismatch, match=says):
            PromptStore(pool, model.config, dtype=torch.float32)
    with kvpool.Pool(kvpool.KVLayout(3, 2, 8, "float16", SIZE), dram_blocks=4) as pool:
        with pytest.raises(kvpool.LayoutMismatch, match="dtype"):
            PromptStore(pool, model.config, dtype=torch.float32)
        store = PromptStore(pool, model.config)  # the pool's type
        with torch.no_grad():
            model(ids(prompt(20)), past_key_values=(cache := store.load(prompt(20))))
        with pytest.raises(kvpool.LayoutMismatch, match="float32"):
            cache.save(prompt(20))
        assert pool.stats().dram.free == 4


def test_a_closed_store_says_so(model: Any) -> None:
    store = PromptStore.of(model, dram_blocks=8, block_tokens=SIZE)
    store.close()
    store.close()
    with pytest.raises(kvpool.ClosedError):
        store.generate(model, ids(prompt(20)), max_new_tokens=2)


def test_not_even_one_block_is_an_error_that_says_how_large_one_is(model: Any) -> None:
    with pytest.raises(kvpool.ArgumentError, match="3072 bytes"):
        PromptStore.of(model, dram_gib=1e-6, block_tokens=SIZE)


def test_the_release_that_is_tested_is_stated_alike() -> None:
    root = Path(__file__).resolve().parents[3]
    assert re.search(
        rf"^TRANSFORMERS \?= transformers=={re.escape(TESTED)}\.\d+$", (root / "Makefile").read_text(), re.M
    )
    assert f"transformers {TESTED}" in (root / "docs/how-to/transformers.md").read_text()
