"""A real engine with vLLM's own offloading, whose primary tier is far too small, and kvpool's tier below it.

vLLM refuses to copy between a CPU's cache and its primary tier, so that these copies are the tests' (`CpuSpec`). The
rest is vLLM's: its connector, scheduler, manager and primary tier.
"""

from __future__ import annotations

import pytest
from vllm_process import BLOCK, prompt, same, serving

PRIMARY = 8  # blocks
BYTES = 2 * 2 * 2 * 32 * BLOCK * 4  # of a block: layers, K and V, heads, dimension, tokens, float32


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    extra = {
        "spec_name": "CpuSpec",
        "spec_module_path": "inside_tier",
        "cpu_bytes_to_use": PRIMARY * BYTES,
        "secondary_tiers": [{"type": "kvpool", "dram_blocks": 200}],
    }
    with serving(
        tmp_path_factory.mktemp("vllm"), extra=extra, connector="OffloadingConnector", dtype="float32",
        max_model_len=512,
    ) as engine:  # fmt: skip
        yield engine


def others(engine, seed: int) -> None:
    """Fills the primary tier with other prompts, and vLLM forgets what it has cached itself."""
    for more in range(2):
        engine.ask(prompt(PRIMARY * BLOCK + 5, seed=seed + more))
    assert engine("reset")["ok"]


def tier(engine, what: str) -> dict:
    return engine("tier", what)["told"]


def test_hits_come_from_the_tier_and_tokens_are_those_of_a_cold_run(engine):
    cold = engine.ask(prompt(200), out=16)
    own = engine.ask(prompt(200), out=16)
    assert (cold["cached"], own["cached"]) == (0, 192)
    others(engine, 100)
    before = tier(engine, "counts")
    loaded = engine.ask(prompt(200), out=16)
    after = tier(engine, "counts")
    assert loaded["cached"] == 192
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]
    assert after["found_blocks"] - before["found_blocks"] >= 192 // BLOCK


def test_the_content_comes_from_the_tier(engine):
    right = engine.ask(prompt(120, seed=7), out=16)
    others(engine, 110)
    assert tier(engine, "poison") > 0
    wrong = engine.ask(prompt(120, seed=7), out=16)
    assert wrong["cached"] == 96
    assert wrong["tokens"] != right["tokens"]
    assert tier(engine, "poison") > 0  # as it was
    others(engine, 120)
    again = engine.ask(prompt(120, seed=7), out=16)
    assert again["cached"] == 96
    assert again["tokens"] == right["tokens"]


def test_figures_are_among_vllms(engine):
    metrics = engine("metrics")
    counts = tier(engine, "counts")
    assert metrics["vllm:kvpool_tier_capacity_blocks"] == counts["blocks_max"] == 200
    assert 0 < metrics["vllm:kvpool_tier_blocks"] <= 200
    assert counts["evictable"] == counts["blocks"]


def test_loads_that_fail_are_computed(engine):
    """The last test but one: the tier stays broken."""
    cold = engine.ask(prompt(150, seed=8), out=16)
    others(engine, 130)
    tier(engine, "fail_loads")
    failed = engine.ask(prompt(150, seed=8), out=16)
    assert failed["cached"] == 0
    assert same(failed, cold)


def test_a_shut_down_engine_closes_its_tier(engine):
    told = engine("stop_tier")
    assert told == {"closed": True, "jobs": 0}
