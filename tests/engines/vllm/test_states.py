"""A model with short convolutions between its attention layers (LFM2): vLLM keeps their states at the ends of blocks.

The states lie in pages as large as those of attention, padded, and both groups of layers have the same memory. The
weights are random.
"""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving

CONFIG = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 1000, "hidden_size": 128,
    "intermediate_size": 128, "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 128,
    "conv_dim_out": 128, "conv_use_xavier_init": True, "block_auto_adjust_ff_dim": False, "block_ff_dim": 128,
    "block_dim": 128, "block_multiple_of": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
HOW = {
    "config": CONFIG,
    "dtype": "float32",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 60,
    "extra": {"dram_blocks": 60},
}
KINDS = {"one process": {}, "two workers": {"executor": "mp", "tensor_parallel_size": 2}}
IN_ONE_PROCESS = ["one process"]


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    kind = KINDS[request.param]
    with serving(tmp_path_factory.mktemp("vllm"), own_process=bool(kind), **HOW, **kind) as engine:
        yield engine


def test_a_prompt_comes_back_exactly_with_the_state_at_its_last_boundary(engine):
    cold = engine.ask(prompt(500))
    own = engine.ask(prompt(500))
    engine.forget()
    loaded = engine.ask(prompt(500))
    assert (cold["cached"], own["cached"], loaded["cached"]) == (0, 480, 480)
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]


def test_the_content_comes_from_kvpool_states_among_it(engine):
    own = engine.ask(prompt(300, seed=1))
    own = engine.ask(prompt(300, seed=1))
    engine.forget()
    assert engine.in_workers("poison")
    wrong = engine.ask(prompt(300, seed=1))
    assert wrong["cached"] == 288
    assert not same(wrong, own)
    assert engine("reset", connector=True)["ok"]
    assert engine.ask(prompt(300, seed=1))["cached"] == 0


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_answers_are_cached_with_their_states_and_continue_as_prompts(engine):
    first = engine.ask(prompt(200, seed=3), out=80)
    conversation = prompt(200, seed=3) + first["tokens"] + prompt(5, seed=4)
    own = engine.ask(conversation)
    engine.forget()
    loaded = engine.ask(conversation)
    assert own["cached"] == loaded["cached"] == 256  # the state there is of a step that computed an answer
    assert same(loaded, own)


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_a_hit_is_where_states_are_though_attention_has_more(engine):
    """The second prompt agrees for 300 tokens, but the first was computed to 480 in one step."""
    engine.ask(prompt(500, seed=6))
    own = engine.ask(prompt(300, seed=6) + prompt(100, seed=7))
    engine.forget()
    loaded = engine.ask(prompt(300, seed=6) + prompt(100, seed=7))
    assert own["cached"] == 0
    assert loaded["cached"] == 384  # now there is a state for it
    assert loaded["tokens"] == own["tokens"]


@pytest.mark.parametrize("engine", IN_ONE_PROCESS, indirect=True)
def test_many_at_once_and_a_load_that_fails(engine):
    """Prompts are computed from their first token on when a load has failed."""
    cases = [{"tokens": prompt(300 + 40 * n, seed=20 + n)} for n in range(5)]
    right = engine("generate", cases)["outputs"]
    engine.forget()
    engine.inside("fail_loads", ["later", "now"])
    again = engine("generate", cases)["outputs"]
    assert [each["tokens"] for each in again] == [each["tokens"] for each in right]
    assert engine.inside("failures_left") == 0


def test_a_cluster_is_refused(tmp_path):
    with (
        pytest.raises(AssertionError, match="only for models whose groups of KV layers have equal pages"),
        serving(tmp_path, **HOW | {"extra": {"dram_blocks": 60, "cluster": "local://states"}}),
    ):
        pass
