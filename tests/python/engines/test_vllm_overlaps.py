"""Requests that overlap at two engines which send to each other and fetch, in an order that a seed gives."""

from __future__ import annotations

import random
import time

import pytest
from attach_kit import eventually
from engines.test_vllm_any_order import NAMES, left_nothing
from engines.vllm_overlap_kit import Overlapping
from engines.vllm_workers_kit import OneWorker, WorkersEngine
from kit import LONG


@pytest.mark.parametrize("seed", range(400 if LONG else 4))
def test_every_request_has_the_right_content_and_nothing_is_left(url, seed):
    """Each engine checks the content of all that it has loaded or computed."""
    rng = random.Random(seed)
    pair = []
    for name in NAMES:
        kind = rng.choice([WorkersEngine, WorkersEngine, OneWorker])
        engine = kind(url, name, blocks=rng.choice([48, 96]), dram_blocks=rng.choice([8, 16, 40, 96]), timeout_s=3.0)
        engine.planner._async_load = rng.random() < 0.5
        if kind is WorkersEngine:
            engine.late = rng.choice([0, 0, 1, 2])
        pair.append(engine)
    eventually(lambda: pair[0].is_member("two") and pair[1].is_member("one"))
    both = [Overlapping(engine, peer, rng) for engine, peer in zip(pair, reversed(NAMES), strict=True)]
    both[0].other, both[1].other = both[1], both[0]
    for _ in range(200):
        one = rng.choice(both)
        if rng.random() < 0.5:
            one.ask()
        one.tick()
    until = time.monotonic() + 60
    while any(one.busy for one in both):
        assert time.monotonic() < until
        for one in both:
            one.drain()
    for engine in pair:
        engine.advance()
        for _ in range(4):  # reports may come late
            engine.step({})
    for engine in pair:
        left_nothing(engine)
        engine.close()
