"""Many requests at once in a vLLM with few blocks, loads beside steps. One engine for all of the file."""

from __future__ import annotations

import pytest
from vllm_process import prompt, serving

BLOCKS = 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    how = {"dtype": "float32", "max_model_len": 320, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    with serving(
        tmp_path_factory.mktemp("vllm"),
        extra={"dram_blocks": 300, "async_load": True},
        num_gpu_blocks_override=BLOCKS,
        **how,
    ) as engine:
        yield engine


def crowd() -> list[dict]:
    """32 prompts in chunks of a step, that share beginnings of 64 tokens, with answers; some of them salted."""
    return [
        {
            "tokens": prompt(64, seed=number % 3) + prompt(40 + 7 * (number % 9), seed=number),
            "out": 40,
            "salt": "tenant" if number % 4 == 3 else None,
        }
        for number in range(32)
    ]


@pytest.fixture(scope="module")
def alone(engine):
    """What each of the crowd answers when nothing else runs and nothing is cached."""
    answers = []
    for asked in crowd():
        answers.append(engine("generate", [asked])["outputs"][0])
        engine.inside("await_saves")
        assert engine("reset", connector=True)["ok"]
    assert all(not answer["cached"] for answer in answers)
    return answers


def close(one: dict, other: dict) -> bool:
    """Other requests in the same step may change the last bits, not the tokens."""
    return one["tokens"] == other["tokens"] and one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)


def test_a_crowd_is_answered_as_each_alone_with_preemption(engine, alone):
    before = engine("preemptions")["count"]
    cold = engine("generate", crowd())["outputs"]
    assert engine("preemptions")["count"] > before
    assert all(close(*pair) for pair in zip(cold, alone, strict=True))
    for _ in range(2):
        engine.forget()
        loaded = engine("generate", crowd())["outputs"]
        assert all(close(*pair) for pair in zip(loaded, alone, strict=True))
        assert sum(answer["cached"] for answer in loaded) > 32 * 64
    metrics = engine("metrics")
    assert metrics["vllm:kvpool_loads"] > 0
    assert metrics["vllm:kvpool_failed_loads"] == 0


def test_a_crowd_whose_loads_fail_is_answered_alike(engine, alone):
    engine.forget()
    failures = ["now", "later"] * 8
    engine.inside("fail_loads", failures)
    answers = engine("generate", crowd())["outputs"]
    assert all(close(*pair) for pair in zip(answers, alone, strict=True))
    left = engine.inside("failures_left")
    assert left < len(failures)
    assert engine("metrics")["vllm:kvpool_failed_loads"] == len(failures) - left
    engine.inside("fail_loads", [])
    engine.forget()
    again = engine("generate", crowd())["outputs"]
    assert all(close(*pair) for pair in zip(again, alone, strict=True))


def test_a_request_may_be_aborted_while_it_loads(engine, alone):
    engine.forget()
    engine.inside("fail_loads", ["later"])  # it takes some looks to end
    engine("abort_while_loading", crowd()[0]["tokens"])
    assert engine.inside("failures_left") == 0
    engine.forget()  # all of vLLM's blocks are free
    assert close(engine("generate", [crowd()[0]])["outputs"][0], alone[0])


def test_a_reset_while_loads_are_under_way_drops_all(engine):
    engine.forget()
    assert engine("reset", connector=True)["ok"]
    assert engine.inside("await_saves")["cached"] == 0
