"""Two engines, each in a process: one computes prompts, the other answers."""

from __future__ import annotations

import os

import pytest
from vllm_process import prompt, same, serving

import kvpool

HOW = {"dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 128}
TO = {"kvpool": {"to": "decode-0"}}


@pytest.fixture(scope="module")
def url():
    name = f"local://vllm-tests-{os.getpid()}"
    yield name
    kvpool.Cluster.forget(name)


def started(folder, url, name, role, **extra):
    extra = {"dram_gib": 0.05, "cluster": url, "name": name, "transfer_timeout_s": 20, **extra}
    return serving(folder, extra=extra, role=role, **HOW)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, url):
    folders = [tmp_path_factory.mktemp(name) for name in ("prefill", "decode")]
    with started(folders[0], url, "prefill-0", "kv_producer") as prefill:
        with started(folders[1], url, "decode-0", "kv_consumer") as decode:
            yield prefill, decode


def sent(prefill, tokens, **how):
    """What the answer of the engine that prefills tells the other."""
    return prefill.ask(tokens, out=1, params=TO, **how)["params"]


def test_the_answer_is_that_of_vllms_own_cache(pair):
    prefill, decode = pair
    told = sent(prefill, prompt(200))
    assert told["kvpool"]["tokens"] == 192
    loaded = decode.ask(prompt(200), params=told)
    own = decode.ask(prompt(200))
    assert (loaded["cached"], own["cached"]) == (192, 192)
    assert same(loaded, own)
