"""A model with windows in a cluster: two engines with one worker, and one with two. Three starts for all of it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from vllm_process import BLOCK, prompt, same, serving

import kvpool

# Groups of two, two and one layers; the first two have windows.
SHAPE = {"layers": 5, "window": 64, "windowed": [0, 1, 3]}
HOW = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 128, "shape": SHAPE}
LONG = 400  # tokens, of which 384 are sent
PAIRS = {
    "one to one": ("prefill-0", "decode-0"),
    "two to one": ("workers", "decode-0"),
    "one to two": ("prefill-0", "workers"),
}


@pytest.fixture(scope="module")
def url():
    name = f"local://vllm-windows-{os.getpid()}"
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
    extra = {"dram_blocks": 200, "cluster": url, "name": name, "transfer_timeout_s": 60}
    return serving(folder, extra=extra, **HOW, **how)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, url):
    folders = [tmp_path_factory.mktemp(name) for name in ("prefill", "decode", "workers")]
    with (
        started(folders[0], url, "prefill-0", own_process=True) as prefill,
        started(folders[1], url, "decode-0") as decode,
        started(folders[2], url, "workers", own_process=True, executor="mp", tensor_parallel_size=2) as workers,
    ):
        made = {"prefill-0": prefill, "decode-0": decode, "workers": workers}
        for name, engine in made.items():
            engine.named = name
        yield made


def forget_all(engine):
    until = time.monotonic() + 30
    while not engine("reset", connector=True)["ok"]:  # while a prompt arrives, what it adds to is in use
        assert time.monotonic() < until


@pytest.fixture(params=PAIRS.values(), ids=PAIRS)
def pair(request, engines):
    chosen = [engines[name] for name in request.param]
    for engine in chosen:
        forget_all(engine)
    return chosen


@pytest.fixture
def one_to_one(engines):
    chosen = [engines[name] for name in PAIRS["one to one"]]
    for engine in chosen:
        forget_all(engine)
    return chosen


def sent(prefill, decode, tokens):
    return prefill.ask(tokens, out=1, params={"kvpool": {"to": decode.named}})["params"]


def close(one: dict, other: dict) -> bool:
    """Two workers add up in another order than one does; and another number of tokens computed together."""
    return one["tokens"] == other["tokens"] and one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def counted(engine, name):
    return counted_all(engine).get(name, 0)


def counted_all(engine):
    begin = "vllm:kvpool_"
    return {name.removeprefix(begin): value for name, value in engine("metrics").items() if name.startswith(begin)}


def test_all_pools_tell_their_groups(engines):
    """Schedulers in other processes tell theirs when peers connect, in the tests below."""
    told = [engines["decode-0"]("fingerprint")["told"]]
    told += [each for engine in engines.values() for each in engine.in_workers("fingerprint")]
    assert len(told) == 5
    assert {re.search(r"\[groups [^]]*\]", each)[0] for each in told} == {re.search(r"\[groups .*?\]", told[0])[0]}
    assert re.search(r"\[groups (64|all),(64|all),(64|all) of [0-9a-f]{12}\]", told[0])


def test_the_answer_is_that_of_vllms_own_cache(pair):
    prefill, decode = pair
    own = decode.ask(prompt(LONG))
    own = decode.ask(prompt(LONG))
    assert own["cached"] == 384
    forget_all(decode)
    told = sent(prefill, decode, prompt(LONG))
    assert told["kvpool"]["tokens"] == 384
    loaded = decode.ask(prompt(LONG), params=told)
    assert loaded["cached"] == 384
    assert close(loaded, own)
    if prefill.workers == decode.workers:
        assert same(loaded, own)


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_of_groups_with_windows_only_the_windows_come(one_to_one, by_layer):
    """12 blocks of the group without one; and of each other the two that the next token needs."""
    prefill, decode = one_to_one
    sent(prefill, decode, prompt(40, seed=50))  # connects
    prefill.inside("send_by_layer", by_layer)
    before, early = prefill.inside("await_sends"), prefill.inside("layers_sent_early")
    own = decode.ask(prompt(LONG, seed=1))
    own = decode.ask(prompt(LONG, seed=1))
    forget_all(decode)
    told = sent(prefill, decode, prompt(LONG, seed=1))
    blocks = prefill.inside("await_sends") - before
    assert 12 + 2 + 2 <= blocks <= 12 + 2 + 2 + 8  # a chunk may be sent while the one before it is on its way
    assert (prefill.inside("layers_sent_early") > early) == by_layer
    assert decode.inside("await_saves")["cached"] == 12 + 2 + 2
    loaded = decode.ask(prompt(LONG, seed=1), params=told)
    prefill.inside("send_by_layer", False)
    assert loaded["cached"] == 384
    assert same(loaded, own)


def test_the_content_comes_from_the_other_engine(one_to_one):
    """It is changed after it has arrived: the tokens change."""
    prefill, decode = one_to_one
    right = decode.ask(prompt(150, seed=2), out=16)
    forget_all(decode)
    told = sent(prefill, decode, prompt(150, seed=2))
    prefill.inside("await_sends")
    decode.inside("poison")
    wrong = decode.ask(prompt(150, seed=2), out=16, params=told)
    assert wrong["cached"] == 128
    assert wrong["tokens"] != right["tokens"]


def test_a_crowd_is_answered_as_each_alone(one_to_one):
    prefill, decode = one_to_one
    crowd = [prompt(64, seed=number % 3) + prompt(40 + 30 * number, seed=number) for number in range(8)]
    to = {"kvpool": {"to": decode.named}}
    alone = [decode.ask(tokens) for tokens in crowd]
    forget_all(decode)
    answers = prefill("generate", [{"tokens": tokens, "out": 1, "params": to} for tokens in crowd])["outputs"]
    asked = [{"tokens": tokens, "params": said["params"]} for tokens, said in zip(crowd, answers, strict=True)]
    before = counted(decode, "expired_waits")
    loaded = decode("generate", asked)["outputs"]
    assert [answer["cached"] for answer in loaded] == [(len(tokens) - 1) // BLOCK * BLOCK for tokens in crowd]
    assert all(close(*both) for both in zip(loaded, alone, strict=True))
    assert counted(decode, "expired_waits") == before


def test_a_prompt_is_fetched_from_the_engine_that_has_it(pair):
    owner, engine = pair
    owner.ask(prompt(LONG, seed=3))
    owner.forget()  # all is saved
    own = engine.ask(prompt(LONG, seed=3))
    own = engine.ask(prompt(LONG, seed=3))
    forget_all(engine)
    before = counted(engine, "pulled_tokens")
    fetched = engine.ask(prompt(LONG, seed=3), params={"kvpool": {"pull": owner.named}})
    assert fetched["cached"] == 384, [counted_all(one) for one in (owner, engine)]
    assert close(fetched, own)
    if owner.workers == engine.workers:
        assert same(fetched, own)
    assert counted(engine, "pulled_tokens") - before == (12 + 2 + 2) * BLOCK


def test_what_is_fetched_comes_from_the_owner(one_to_one):
    owner, engine = one_to_one
    right = owner.ask(prompt(200, seed=4), out=16)
    owner.forget()
    owner.inside("poison")
    wrong = engine.ask(prompt(200, seed=4), out=16, params={"kvpool": {"pull": owner.named}})
    forget_all(owner)
    assert wrong["cached"] == 192
    assert wrong["tokens"] != right["tokens"]


def test_when_the_sender_is_killed_during_a_send_the_prompt_is_computed(one_to_one):
    """The last test of these engines."""
    prefill, decode = one_to_one
    cold = decode.ask(prompt(200, seed=5))
    forget_all(decode)
    prefill.inside("stall_sends")
    told = sent(prefill, decode, prompt(200, seed=5))
    assert told["kvpool"]["tokens"] == 192
    os.killpg(prefill.process.pid, signal.SIGKILL)
    began = time.monotonic()
    answer = decode.ask(prompt(200, seed=5), params=told)
    assert time.monotonic() - began < 25  # not the deadline
    assert answer["cached"] == 0
    assert close(answer, cold)
    forget_all(decode)
    for params in ({"kvpool": {"to": "prefill-0"}}, {"kvpool": {"pull": "prefill-0"}}, told):
        again = decode.ask(prompt(200, seed=5), params=params)
        assert (again["params"], again["reason"]) == (None, "length")
        assert close(again, cold)
    decode.inside("await_saves")  # its pool is sound
