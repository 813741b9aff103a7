"""Two engines, each in a process: one computes prompts, the other answers. Two starts for all of the file."""

from __future__ import annotations

import os
import signal
import time

import pytest
from vllm_process import BLOCK, prompt, same, serving

import kvpool

HOW = {"dtype": "bfloat16", "max_model_len": 512, "max_num_batched_tokens": 128}
TO = {"kvpool": {"to": "decode-0"}}


@pytest.fixture(scope="module")
def url():
    name = f"local://vllm-tests-{os.getpid()}"
    yield name
    kvpool.Cluster.forget(name)


def started(folder, url, name, role, **how):
    extra = {"dram_gib": 0.05, "cluster": url, "name": name, "transfer_timeout_s": 30}
    return serving(folder, extra=extra, role=role, **HOW, **how)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, url):
    folders = [tmp_path_factory.mktemp(name) for name in ("prefill", "decode")]
    with started(folders[0], url, "prefill-0", "kv_producer", own_process=True) as prefill:  # as in vllm serve
        with started(folders[1], url, "decode-0", "kv_both") as decode:
            prefill.inside("layers_sent_early")
            yield prefill, decode


@pytest.fixture(params=[False, True], ids=["whole", "by layer"])
def pair(request, engines):
    prefill, decode = engines
    prefill.inside("send_by_layer", request.param)
    for engine in engines:
        until = time.monotonic() + 30
        while not engine("reset", connector=True)["ok"]:  # while a prompt arrives, what it adds to is in use
            assert time.monotonic() < until
    return prefill, decode


def sent(prefill, tokens, **how):
    """What the answer of the engine that prefills tells the other."""
    return prefill.ask(tokens, out=1, params=TO, **how)["params"]


def close(one: dict, other: dict) -> bool:
    """Another number of tokens computed together may change the last bits."""
    return one["tokens"] == other["tokens"] and one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-2)


def test_the_answer_is_that_of_vllms_own_cache(pair):
    prefill, decode = pair
    cold = decode.ask(prompt(100))
    own = decode.ask(prompt(100))
    assert (cold["cached"], own["cached"]) == (0, 96)
    assert decode("reset", connector=True)["ok"]
    told = sent(prefill, prompt(100))
    assert told["kvpool"]["tokens"] == 96
    loaded = decode.ask(prompt(100), params=told)
    assert loaded["cached"] == 96
    assert same(loaded, own)
    assert loaded["tokens"] == cold["tokens"]


def test_the_content_comes_from_the_other_engine(pair):
    """It is changed after it has arrived: the tokens change."""
    prefill, decode = pair
    right = decode.ask(prompt(120, seed=1), out=16)
    assert decode("reset", connector=True)["ok"]
    told = sent(prefill, prompt(120, seed=1))
    prefill.inside("await_sends")
    decode.inside("poison")
    wrong = decode.ask(prompt(120, seed=1), out=16, params=told)
    assert wrong["cached"] == 96
    assert wrong["tokens"] != right["tokens"]


def test_a_long_prompt_is_sent_chunk_by_chunk_and_once(pair):
    prefill, decode = pair
    own = decode.ask(prompt(420, seed=2))
    own = decode.ask(prompt(420, seed=2))
    assert decode("reset", connector=True)["ok"]
    sent(prefill, prompt(40, seed=50))  # connects
    before = prefill.inside("await_sends")
    told = sent(prefill, prompt(420, seed=2))
    blocks = prefill.inside("await_sends") - before
    assert 13 <= blocks <= 13 + 4  # the last chunk may be sent while the one before it is on its way
    loaded = decode.ask(prompt(420, seed=2), params=told)
    assert loaded["cached"] == 416
    assert close(loaded, own)


def test_of_a_shared_beginning_only_the_rest_is_sent(pair):
    prefill, decode = pair
    for number, tokens in enumerate([prompt(100, seed=3), prompt(96, seed=3) + prompt(70, seed=4)]):
        before = prefill.inside("await_sends")
        told = sent(prefill, tokens)
        assert prefill.inside("await_sends") - before == (3, 2)[number]
        assert decode.ask(tokens, params=told)["cached"] == (96, 160)[number]


