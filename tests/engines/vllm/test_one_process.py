"""vLLM and its worker in one process, loads before steps. One engine for all of the file."""

from __future__ import annotations

import re

import pytest
from vllm_process import BLOCK, prompt, same, serving


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    how = {"extra": {"dram_gib": 0.05, "name": "test"}, "dtype": "bfloat16", "max_model_len": 512}
    with serving(tmp_path_factory.mktemp("vllm"), **how) as engine:
        yield engine


def test_the_log_probabilities_are_those_of_vllms_own_cache(engine):
    cold = engine.ask(prompt(200))
    own = engine.ask(prompt(200))
    assert (cold["cached"], own["cached"]) == (0, 192)
    engine.forget()
    loaded = engine.ask(prompt(200))
    assert loaded["cached"] == 192
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (31, 0), (32, 0), (33, 32), (128, 96)])
def test_a_hit_is_of_whole_blocks_without_the_last_token(engine, length, cached):
    cold = engine.ask(prompt(length, seed=length))
    assert cold["cached"] == 0
    own = engine.ask(prompt(length, seed=length))
    engine.forget()
    loaded = engine.ask(prompt(length, seed=length))
    assert loaded["cached"] == own["cached"] == cached
    assert same(loaded, own)


def test_answers_are_cached_too_and_continue_as_prompts(engine):
    first = engine.ask(prompt(40, seed=3), out=30)
    conversation = prompt(40, seed=3) + first["tokens"] + prompt(5, seed=4)
    own = engine.ask(conversation)
    engine.forget()
    loaded = engine.ask(conversation)
    assert own["cached"] == loaded["cached"] == 64  # 40 + 30 - 1 tokens have keys and values
    assert same(loaded, own)


def test_vllms_own_cache_and_kvpool_together(engine):
    """vLLM has the first blocks of a prompt, kvpool has more."""
    own = engine.ask(prompt(160, seed=5))
    own = engine.ask(prompt(160, seed=5))
    engine.forget()
    assert engine.ask(prompt(70, seed=5))["cached"] == 64
    before = engine("metrics")
    loaded = engine.ask(prompt(160, seed=5))
    assert loaded["cached"] == 128
    assert same(loaded, own)
    after = engine("metrics")
    assert after["vllm:kvpool_loaded_tokens"] - before["vllm:kvpool_loaded_tokens"] == 128 - 64


def test_several_samples_of_a_prompt(engine):
    cold = engine.ask(prompt(80, seed=6), n=3, temperature=1)
    engine.forget()
    loaded = engine.ask(prompt(80, seed=6), n=3, temperature=1)
    assert loaded["cached"] == 64
    assert loaded["samples"] == cold["samples"]
    assert len(loaded["samples"]) == 3


def test_the_content_comes_from_kvpool(engine):
    """What it holds is changed: the tokens change, and only those of prompts that are loaded."""
    right = engine.ask(prompt(120, seed=7), out=16)
    engine.forget()
    assert engine.inside("poison") > 0
    wrong = engine.ask(prompt(120, seed=7), out=16)
    assert wrong["cached"] == 96
    assert wrong["tokens"] != right["tokens"]
    assert engine("reset", connector=True)["ok"]
    again = engine.ask(prompt(120, seed=7), out=16)
    assert again["cached"] == 0
    assert same(again, right)


def test_a_reset_of_the_connector_forgets_all(engine):
    engine.ask(prompt(100, seed=8))
    engine.inside("await_saves")
    assert engine("reset", connector=True)["ok"]
    assert engine.inside("await_saves")["cached"] == 0
    assert engine.ask(prompt(100, seed=8))["cached"] == 0


def test_prompts_of_different_salts_do_not_meet(engine):
    engine.ask(prompt(100, seed=9), salt="one")
    engine.forget()
    assert engine.ask(prompt(100, seed=9), salt="two")["cached"] == 0
    assert engine.ask(prompt(100, seed=9))["cached"] == 0
    engine.forget()
    assert engine.ask(prompt(100, seed=9), salt="one")["cached"] == 96


def test_a_request_for_the_log_probabilities_of_its_prompt_loads_nothing(engine):
    engine.ask(prompt(100, seed=10))
    engine.forget()
    assert not engine.ask(prompt(100, seed=10), prompt_logprobs=1)["cached"]


def test_a_load_that_fails_is_computed(engine):
    cold = engine.ask(prompt(150, seed=11))
    engine.forget()
    engine.inside("fail_loads", ["now"])
    before = engine("metrics")["vllm:kvpool_failed_loads"]
    failed = engine.ask(prompt(150, seed=11))
    assert failed["reason"] == "length"
    assert same(failed, cold)
    assert engine.inside("failures_left") == 0
    assert engine("metrics")["vllm:kvpool_failed_loads"] == before + 1
    engine.forget()
    assert engine.ask(prompt(150, seed=11))["cached"] == 128


def test_vllm_and_kvpool_count_alike(engine):
    engine.ask(prompt(100, seed=13))
    engine.forget()
    before = engine("metrics")
    engine.ask(prompt(100, seed=13))
    after = engine("metrics")
    for name, more in [
        ("vllm:external_prefix_cache_queries", 100),
        ("vllm:external_prefix_cache_hits", 96),
        ("vllm:kvpool_loads", 1),
        ("vllm:kvpool_loaded_tokens", 96),
    ]:
        assert after[name] - before[name] == more, name


def test_the_pool_is_what_the_options_say(engine):
    told = engine.inside("await_saves")
    assert told["capacity"] == int(0.05 * (1 << 30)) // (2 * 2 * 2 * 32 * 2 * BLOCK)
    assert "dtype='bfloat16'" in told["layout"]
    assert "pages='fused'" in told["layout"]


CASES = [
    ({"parallel": {"decode_context_parallel_size": 2}}, "Unsupported", "context parallelism"),
    ({"parallel": {"prefill_context_parallel_size": 2}, "role": "WORKER"}, "Unsupported", "context parallelism"),
    ({}, "StateError", "no worker has registered"),
    ({"extra": {"dram": 1}}, "ArgumentError", "dram_gib"),
    ({"role": "WORKER"}, "", ""),
    ({"parallel": {"world_size": 2}}, "", ""),
    ({"parallel": {"world_size": 2}, "extra": {"cluster": "local://none"}}, "", ""),
    (
        {"parallel": {"world_size": 2}, "extra": {"cluster": "local://none", "by_layer": True}},
        "Unsupported",
        "by_layer only with one worker",
    ),
    (
        {"parallel": {"use_ubatching": True}, "extra": {"cluster": "local://none", "by_layer": True}, "role": "WORKER"},
        "Unsupported",
        "micro-batches",
    ),
]


def test_what_is_not_supported_is_refused_before_anything_is_served(engine):
    told = engine("refused", [case for case, _, _ in CASES])["told"]
    for (case, error, words), (kind, text) in zip(CASES, told, strict=True):
        assert kind == error, (case, text)
        assert re.search(words, text), text


def test_the_connector_has_the_methods_of_the_installed_interface(engine):
    assert engine("interface") == {"abstract": [], "unknown": [], "hma": True}


def test_a_shut_down_engine_closes_its_pool(engine):
    """The last test of the engine."""
    assert engine("stop") == {"pools": 0}
