"""kvpool.PromptIndex: the index alone, with opaque values."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from kit import BLOCK, prompt

import kvpool


@pytest.fixture
def index():
    return kvpool.PromptIndex(block_tokens=BLOCK)


def put(index, tokens, values, namespace=""):
    with index.insert(tokens, values, namespace=namespace) as held:
        return held


def test_values_come_back_in_the_order_of_the_prompt(index):
    held = put(index, prompt(3), [7, 2**64 - 1, 0])
    assert (held.tokens, held.inserted, len(held.duplicates)) == (3 * BLOCK, 3, 0)
    with index.match(prompt(5)) as hit:
        assert hit.tokens == 3 * BLOCK
        assert hit.addrs.tolist() == [7, 2**64 - 1, 0]
    assert len(index) == 3
    assert index.block_tokens == BLOCK


def test_the_same_value_may_stand_anywhere(index):
    put(index, prompt(2, 1), [5, 5])
    put(index, prompt(2, 2), [5, 5])
    assert len(index) == 4


def test_values_that_are_cached_stay(index):
    put(index, prompt(2), [1, 2])
    held = put(index, prompt(3), [1, 20, 30])
    assert held.addrs.tolist() == [1, 2, 30]
    assert (held.inserted, held.duplicates.tolist()) == (1, [20])


def test_peek_neither_pins_nor_counts_as_a_use(index):
    for name in range(3):
        put(index, prompt(1, name), [name])
    assert index.peek(prompt(2, 0)) == BLOCK
    assert index.peek(prompt(1, 9)) == 0
    assert index.peek(prompt(1), namespace="n") == 0
    assert index.stats()["evictable"] == 3
    assert index.evict(1).tolist() == [0]


def test_evict_returns_the_evicted_values(index):
    put(index, prompt(3, 1), [10, 11, 12])
    put(index, prompt(2, 2), [20, 21])
    with index.match(prompt(1, 1)):
        assert index.evict(1).tolist() == [12]
        assert sorted(index.evict(99).tolist()) == [11, 20, 21]
        assert len(index.evict(99)) == 0
    assert index.evict(99).tolist() == [10]
    assert len(index) == 0


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", [1, 2, 0]), ("fifo", [0, 1, 2]), ("lfu", [2, 1, 0])], ids=["lru", "fifo", "lfu"]
)
def test_each_policy_has_its_order(policy, order):
    index = kvpool.PromptIndex(BLOCK, policy)
    for name in range(3):
        put(index, prompt(1, name), [name])
    for name in (1, 1, 2, 0, 0, 0):
        index.match(prompt(1, name)).close()
    assert [int(index.evict(1)[0]) for _ in range(3)] == order


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_the_order_of_eviction_agrees_with_a_naive_model(policy):
    """Blocks one by one, as each policy's definition says, beside the index; all uses are of whole prompts."""
    random = np.random.default_rng(11)
    index = kvpool.PromptIndex(1, policy)
    used: dict[tuple[int, ...], tuple[int, ...]] = {}  # prefix -> the key that it is evicted by, the smallest first
    hits: dict[tuple[int, ...], int] = {}
    value_of: dict[tuple[int, ...], int] = {}
    clock = 0
    for step in range(4000):
        tokens = tuple(random.integers(0, 3, random.integers(1, 6)).tolist())
        prefixes = [tokens[: end + 1] for end in range(len(tokens))]
        if random.random() < 0.5:
            index.insert(list(tokens), [step * 10 + at for at in range(len(tokens))]).close()
            touched = prefixes
            for at, prefix in enumerate(prefixes):
                if prefix not in used:
                    hits[prefix] = 0
                    value_of[prefix] = step * 10 + at
        else:
            with index.match(list(tokens)) as hit:
                touched = [prefix for prefix in prefixes if prefix in used]
                assert hit.addrs.tolist() == [value_of[prefix] for prefix in touched]
            for prefix in touched:
                hits[prefix] += 1
            if policy == "fifo":
                touched = []
        for prefix in reversed(touched):  # the end of a prompt is older than its beginning
            clock += 1
            used[prefix] = (hits[prefix] if policy == "lfu" else 0, clock)
        if random.random() < 0.3:
            count = int(random.integers(1, 4))
            coldest = sorted(used, key=lambda prefix: used[prefix])[:count]
            assert sorted(index.evict(count).tolist()) == sorted(value_of[prefix] for prefix in coldest), step
            for prefix in coldest:
                del used[prefix]
        assert len(index) == len(used)
    index.audit()


