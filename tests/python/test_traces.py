"""A recorded hour of a real service, replayed through the prompt index: the hits agree with published counts.

The trace gives each prompt as ids of 512-token blocks; an id stands for a block's content and everything before it.
Here a block of the index is one token, the id itself: two prompts share a prefix exactly as far as their ids agree, so
hits in blocks are those of 512-token blocks, at a 512th of the work. The blocks of 16 tokens that an engine has are
replayed below for a part of the trace, each id expanded to its own tokens.
"""

from __future__ import annotations

import json
import lzma
from collections import OrderedDict

import numpy as np
import pytest
from kit import LONG

import kvpool

TRACE_BLOCK = 512
REQUESTED_TOKENS = 144_793_823
HIT_TOKENS = 54_098_411  # without a limit


@pytest.fixture(scope="module")
def conversation(traces):
    """(input length, block ids) of each request."""
    with lzma.open(traces / "mooncake_conversation_trace.jsonl.xz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 12_031
    return [(row["input_length"], np.array(row["hash_ids"], np.int32)) for row in rows]


def replay(requests, capacity, policy="lru"):
    """Hit tokens. As traces/README.md has it: look up, insert, then drop what is beyond the capacity."""
    index = kvpool.PromptIndex(block_tokens=1, policy=policy)
    hits = 0
    for length, ids in requests:
        with index.match(ids) as hit, index.insert(ids, ids.astype(np.uint64)):
            hits += min(TRACE_BLOCK * hit.tokens, length)
        if len(index) > capacity:
            index.evict(len(index) - capacity)
    index.audit()
    return hits


def test_without_a_limit_every_repeated_token_is_a_hit(conversation):
    assert sum(length for length, _ in conversation) == REQUESTED_TOKENS
    assert replay(conversation, capacity=1 << 60) == HIT_TOKENS


@pytest.mark.parametrize(("capacity", "percent"), [(1_000, 4.5), (10_000, 21.6), (30_000, 33.2), (50_000, 36.2)])
def test_lru_of_a_limited_size_has_the_expected_hits(conversation, capacity, percent):
    hits = replay(conversation, capacity)
    assert 100 * hits / REQUESTED_TOKENS == pytest.approx(percent, abs=0.3)


def test_lru_is_exactly_lru(conversation):
    """Beside the plainest LRU there is: blocks in an ordered dict, each prompt touched from its end."""
    capacity, hits = 3_000, 0
    order: OrderedDict[int, None] = OrderedDict()
    for length, ids in conversation:
        found = 0
        for block in ids.tolist():
            if block not in order:
                break
            found += 1
        hits += min(TRACE_BLOCK * found, length)
        for block in reversed(ids.tolist()):
            order[block] = None
            order.move_to_end(block)
        while len(order) > capacity:
            order.popitem(last=False)
    assert replay(conversation, capacity) == hits


@pytest.mark.parametrize("policy", ["lfu", "fifo"])
def test_other_policies_hit_no_more_than_the_unlimited_cache(conversation, policy):
    assert 0 < replay(conversation, 10_000, policy) < HIT_TOKENS


def test_blocks_of_sixteen_tokens_give_the_same_hits(conversation):
    requests = conversation if LONG else conversation[:1_500]
    within = np.arange(TRACE_BLOCK, dtype=np.int32)
    index = kvpool.PromptIndex(block_tokens=16)
    hits = 0
    for length, ids in requests:
        tokens = (ids[:, None] * TRACE_BLOCK + within).reshape(-1)
        with index.match(tokens) as hit:
            assert hit.tokens % TRACE_BLOCK == 0
            hits += min(hit.tokens, length)
        index.insert(tokens, np.zeros(len(tokens) // 16, np.uint64)).close()
    assert hits == replay(requests, capacity=1 << 60)
