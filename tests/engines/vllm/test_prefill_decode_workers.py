"""An engine with two workers and one with one: each computes prompts for the other. Two starts for all of the file."""

from __future__ import annotations

import os
import signal
import time

import pytest
from vllm_process import BLOCK, prompt, same, serving

import kvpool

HOW = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "role": "kv_both"}


@pytest.fixture(scope="module")
def url():
    name = f"local://vllm-workers-{os.getpid()}"
    yield name
    until = time.monotonic() + 30
    while True:
        try:
            kvpool.Cluster.forget(name)
            break
        except kvpool.StateError:  # a process that was just killed may still be there
            assert time.monotonic() < until
            time.sleep(0.01)


def started(folder, url, name, **how):
    extra = {"dram_gib": 0.05, "cluster": url, "name": name, "transfer_timeout_s": 30}
    return serving(folder, extra=extra, **HOW, **how)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, url):
    folders = [tmp_path_factory.mktemp(name) for name in ("two", "one")]
    with started(folders[0], url, "two", executor="mp", tensor_parallel_size=2, own_process=True) as two:
        with started(folders[1], url, "one") as one:
            two.named, one.named = "two", "one"
            yield two, one


@pytest.fixture(params=["one to two", "two to one"])  # in this order: nobody has asked the engine with workers before
def pair(request, engines):
    prefill, decode = engines if request.param == "two to one" else reversed(engines)
    forget_all(prefill)
    forget_all(decode)
    return prefill, decode


def forget_all(engine):
    until = time.monotonic() + 30
    while not engine("reset", connector=True)["ok"]:  # while a prompt arrives, what it adds to is in use
        assert time.monotonic() < until


def sent(prefill, decode, tokens, **how):
    return prefill.ask(tokens, out=1, params={"kvpool": {"to": decode.named}}, **how)["params"]


def close(one: dict, other: dict) -> bool:
    """Two workers add up in another order than one does."""
    return one["tokens"] == other["tokens"] and one["logprobs"] == pytest.approx(other["logprobs"], abs=2e-2)


def test_the_answer_is_that_without_another_engine(pair):
    prefill, decode = pair
    told = sent(prefill, decode, prompt(100))
    assert told["kvpool"]["tokens"] == 96
    loaded = decode.ask(prompt(100), params=told, out=16)
    assert loaded["cached"] == 96
    forget_all(decode)
    cold = decode.ask(prompt(100), out=16)
    assert cold["cached"] == 0
    assert close(loaded, cold)


def test_a_crowd_with_long_prompts_is_answered_as_each_alone(pair):
    prefill, decode = pair
    crowd = [prompt(64, seed=number % 2) + prompt(40 + 60 * number, seed=number) for number in range(5)]
    to = {"kvpool": {"to": decode.named}}
    alone = [decode.ask(tokens) for tokens in crowd]
    forget_all(decode)
    before = decode("metrics")
    answers = prefill("generate", [{"tokens": tokens, "out": 1, "params": to} for tokens in crowd])["outputs"]
    asked = [{"tokens": tokens, "params": said["params"]} for tokens, said in zip(crowd, answers, strict=True)]
    loaded = decode("generate", asked)["outputs"]
    assert [answer["cached"] for answer in loaded] == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in crowd]
    assert all(close(*pair) for pair in zip(loaded, alone, strict=True))
    after = decode("metrics")
    assert after["vllm:kvpool_prompt_waits"] - before.get("vllm:kvpool_prompt_waits", 0) == len(crowd)
    assert after.get("vllm:kvpool_expired_waits", 0) == before.get("vllm:kvpool_expired_waits", 0)


def test_the_content_comes_from_the_other_engine(engines):
    """It is changed at the last worker after it has arrived: the tokens change."""
    two, one = engines
    right = two.ask(prompt(120, seed=20), out=16)
    forget_all(two)
    told = sent(one, two, prompt(120, seed=20))
    one.inside("await_sends")
    two.inside("poison_last")
    wrong = two.ask(prompt(120, seed=20), out=16, params=told)
    assert wrong["cached"] == 96
    assert wrong["tokens"] != right["tokens"]
    forget_all(two)
    assert same(two.ask(prompt(120, seed=20), out=16), right)


def test_a_prompt_is_fetched_from_the_engine_that_has_it(pair):
    owner, engine = pair
    owner.ask(prompt(100, seed=30))
    owner.forget()  # all is saved
    cold = engine.ask(prompt(150, seed=30))
    forget_all(engine)
    pull = {"kvpool": {"pull": owner.named}}
    fetched = engine.ask(prompt(150, seed=30), params=pull)
    assert fetched["cached"] == 96
    assert close(fetched, cold)
    assert engine("metrics")["vllm:kvpool_pulled_tokens"] == 96


def test_when_a_worker_of_the_sender_is_killed_the_prompt_is_computed(engines):
    """What it has not saved was not sent. The last test of these engines."""
    two, one = engines
    cold = one.ask(prompt(200, seed=11))
    forget_all(one)
    two.inside("hold_saves")
    told = sent(two, one, prompt(200, seed=11))
    assert told["kvpool"]["tokens"] == 192
    os.kill(two.inside("process_id")[1], signal.SIGKILL)
    began = time.monotonic()
    answer = one.ask(prompt(200, seed=11), params=told)
    assert time.monotonic() - began < 25  # not the deadline
    assert answer["cached"] == 0
    assert close(answer, cold)
    assert "computes its prompt: two, which announced it, " in one.log()  # kvpool's warnings are in vLLM's log
    forget_all(one)
    for params in ({"kvpool": {"to": "two"}}, told):
        again = one.ask(prompt(200, seed=11), params=params)
        assert (again["params"], again["reason"]) == (None, "length")
        assert close(again, cold)
    one.inside("await_saves")  # its pool is sound
