"""The cache's events under vLLM's hashes, from a pool that saves and evicts."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from engines.vllm_kit import BLOCK, LAYOUT

import kvpool
from kvpool.engines.vllm import kv_events
from kvpool.engines.vllm.kv_events import Described, KvEvents, Removed, Stored


def hash_block(parent, tokens):
    return hashlib.sha256(repr((parent, list(tokens))).encode()).digest()


def hashes_of(tokens, seed=b""):
    found = []
    for start in range(0, len(tokens), BLOCK):
        parent = found[-1] if found else (seed or None)
        found.append(hash_block(parent, np.asarray(tokens)[start : start + BLOCK].tolist()))
    return found


@pytest.fixture
def pool():
    with kvpool.Pool(LAYOUT, dram_blocks=6, huge_pages="never") as pool:
        yield pool


@pytest.fixture
def events(pool):
    return KvEvents(lambda cached: pool.subscribe(include_cached=cached), BLOCK, hash_block)


def cache(pool, tokens, namespace=""):
    blocks = pool.alloc(len(tokens) // BLOCK, medium=kvpool.DRAM)
    with pool.insert(tokens, blocks, namespace, free_duplicates=True) as held:
        return held.addrs


def prompt(blocks, seed=0):
    return np.arange(blocks * BLOCK, dtype=np.int32) + 1000 * seed


def test_a_saved_prompt_and_what_is_added_to_it(pool, events):
    tokens = prompt(3)
    hashes = hashes_of(tokens)
    events.saving("", tokens[: 2 * BLOCK], Described(hashes[:2]))
    cache(pool, tokens[: 2 * BLOCK])
    assert events.take() == [Stored(hashes[:2], None, tokens[: 2 * BLOCK].tolist(), None, None)]
    events.saving("", tokens, Described(hashes))
    cache(pool, tokens)
    assert events.take() == [Stored(hashes[2:], hashes[1], tokens[2 * BLOCK :].tolist(), None, None)]
    assert events.take() == []
    pool.delete(tokens)
    assert events.take() == [Removed(hashes[2:]), Removed(hashes[:2])], "as the tree has them, the end first"


def test_what_distinguishes_a_prompt_is_told_with_each_block(pool, events):
    tokens = prompt(2)
    salted = hashes_of(tokens, seed=b"salt")
    extra = [("salt", "adapter"), ("adapter",)]
    events.saving("salted", tokens, Described(salted, lambda first, end: extra[first:end], (7, "adapter")))
    cache(pool, tokens, "salted")
    cache(pool, tokens)
    plain = hashes_of(tokens)
    assert events.take() == [
        Stored(salted, None, tokens.tolist(), extra, (7, "adapter")),
        Stored(plain, None, tokens.tolist(), None, None),
    ]
    pool.delete(tokens, "salted")
    assert events.take() == [Removed(salted)], "the other one is still there"


def test_a_prompt_that_no_request_here_has_is_hashed_unless_it_is_salted(pool, events):
    tokens = prompt(2)
    cache(pool, tokens)
    cache(pool, tokens, "salted elsewhere")
    assert events.take() == [Stored(hashes_of(tokens), None, tokens.tolist(), None, None)]
    pool.delete(tokens, "salted elsewhere")
    assert events.take() == []


def test_evictions_are_told_by_the_hashes_of_what_has_gone(pool, events):
    for seed in range(3):  # of three blocks each: the first one makes room for the last
        cache(pool, prompt(3, seed))
    told = events.take()
    stored = {each for event in told if isinstance(event, Stored) for each in event.hashes}
    removed = {each for event in told if isinstance(event, Removed) for each in event.hashes}
    assert stored == {each for seed in range(3) for each in hashes_of(prompt(3, seed))}
    assert removed <= set(hashes_of(prompt(3, 0)))
    assert len(removed) == 3
    assert len(events._hashes) == 6


def test_after_a_loss_the_cache_is_looked_at_anew(pool):
    subscribed: list[bool] = []

    def subscribe(cached):
        subscribed.append(cached)
        return pool.subscribe(capacity_tokens=(1 << 20) if cached else 3 * BLOCK, include_cached=cached)

    events = KvEvents(subscribe, BLOCK, hash_block)
    first, second, third = (hashes_of(prompt(blocks, seed)) for seed, blocks in ((0, 2), (1, 1), (2, 2)))
    cache(pool, prompt(2))
    cache(pool, prompt(1, 1))
    assert [each.hashes for each in events.take()] == [first, second]
    pool.delete(prompt(2))
    cache(pool, prompt(2, 2))  # drops the event of the removal
    told = events.take()
    assert subscribed == [False, True]
    assert told == [Removed(first), Stored(third, None, prompt(2, 2).tolist(), None, None)], "the second one stays"
    assert sorted(events._hashes.values()) == sorted(second + third)
    pool.delete(prompt(1, 1))
    assert events.take() == [Removed(second)]


def test_a_hash_is_there_until_its_last_block_has_gone(pool, events):
    """Two prompts with the same text and other images after it: other namespaces here, one hash in vLLM."""
    tokens = prompt(1)
    hashes = hashes_of(tokens)
    for namespace in ("one image", "another"):
        events.saving(namespace, tokens, Described(hashes))
        cache(pool, tokens, namespace)
    assert events.take() == [Stored(hashes, None, tokens.tolist(), None, None)]
    pool.delete(tokens, "one image")
    assert events.take() == []
    pool.delete(tokens, "another")
    assert events.take() == [Removed(hashes)]


def test_when_the_pool_is_lost_all_is_gone_and_nothing_raises(events, pool):
    cache(pool, prompt(2))
    events.take()
    pool.close()
    assert events.take() == [Removed(hashes_of(prompt(2)))]
    assert events.take() == []


def test_saves_that_never_end_take_bounded_memory(events, monkeypatch):
    monkeypatch.setattr(kv_events, "_EXPECTED_MAX", 4)
    for seed in range(10):
        events.saving("", prompt(1, seed), Described(hashes_of(prompt(1, seed))))
    assert len(events._expected) == 4
