"""vLLM whose scheduler and worker are in a process of their own, as `vllm serve` has it."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp("vllm"), own_process=True, extra={"dram_blocks": 64}, dtype="float32", max_model_len=320
    ) as engine:
        yield engine


def test_prompts_come_back_exactly(engine):
    cold = engine.ask(prompt(200))
    own = engine.ask(prompt(200))
    engine.forget()
    loaded = engine.ask(prompt(200))
    assert (cold["cached"], own["cached"], loaded["cached"]) == (0, 192, 192)
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]


def test_the_content_comes_from_kvpool(engine):
    right = engine.ask(prompt(150, seed=1), out=16)
    engine.forget()
    engine.inside("poison")
    wrong = engine.ask(prompt(150, seed=1), out=16)
    assert wrong["cached"] == 128
    assert wrong["tokens"] != right["tokens"]
    assert engine("reset", connector=True)["ok"]
    assert same(engine.ask(prompt(150, seed=1), out=16), right)


def test_the_counters_reach_the_process_that_shows_them(engine):
    engine.ask(prompt(100, seed=2))
    engine.forget()
    before = engine("metrics")
    engine.ask(prompt(100, seed=2))
    after = engine("metrics")
    assert after["vllm:external_prefix_cache_hits"] - before["vllm:external_prefix_cache_hits"] == 96
    assert after["vllm:kvpool_loaded_tokens"] - before["vllm:kvpool_loaded_tokens"] == 96


def test_the_coldest_blocks_make_room(engine):
    for seed in range(3, 13):
        engine.ask(prompt(300, seed=seed))  # 9 blocks each, and 64 in DRAM
    engine.forget()
    assert engine.ask(prompt(300, seed=3))["cached"] == 0
    assert engine.ask(prompt(300, seed=12))["cached"] == 288
