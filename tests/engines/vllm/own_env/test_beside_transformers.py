"""One prompt in two engines: vLLM and transformers, in two processes, with the same weights. One engine's start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from vllm_process import Engine, prompt, serving

import kvpool
from kvpool.engines.packing import CPU_COLUMNS, unmarked
from kvpool.engines.transformers import PromptStore

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 16}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    name = f"local://vllm-beside-{os.getpid()}"
    yield name
    kvpool.Cluster.forget(name)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, url: str) -> Iterator[Engine]:
    extra = {"dram_gib": 0.05, "cluster": url, "name": "vllm-0"}
    folder = tmp_path_factory.mktemp("vllm")
    with serving(folder, extra=extra, dtype="float32", max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(engine: Engine) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()


@pytest.fixture
def store(engine: Engine, model: Any, url: str) -> Iterator[PromptStore]:
    with (
        kvpool.Cluster.join(url) as cluster,
        PromptStore.beside(model, cluster, "vllm-0", dram_blocks=64, audit=True) as beside,
    ):
        yield beside
        beside.pool.audit()


def ids(tokens: list[int]) -> Any:
    return torch.tensor([tokens])


def test_transformers_continues_what_vllm_has_prefilled(
    engine: Engine, model: Any, store: PromptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(200)
    asked = engine.ask(tokens, out=16)
    engine.inside("await_saves")
    cold = model.generate(ids(tokens), **OPTIONS, **SCORES)
    computed = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **given: computed.append(given["input_ids"].shape) or forward(**given))
    warm = store.generate(model, ids(tokens), **OPTIONS, **SCORES)
    monkeypatch.undo()
    assert computed[0] == (1, 200 - 192)
    assert warm.sequences.tolist() == cold.sequences.tolist() == [tokens + asked["tokens"]]
    torch.testing.assert_close(torch.stack(warm.scores), torch.stack(cold.scores), atol=1e-3, rtol=1e-3)
    assert (store.counts().fetched_tokens, store.counts().loaded_tokens) == (192, 192)
    assert unmarked(store.pool.settings.model) == ("", CPU_COLUMNS)


def test_the_content_comes_from_vllm(engine: Engine, model: Any, store: PromptStore) -> None:
    tokens = prompt(120, seed=1)
    engine.ask(tokens)
    engine.inside("await_saves")
    engine.inside("poison")
    poisoned = store.generate(model, ids(tokens), **OPTIONS)
    assert store.counts().loaded_tokens == 96
    assert poisoned.tolist() != model.generate(ids(tokens), **OPTIONS).tolist()
    assert engine("reset", connector=True)["ok"]


def test_vllm_continues_what_transformers_has_prefilled(engine: Engine, model: Any, store: PromptStore) -> None:
    tokens = prompt(150, seed=2)
    answer = store.generate(model, ids(tokens), **OPTIONS)[0].tolist()
    assert store.counts().loaded_tokens == 0
    assert store.send(answer, "vllm-0") == 160  # 150 + 15 have keys and values
    cold = engine.ask(tokens, out=16, salt="a namespace for itself")
    warm = engine.ask(tokens, out=16)
    assert (cold["cached"], warm["cached"]) == (0, 128)
    assert warm["tokens"] == cold["tokens"] == answer[150:]
    assert warm["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-3)
    longer = answer + prompt(9, seed=3)
    assert engine.ask(longer, out=8)["cached"] == 160


def test_a_salt_of_vllms_is_found_by_nobody(engine: Engine, model: Any, store: PromptStore) -> None:
    engine.ask(prompt(100, seed=4), salt="tenant")
    engine.inside("await_saves")
    store.generate(model, ids(prompt(100, seed=4)), **OPTIONS)
    assert store.counts().fetched_tokens == 0


@pytest.mark.parametrize(
    ("fields", "settings", "says"),
    [
        ({"num_key_value_heads": 4}, {}, "vllm-0 have kv_heads 2, and the model 4"),
        ({"dtype": torch.bfloat16}, {}, "vllm-0 have dtype float32, and the model bfloat16"),
        ({}, {"model": "other"}, "vllm-0 has '', and this side 'other'"),
    ],
)
def test_another_model_or_type_is_refused(
    model: Any, url: str, engine: Engine, fields: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    dtype = fields.pop("dtype", torch.float32)
    config = transformers.LlamaConfig(**model.config.to_dict() | fields)
    other = transformers.LlamaForCausalLM(config).to(dtype)
    with kvpool.Cluster.join(url) as cluster, pytest.raises(kvpool.LayoutMismatch, match=says):
        PromptStore.beside(other, cluster, "vllm-0", dram_blocks=4, **settings)


def test_a_silent_vllm_delays_one_prompt_by_its_deadline_alone(
    engine: Engine, model: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once, with the store's deadline, and the next prompt does not wait for it."""
    engine.ask(prompt(100, seed=6))
    engine.inside("await_saves")
    tokens = ids(prompt(100, seed=6))
    with (
        kvpool.Cluster.join(url) as cluster,
        PromptStore.beside(model, cluster, "vllm-0", dram_blocks=8, timeout_s=0.5) as store,
    ):
        asked: list[float] = []
        fetch = store.pool.fetch_with_insert
        monkeypatch.setattr(
            store.pool,
            "fetch_with_insert",
            lambda *given, **more: asked.append(more["timeout"]) or fetch(*given, **more),
        )
        os.kill(engine.process.pid, signal.SIGSTOP)
        try:
            silent = store.generate(model, tokens, **OPTIONS)
            store.generate(model, ids(prompt(100, seed=7)), **OPTIONS)
        finally:
            os.kill(engine.process.pid, signal.SIGCONT)
        assert len(asked) == 1
        assert 0 < asked[0] <= 0.5
        assert (store.counts().failed_fetches, store.counts().loaded_tokens) == (1, 0)
        assert silent.tolist() == model.generate(tokens, **OPTIONS).tolist()


def test_without_vllm_all_is_computed(engine: Engine, model: Any, store: PromptStore) -> None:
    """The last test of the engine."""
    engine.ask(prompt(100, seed=5))
    engine("stop")
    tokens = ids(prompt(100, seed=5))
    assert store.generate(model, tokens, **OPTIONS).tolist() == model.generate(tokens, **OPTIONS).tolist()
    assert store.counts().failed_fetches == 1