def test_layers_are_sent_while_others_are_computed(engines):
    prefill, _ = engines
    prefill.inside("send_by_layer", False)
    before = prefill.inside("layers_sent_early")
    sent(prefill, prompt(100, seed=5))
    assert prefill.inside("layers_sent_early") == before
    prefill.inside("await_sends")
    prefill.inside("send_by_layer", True)
    sent(prefill, prompt(100, seed=6))
    assert prefill.inside("layers_sent_early") == before + 1  # of two layers


def test_a_crowd_is_answered_as_each_alone(pair):
    prefill, decode = pair
    crowd = [prompt(64, seed=number % 3) + prompt(40 + 9 * number, seed=number) for number in range(12)]
    alone = [decode.ask(tokens) for tokens in crowd]
    assert decode("reset", connector=True)["ok"]
    answers = prefill("generate", [{"tokens": tokens, "out": 1, "params": TO} for tokens in crowd])["outputs"]
    asked = [{"tokens": tokens, "params": said["params"]} for tokens, said in zip(crowd, answers, strict=True)]
    loaded = decode("generate", asked)["outputs"]
    assert [answer["cached"] for answer in loaded] == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in crowd]
    assert all(close(*pair) for pair in zip(loaded, alone, strict=True))


def test_several_samples_of_one_prompt(engines):
    prefill, decode = engines
    told = sent(prefill, prompt(100, seed=7))
    answer = decode.ask(prompt(100, seed=7), params=told, n=3, temperature=1)
    assert answer["cached"] == 96
    assert len(answer["samples"]) == 3


WRONG = [
    {"kvpool": 3}, {"kvpool": {"to": 7}}, {"kvpool": {"to": "nobody"}}, {"kvpool": {"to": "decode-0"}}, {"other": "x"},
    {"kvpool": {"from": "nobody", "id": "x", "tokens": 96}}, {"kvpool": {"from": "prefill-0", "id": [], "tokens": -1}},
]  # fmt: skip


def test_what_is_wrong_is_ignored(engines):
    _, decode = engines
    right = decode.ask(prompt(100, seed=8))
    for params in WRONG:
        assert decode("reset", connector=True)["ok"]
        answer = decode.ask(prompt(100, seed=8), params=params)
        assert (answer["cached"], answer["params"]) == (0, None)
        assert same(answer, right)


def test_a_prompt_that_does_not_come_is_computed_and_others_do_not_wait(engines):
    _, decode = engines
    right = [decode.ask(prompt(100, seed=seed)) for seed in (9, 10)]
    assert decode("reset", connector=True)["ok"]
    decode("wait_at_most", 0.5)
    missing = {"kvpool": {"from": "prefill-0", "id": "never", "tokens": 96}}
    before = decode("metrics")
    asked = [{"tokens": prompt(100, seed=9), "params": missing}, {"tokens": prompt(100, seed=10)}]
    answers = decode("generate", asked)["outputs"]
    decode("wait_at_most", 30)
    assert all(close(*pair) for pair in zip(answers, right, strict=True))
    after = decode("metrics")
    for name in ("prompt_waits", "expired_waits"):
        assert after[f"vllm:kvpool_{name}"] - before[f"vllm:kvpool_{name}"] == 1


def test_when_the_sender_is_killed_during_a_send_the_prompt_is_computed(engines):
    """And the engine that is left goes on when it names the lost one itself. The last test of these engines."""
    prefill, decode = engines
    prefill.inside("send_by_layer", False)
    cold = decode.ask(prompt(200, seed=11))
    assert decode("reset", connector=True)["ok"]
    prefill.inside("stall_sends")
    told = sent(prefill, prompt(200, seed=11))
    os.killpg(prefill.process.pid, signal.SIGKILL)
    began = time.monotonic()
    answer = decode.ask(prompt(200, seed=11), params=told)
    assert time.monotonic() - began < 25  # not the deadline
    assert answer["cached"] == 0
    assert close(answer, cold)
    assert decode("reset", connector=True)["ok"]
    for params in ({"kvpool": {"to": "prefill-0"}}, told):
        again = decode.ask(prompt(200, seed=11), params=params)
        assert (again["params"], again["reason"]) == (None, "length")
        assert close(again, cold)
    decode.inside("await_saves")  # its pool is sound
