"""vLLM's sleep mode: its blocks are gone while it sleeps, and kvpool neither reads nor writes them."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving

HOW = {"extra": {"dram_gib": 0.05}, "dtype": "bfloat16", "max_model_len": 512, "enable_sleep_mode": True}


KINDS = {"one": {}, "two workers": {"executor": "mp", "tensor_parallel_size": 2}}


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("vllm"), **HOW, **KINDS[request.param]) as engine:
        told = engine("inside", "install", module="inside_sleep")["told"]
        assert all(each["backend"] == "KvpoolCuMemBackend" for each in (told if isinstance(told, list) else [told]))
        yield engine


def asleep(engine) -> list[bool]:
    told = engine("inside", "asleep", module="inside_sleep")["told"]
    return [each["suspended"] for each in (told if engine.workers > 1 else [told])]


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept_answers_as_before_and_caches_anew(engine, level):
    cold = engine.ask(prompt(200, seed=level))
    own = engine.ask(prompt(200, seed=level))
    assert own["cached"] == 192
    engine("sleep", level=level)
    assert all(asleep(engine))
    assert engine("wake_up")["awake"]
    assert not any(asleep(engine))
    again = engine.ask(prompt(200, seed=level))
    assert again["cached"] == 0, "vLLM says that weights may have changed"
    assert again["tokens"] == cold["tokens"]
    engine.forget()
    loaded = engine.ask(prompt(200, seed=level))
    assert loaded["cached"] == 192
    assert same(loaded, own)


def test_blocks_come_back_with_their_own_tag(engine):
    cold = engine.ask(prompt(100, seed=5))
    engine("sleep", level=1)
    assert not engine("wake_up", tags=["weights"])["awake"]
    assert all(asleep(engine))
    assert engine("wake_up", tags=["kv_cache"])["awake"]
    assert engine.ask(prompt(100, seed=5))["tokens"] == cold["tokens"]


def test_the_blocks_alone_can_be_released(engine):
    cold = engine.ask(prompt(100, seed=6))
    assert not any(asleep(engine))
    engine("release_kv_cache")
    assert all(asleep(engine))
    assert engine("wake_up", tags=["kv_cache", "scheduling"])["awake"]
    assert engine.ask(prompt(100, seed=6))["tokens"] == cold["tokens"]


def test_a_sleep_waits_for_what_still_reads_the_blocks(engine):
    engine.ask(prompt(100, seed=8))
    engine("inside", "hold_a_block", 0.5, 60, module="inside_sleep")
    engine("sleep", level=1)
    assert all(asleep(engine))
    assert engine("wake_up")["awake"]


@pytest.mark.parametrize("engine", ["one"], indirect=True)
def test_an_engine_whose_blocks_stay_in_use_stays_awake_and_says_so(engine):
    """A peer that does not end its transfer, say. Nothing is unmapped under it."""
    engine.ask(prompt(100, seed=8))
    engine("inside", "hold_a_block", None, 0.1, module="inside_sleep")
    told = engine.attempt("sleep", level=1)
    assert "reads the block" in told["text"]
    assert not any(asleep(engine))
    engine("inside", "let_go", 60, module="inside_sleep")
    assert engine("wake_up")["awake"]
    engine("sleep", level=1)
    assert all(asleep(engine))
    assert engine("wake_up")["awake"]
