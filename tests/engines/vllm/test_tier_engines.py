"""Two real engines whose tiers are members of one cluster: the second loads what the first has computed.

Each has vLLM's own offloading, with a primary tier that is far too small, as in test_tier_engine.py. Two starts for all
of the file; the last tests stop and kill the first engine.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from transfer.kit import stop_process
from vllm_process import BLOCK, Engine, prompt, same, serving

import kvpool

PRIMARY = 8  # blocks
BYTES = 2 * 2 * 2 * 32 * BLOCK * 4  # of a block: layers, K and V, heads, dimension, tokens, float32
WAIT_S = 30.0


@pytest.fixture(scope="module")
def url():
    name = f"local://vllm-tiers-{os.getpid()}"
    yield name
    kvpool.Cluster.forget(name)


def started(folder, url, name):
    tier = {"type": "kvpool", "dram_blocks": 200, "model": "tiny, revision 1", "cluster": url, "name": name}
    extra = {
        "spec_name": "CpuSpec", "spec_module_path": "inside_tier", "cpu_bytes_to_use": PRIMARY * BYTES,
        "secondary_tiers": [tier],
    }  # fmt: skip
    return serving(folder, extra=extra, connector="OffloadingConnector", dtype="float32", max_model_len=512)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, url):
    folder = tmp_path_factory.mktemp("vllm")  # one for both: blocks of models of other names have other keys
    with started(folder, url, "a") as a, started(folder, url, "b") as b:
        until(lambda: tier(b, "asked") == ["a-tier"] and tier(a, "asked") == ["b-tier"])
        yield a, b


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def tier(engine: Engine, what: str):
    return engine("tier", what)["told"]


def blocks(engine: Engine) -> int:
    return tier(engine, "counts")["blocks"]


def computed(engine: Engine, tokens: list[int]) -> tuple[dict, dict]:
    """What an engine answers when it has nothing cached, and what by its own cache; then its tier has the prompt."""
    before = blocks(engine)
    cold, own = engine.ask(tokens, out=16), engine.ask(tokens, out=16)
    whole = len(tokens) // BLOCK * BLOCK
    assert (cold["cached"], own["cached"]) == (0, whole)
    until(lambda: blocks(engine) >= before + whole // BLOCK)
    return cold, own


def test_an_engine_loads_what_another_one_has_computed(engines):
    a, b = engines
    cold, own = computed(a, prompt(200))
    before = blocks(b)
    loaded = b.ask(prompt(200), out=16)
    assert loaded["cached"] == 192
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]
    assert blocks(b) >= before + 192 // BLOCK  # from now on it has them, too


def test_it_goes_on_where_the_prompt_of_the_other_one_ends(engines):
    a, b = engines
    computed(a, prompt(130, seed=3))
    longer = prompt(130, seed=3)[:128] + prompt(100, seed=4)
    loaded = b.ask(longer, out=16)
    assert loaded["cached"] == 128
    assert b("reset")["ok"]
    assert a.ask(longer, out=16)["tokens"] == loaded["tokens"]


def test_the_content_comes_from_the_other_one(engines):
    a, b = engines
    cold, _ = computed(a, prompt(120, seed=7))
    assert tier(a, "poison") > 0
    wrong = b.ask(prompt(120, seed=7), out=16)
    assert wrong["cached"] == 96
    assert wrong["tokens"] != cold["tokens"]
    assert tier(a, "poison") > 0  # as it was


def test_an_engine_answers_while_the_other_one_is_stopped(engines):
    """The look-up ends by its time, and the prompt is computed."""
    a, b = engines
    cold, _ = computed(a, prompt(150, seed=8))
    stop_process(a.process.pid)
    try:
        alone = b.ask(prompt(150, seed=8), out=16)
    finally:
        os.kill(a.process.pid, signal.SIGCONT)
    assert alone["cached"] == 0
    assert same(alone, cold)


def test_an_engine_answers_when_the_other_one_was_killed(engines):
    """The last test: the first engine is gone."""
    a, b = engines
    until(lambda: tier(b, "asked") == ["a-tier"])
    cold, own = computed(a, prompt(170, seed=9))
    a.process.kill()
    a.process.wait()
    alone = b.ask(prompt(170, seed=9), out=16)
    assert alone["cached"] == 0
    assert same(alone, cold)
    assert b("reset")["ok"]
    from_its_tier = b.ask(prompt(170, seed=9), out=16)
    assert from_its_tier["cached"] == 160
    assert same(from_its_tier, own)
