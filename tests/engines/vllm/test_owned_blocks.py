"""vLLM's own blocks in memory that kvpool allocates (``get_mem_pool_context``)."""

from __future__ import annotations

import pytest
from vllm_process import prompt, same, serving

HOW = {"dtype": "bfloat16", "max_model_len": 512}


def test_vllm_computes_in_kvpools_memory(tmp_path):
    with serving(tmp_path, extra={"dram_gib": 0.05, "own_blocks": True}, **HOW) as engine:
        (name,) = engine.inside("memory_of_blocks")
        assert "kvpool-hbm" in name
        cold = engine.ask(prompt(200))
        own = engine.ask(prompt(200))
        engine.forget()
        loaded = engine.ask(prompt(200))
        assert (own["cached"], loaded["cached"]) == (192, 192)
        assert same(loaded, own)
        assert loaded["tokens"] == cold["tokens"]


def test_more_than_the_machine_has_is_refused_at_the_start(tmp_path):
    """vLLM alone would begin, and be killed when it comes to the memory that is not there."""
    much = {"num_gpu_blocks_override": 1 << 28}
    with (
        pytest.raises(AssertionError, match="OutOfMemory"),
        serving(tmp_path, extra={"dram_gib": 0.05, "own_blocks": True}, **HOW, **much),
    ):
        pass
