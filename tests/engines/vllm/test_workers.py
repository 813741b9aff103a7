"""vLLM in processes beside the one that asks: a worker with the scheduler, one apart, and two that share heads."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving

# As `vllm serve` has it for one GPU, on a CPU, and for two GPUs.
SHAPES = {"with the scheduler": ("", 1), "one worker": ("mp", 1), "two workers": ("mp", 2)}


@pytest.fixture(scope="module", params=SHAPES)
def engine(request, tmp_path_factory):
    executor, workers = SHAPES[request.param]
    how = {"executor": executor, "tensor_parallel_size": workers, "dtype": "float32", "max_model_len": 320}
    with serving(tmp_path_factory.mktemp("vllm"), own_process=True, extra={"dram_blocks": 64}, **how) as engine:
        engine.executor = executor
        yield engine


def test_prompts_come_back_exactly(engine):
    cold = engine.ask(prompt(200))
    own = engine.ask(prompt(200))
    engine.forget()
    loaded = engine.ask(prompt(200))
    assert (cold["cached"], own["cached"], loaded["cached"]) == (0, 192, 192)
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]
    heads = {1: "kv_heads=2", 2: "kv_heads=1"}[engine.workers]
    assert all(heads in told["layout"] for told in engine.in_workers("await_saves"))


def test_workers_apart_are_ranks_of_the_schedulers_pool(engine):
    engine.ask(prompt(40))
    apart = engine.executor == "mp"
    expected = [{"rank": number, "lost": False} if apart else None for number in range(engine.workers)]
    assert sorted(engine.in_workers("rank"), key=str) == sorted(expected, key=str)


def test_the_content_comes_from_every_worker(engine):
    """The last worker's part is changed alone."""
    right = engine.ask(prompt(150, seed=1), out=16)
    engine.forget()
    engine.in_workers("poison_last")
    wrong = engine.ask(prompt(150, seed=1), out=16)
    assert wrong["cached"] == 128
    assert wrong["tokens"] != right["tokens"]
    assert engine("reset", connector=True)["ok"]
    assert same(engine.ask(prompt(150, seed=1), out=16), right)


@pytest.mark.parametrize("how", ["now", "later"])
def test_a_load_that_fails_at_one_worker_is_computed(engine, how):
    right = engine.ask(prompt(150, seed=2), out=16)
    engine.forget()
    engine.in_workers("fail_loads_of_last", [how])
    again = engine.ask(prompt(150, seed=2), out=16)
    assert same(again, right)
    engine.forget()
    own = engine.ask(prompt(150, seed=2), out=16)  # and what was computed then is cached rightly
    assert own["cached"] == 128
    assert own["tokens"] == right["tokens"]


def test_the_counters_count_each_token_once(engine):
    engine.ask(prompt(100, seed=3))
    engine.forget()
    before = engine("metrics")
    engine.ask(prompt(100, seed=3))
    after = engine("metrics")
    assert after["vllm:external_prefix_cache_hits"] - before["vllm:external_prefix_cache_hits"] == 96
    assert after["vllm:kvpool_loaded_tokens"] - before["vllm:kvpool_loaded_tokens"] == 96


def test_the_coldest_blocks_make_room(engine):
    for seed in range(4, 14):
        engine.ask(prompt(300, seed=seed))  # 9 blocks each, and 64 in DRAM
    engine.forget()
    assert engine.ask(prompt(300, seed=4))["cached"] == 0
    assert engine.ask(prompt(300, seed=13))["cached"] == 288
