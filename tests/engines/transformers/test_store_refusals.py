"""What a PromptStore refuses: options, models and pools that it cannot cache for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from store_kit import SIZE, ids, made, made_llama, prompt, store_of

import kvpool
from kvpool.engines.transformers import PromptStore


@pytest.fixture(scope="module")
def model() -> Any:
    return made_llama()


@pytest.fixture
def store(model: Any) -> Iterator[PromptStore]:
    with store_of(model) as made_store:
        yield made_store


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


def test_not_even_one_block_is_an_error_that_says_how_large_one_is(model: Any) -> None:
    with pytest.raises(kvpool.ArgumentError, match="3072 bytes"):
        PromptStore.of(model, dram_gib=1e-6, block_tokens=SIZE)
