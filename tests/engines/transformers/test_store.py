"""A transformers model whose prompts come from a pool computes what it computes from its own cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from store_kit import SCORES, SIZE, alone, ids, made, made_llama, prompt, scored, store_of

import kvpool
from kvpool import DRAM, HBM
from kvpool.engines.transformers import TESTED, PromptStore


@pytest.fixture(scope="module")
def model() -> Any:
    return made_llama()


@pytest.fixture
def store(model: Any) -> Iterator[PromptStore]:
    with store_of(model) as made_store:
        yield made_store


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


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_a_mask_may_have_any_type(model: Any, store: PromptStore, dtype: Any) -> None:
    tokens = prompt(20)
    wanted = model.generate(ids(tokens), max_new_tokens=3).tolist()
    mask = torch.ones(1, 20, dtype=dtype)
    for _ in range(2):
        assert store.generate(model, ids(tokens), max_new_tokens=3, attention_mask=mask).tolist() == wanted


def test_a_closed_store_says_so(model: Any) -> None:
    store = PromptStore.of(model, dram_blocks=8, block_tokens=SIZE)
    store.close()
    store.close()
    with pytest.raises(kvpool.ClosedError):
        store.generate(model, ids(prompt(20)), max_new_tokens=2)


def test_the_release_that_is_tested_is_stated_alike() -> None:
    root = Path(__file__).resolve().parents[3]
    assert re.search(
        rf"^TRANSFORMERS \?= transformers=={re.escape(TESTED)}\.\d+$", (root / "Makefile").read_text(), re.M
    )
    assert f"transformers {TESTED}" in (root / "docs/how-to/transformers.md").read_text()
