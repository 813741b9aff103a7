"""What the router knows of instances by their KV events is bounded, and forgotten when their publisher is gone."""

from __future__ import annotations

import functools
import logging

from kit import BLOCK
from router.publishing import Publishing
from router.router_kit import eventually, fakes, logged, routing

import kvpool.observe.events
from kvpool.control.router import EventsSpec

BY_EVENTS = {"block_tokens": BLOCK, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0}


def test_blocks_of_an_instance_are_bounded_and_the_dropped_ones_are_counted():
    with logged() as records, fakes("a") as one, Publishing() as publisher:
        events = {"a": EventsSpec(publisher.endpoint)}
        with routing(*one, events=events, events_blocks_max=16, **BY_EVENTS) as running:
            publisher.wait_until_heard()
            publisher.store([7] * 12 * BLOCK)
            publisher.store([8] * 12 * BLOCK)
            eventually(lambda: running.states()["a"]["events"]["dropped"] == 8)
            assert running.states()["a"]["cached_blocks"] == 16
            eventually(lambda: running.metric("events_blocks_dropped_total", engine="a") == 8)
            running.complete([8] * 12 * BLOCK)
            assert running.metric("prompt_tokens_cached_total") == 12 * BLOCK  # the newer one is there
        told = [each for each in records if each.getMessage() == "events ignored" and each.levelno == logging.WARNING]
        assert len(told) == 1


def test_a_publisher_that_vanishes_is_forgotten_though_its_instance_is_well(monkeypatch):
    quick = functools.partial(kvpool.observe.events.EventSubscriber, probe=0.1, timeout=0.2)
    monkeypatch.setattr(kvpool.observe.events, "EventSubscriber", quick)
    with fakes("a", "b") as two, Publishing() as publisher:
        with routing(*two, events={"b": EventsSpec(publisher.endpoint)}, **BY_EVENTS) as running:
            publisher.wait_until_heard()
            prompt = [7] * 12 * BLOCK
            publisher.store(prompt)
            eventually(lambda: running.states()["b"]["events"]["synced"])
            assert running.where(prompt) == "b"
            publisher.__exit__()
            eventually(lambda: running.states()["b"]["cached_blocks"] == 0)
            assert running.state("b") == "healthy"
            assert running.metric("events_synced", engine="b") == 0
            eventually(lambda: running.metric("events_forgotten_total", engine="b") == 1)
            before = running.metric("prompt_tokens_cached_total")
            running.complete(prompt)
            assert running.metric("prompt_tokens_cached_total") == before
