"""Models whose layers, some or all, attend to a window of tokens. Three engines."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving

# In both mixed models vLLM has groups of two, two and one layers: in the blocks of the last one no layer fills some
# pages. In the second the first group has a window.
SHAPES = {
    "one process": ("", 1, 3, {"layers": 5, "window": 64, "windowed": [1, 2, 4]}),
    "two workers": ("mp", 2, 3, {"layers": 5, "window": 64, "windowed": [0, 1, 3]}),
    "windows alone": ("", 1, 1, {"layers": 2, "window": 64, "windowed": [0, 1]}),
}
# Two workers on two cores are slow, and have the tests that they need.
IN_ONE_PROCESS = ["one process", "windows alone"]


@pytest.fixture(scope="module", params=SHAPES)
def engine(request, tmp_path_factory):
    executor, workers, groups, model = SHAPES[request.param]
    how = {"executor": executor, "tensor_parallel_size": workers, "dtype": "float32", "max_model_len": 512}
    with serving(
        tmp_path_factory.mktemp("vllm"),
        own_process=workers > 1,
        shape=model,
        extra={"dram_blocks": 120},
        max_num_batched_tokens=96,
        **how,
    ) as engine:
        engine.groups = groups
        yield engine


def test_prompts_beyond_the_window_come_back_exactly(engine):
    cold = engine.ask(prompt(400))
    own = engine.ask(prompt(400))
    engine.forget()
    loaded = engine.ask(prompt(400))
    assert (cold["cached"], own["cached"], loaded["cached"]) == (0, 384, 384)
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_each_group_has_its_blocks_in_the_cache(engine):
    assert engine("reset", connector=True)["ok"]
    engine.ask(prompt(400))
    assert engine.inside("await_saves")["cached"] == engine.groups * 12


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_a_loaded_prompt_that_grows_is_saved_on(engine):
    engine.ask(prompt(200, seed=1))
    engine.forget()
    longer = engine.ask(prompt(200, seed=1) + prompt(150, seed=2))
    assert longer["cached"] == 192
    own = engine.ask(prompt(200, seed=1) + prompt(150, seed=2))
    engine.forget()
    loaded = engine.ask(prompt(200, seed=1) + prompt(150, seed=2))
    assert own["cached"] == loaded["cached"] == 320
    assert same(loaded, own)


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_vllms_own_cache_and_kvpool_together(engine):
    own = engine.ask(prompt(330, seed=3))
    own = engine.ask(prompt(330, seed=3))
    engine.forget()
    assert engine.ask(prompt(140, seed=3))["cached"] == 128
    loaded = engine.ask(prompt(330, seed=3))
    assert loaded["cached"] == own["cached"] == 320
    assert same(loaded, own)


@pytest.mark.parametrize("how", ["now", "later"])
def test_a_load_that_fails_is_computed(engine, how):
    right = engine.ask(prompt(250, seed=4), out=16)
    engine.forget()
    engine.in_workers("fail_loads_of_last", [how])
    again = engine.ask(prompt(250, seed=4), out=16)
    assert again["cached"] == 0
    assert again["tokens"] == right["tokens"]
    own = engine.ask(prompt(250, seed=4), out=16)  # and what was computed then is cached rightly
    assert own["cached"] == 224
    assert own["tokens"] == right["tokens"]
    engine.forget()
    loaded = engine.ask(prompt(250, seed=4), out=16)
    assert loaded["cached"] == 224
    assert loaded["tokens"] == right["tokens"]


def test_the_content_comes_from_kvpool(engine):
    right = engine.ask(prompt(150, seed=5), out=16)
    engine.forget()
    engine.in_workers("poison_last")
    wrong = engine.ask(prompt(150, seed=5), out=16)
    assert wrong["cached"] == 128
    assert wrong["tokens"] != right["tokens"]
    assert engine("reset", connector=True)["ok"]
    assert same(engine.ask(prompt(150, seed=5), out=16), right)


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_a_crowd_is_answered_as_each_alone_where_little_is_cached(engine):
    """The cache has blocks for 40 or 120 blocks of tokens, and the crowd has 130."""
    crowd = [{"tokens": prompt(96, seed=n % 2) + prompt(60 + 9 * n, seed=n + 9), "out": 12} for n in range(16)]
    alone = []
    for asked in crowd:
        alone.append(engine("generate", [asked])["outputs"][0]["tokens"])
        assert engine("reset", connector=True)["ok"]
    for _ in range(3):
        together = engine("generate", crowd)["outputs"]
        assert [answer["tokens"] for answer in together] == alone
        engine.forget()
    assert engine("metrics")["vllm:kvpool_loaded_tokens"] > 0
