"""Two engines that send to each other, fetch, fail to save and are reset, in an order that a seed gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
from attach_kit import eventually
from engines.vllm_kit import Request, prompt
from engines.vllm_workers_kit import OneWorker, WorkersEngine
from kit import LONG

NAMES = ("one", "two")


@pytest.mark.parametrize("seed", range(400 if LONG else 5))
def test_every_request_has_the_right_content_and_nothing_is_left(url, seed):
    """Each engine checks the content of all that it has loaded or computed."""
    rng = random.Random(seed)
    kinds = [rng.choice([WorkersEngine, OneWorker]) for _ in NAMES]
    pair = [
        kind(url, name, blocks=64, dram_blocks=rng.choice([10, 24, 64]))
        for kind, name in zip(kinds, NAMES, strict=True)
    ]
    eventually(lambda: pair[0].is_member("two") and pair[1].is_member("one"))
    for number in range(40):
        here = rng.randrange(2)
        act(rng, str(number), pair[here], pair[1 - here], NAMES[here], NAMES[1 - here])
    for engine in pair:
        engine.advance()
        left_nothing(engine)
        engine.close()


def act(rng: random.Random, number: str, here: Any, there: Any, name: str, other: str) -> None:
    tokens = prompt(rng.choice([0, 8, 12]), rng.randrange(2)) + prompt(rng.randrange(1, 40), rng.randrange(6))
    if isinstance(here, WorkersEngine) and rng.random() < 0.2:
        here.pool.workers[1].fail_saves = [rng.choice(["now", "later"])]
    what = rng.random()
    if what < 0.6:
        asked = Request("a" + number, tokens, kv_transfer_params={"kvpool": {"to": other}})
        there.advance()  # a send waits for the receiver's saves of the same prompt
        told = here.prefill(asked, chunk=rng.choice([4, 7, 100]))
        here.advance()  # a failure is told, too
        there.decode(Request("b" + number, tokens, kv_transfer_params=told))
    elif what < 0.9:
        there.decode(Request("b" + number, tokens, kv_transfer_params={"kvpool": {"pull": name}}))
    else:
        there.planner.reset()


def left_nothing(engine: Any) -> None:
    assert not engine.planner._pulls._pulls
    assert not engine.planner._tracked
    assert not engine.planner._expected._waits
    if isinstance(engine, WorkersEngine):
        assert not engine.index._loads
        assert not engine.index._saves
        assert not engine.index._hits
        assert not engine.index._sends._failed
    engine.pool.audit()
