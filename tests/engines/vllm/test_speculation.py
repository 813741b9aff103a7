"""vLLM that guesses tokens ahead, and rejects most of its guesses: what is saved are tokens that stand. One engine."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    guesses = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with serving(
        tmp_path_factory.mktemp("vllm"),
        extra={"dram_blocks": 64}, dtype="float32", max_model_len=512, speculative_config=guesses,
    ) as engine:  # fmt: skip
        yield engine


def test_guesses_that_were_rejected_are_not_in_the_cache(engine):
    """Answers span blocks, whose last tokens are guessed; then the conversation goes on from them."""
    for seed in range(3):
        first = engine.ask(prompt(50, seed=seed), out=150)
        conversation = prompt(50, seed=seed) + first["tokens"] + [7, 8, 9]
        own = engine.ask(conversation, out=20)
        engine.forget()
        loaded = engine.ask(conversation, out=20)
        assert loaded["cached"] == own["cached"] == 192
        assert same(loaded, own)
        assert engine("reset", connector=True)["ok"]
        computed = engine.ask(conversation, out=20)
        assert computed["tokens"] == loaded["tokens"]
        assert computed["logprobs"] == pytest.approx(loaded["logprobs"], abs=1e-3)
    metrics = engine("metrics")
    assert metrics["vllm:spec_decode_num_draft_tokens"] > metrics["vllm:spec_decode_num_accepted_tokens"]