def test_pins_outlive_every_other_reference():
    index = kvpool.PromptIndex(BLOCK)
    put(index, prompt(2), [1, 2])
    hit = index.match(prompt(2))
    stream = index.subscribe()
    del index
    gc.collect()
    assert hit.addrs.tolist() == [1, 2]
    hit.close()
    assert stream.drain() == []


def test_pinned_pages_cannot_be_deleted(index):
    put(index, prompt(3), [1, 2, 3])
    with index.match(prompt(2)), pytest.raises(kvpool.StateError, match="2 of the blocks") as caught:
        index.delete(prompt(3))
    assert caught.value.pinned == 2
    assert sorted(index.delete(prompt(3)).tolist()) == [1, 2, 3]


def test_delete_leaves_shared_pages(index):
    put(index, prompt(3), [1, 2, 3])
    put(index, np.r_[prompt(1), np.full(BLOCK, 60)], [1, 9])
    assert index.delete(prompt(2)).tolist() == []
    assert sorted(index.delete(prompt(2), descendants=True).tolist()) == [2, 3]
    assert index.delete(prompt(1), namespace="x").tolist() == []
    assert len(index) == 2


def test_namespaces_are_separate(index):
    put(index, prompt(1), [1], namespace="a")
    put(index, prompt(1), [2], namespace="b")
    with index.match(prompt(1), namespace="b") as hit:
        assert hit.addrs.tolist() == [2]
    assert index.match(prompt(1)).tokens == 0
    assert index.stats()["namespaces"] == 3


def test_stats_count(index):
    put(index, prompt(4), [1, 2, 3, 4])
    stats = index.stats()
    assert (stats["nodes"], stats["blocks"], stats["evictable"]) == (1, 4, 4)
    with index.match(prompt(3)):
        assert index.stats()["evictable"] == 1
        assert index.stats()["nodes"] == 2
    assert stats["bytes"] >= 4 * (BLOCK * 4 + 8)


def test_memory_is_given_back():
    index = kvpool.PromptIndex(1)
    for round_ in range(3):
        for name in range(200):
            tokens = np.arange(100) + 1000 * name
            put(index, tokens, np.arange(100, dtype=np.uint64))
        full = index.stats()["bytes"]
        assert len(index.evict(10**9)) == 20000
        stats = index.stats()
        assert (stats["nodes"], stats["blocks"]) == (0, 0)
        assert stats["bytes"] < full / 3, round_


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: kvpool.PromptIndex(0), kvpool.ArgumentError, "0"),
        (lambda: kvpool.PromptIndex(-4), kvpool.ArgumentError, "-4"),
        (lambda: kvpool.PromptIndex(65537), kvpool.ArgumentError, "65537"),
        (lambda: kvpool.PromptIndex(1.5), kvpool.ArgumentTypeError, "float"),
        (lambda: kvpool.PromptIndex(policy="random"), kvpool.ArgumentError, "random"),
        (lambda: kvpool.PromptIndex(4).insert([1, 2, 3, 4], [1, 2]), kvpool.ArgumentError, "2 values"),
        (lambda: kvpool.PromptIndex(4).insert([1, 2, 3, 4], []), kvpool.ArgumentError, "0 values"),
        (lambda: kvpool.PromptIndex(4).insert([1, 2, 3], [1]), kvpool.ArgumentError, "3 tokens"),
        (lambda: kvpool.PromptIndex(4).insert([1, 2, 3, 4], [-1]), kvpool.ArgumentError, "-1"),
        (lambda: kvpool.PromptIndex(4).insert([1, 2, 3, 4], [1.5]), kvpool.ArgumentTypeError, "float"),
        (lambda: kvpool.PromptIndex(4).match("text"), kvpool.ArgumentTypeError, "str"),
        (lambda: kvpool.PromptIndex(4).match([1], namespace=b"n"), kvpool.ArgumentTypeError, "bytes"),
        (lambda: kvpool.PromptIndex(4).match([1], namespace="\ud800"), kvpool.ArgumentError, "UTF-8"),
        (lambda: kvpool.PromptIndex(4).evict(-1), kvpool.ArgumentError, "-1"),
        (lambda: kvpool.PromptIndex(4).subscribe(-1), kvpool.ArgumentError, "-1"),
    ],
)
def test_bad_input_is_a_typed_error(call, error, text):
    with pytest.raises(error, match=text):
        call()
