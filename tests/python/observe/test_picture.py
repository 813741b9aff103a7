"""From a pool's events to wire events and back to an index: the index says what the pool says, after every step."""

from __future__ import annotations

import contextlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kit import BLOCK, cached_tokens, prompt, repeats, small_pool, store

import kvpool
from kvpool import DRAM, HBM, InstanceIndex
from kvpool.observe.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    adapter_namespace,
    decode,
    encode,
)
from kvpool.observe.events.picture import Picture
from kvpool.observe.events.translate import Translator
from kvpool.policy.routing import PromptTree


class Target:
    """An index as a picture tells it."""

    def __init__(self, index):
        self.index = index

    def apply(self, instance, event):
        self.index.apply(instance, event, lasting=True)

    def forget(self, instance):
        self.index.remove_instance(instance)


def picture():
    index = InstanceIndex(BLOCK)
    return index, Picture(Target(index), 1, BLOCK)


def told(index, tokens, namespace=""):
    return dict(index.match(tokens, namespace=namespace)).get(1, 0)


class Follow(RuleBasedStateMachine):
    """Prompts share beginnings: three names, each of which branches after two blocks."""

    def __init__(self):
        super().__init__()
        self.pool = small_pool(10, 6)
        self.stream = self.pool.subscribe()
        self.translator = Translator(BLOCK)
        self.index, self.picture = picture()
        self.prompts = {}

    name = st.integers(0, 2)
    turn = st.integers(0, 2)
    blocks = st.integers(1, 5)
    namespace = st.sampled_from(["", "t"])
    medium = st.sampled_from([HBM, DRAM])

    def tokens(self, name, turn, blocks):
        tokens = prompt(blocks, name)
        tokens[2 * BLOCK :] += 100 * turn
        return tokens

    @rule(name=name, turn=turn, blocks=blocks, namespace=namespace, medium=medium)
    def insert(self, name, turn, blocks, namespace, medium):
        tokens = self.prompts[name, turn, blocks, namespace] = self.tokens(name, turn, blocks)
        with contextlib.suppress(kvpool.OutOfBlocks):
            store(self.pool, tokens, medium=medium, namespace=namespace, evict=True)

    @rule(name=name, turn=turn, blocks=blocks, namespace=namespace, below=st.booleans())
    def delete(self, name, turn, blocks, namespace, below):
        self.pool.delete(self.tokens(name, turn, blocks), namespace=namespace, descendants=below)

    @rule(n=st.integers(1, 3), medium=medium)
    def evict(self, n, medium):
        self.pool.evict(n, medium=medium)

    @rule(n=st.integers(1, 3))
    def swap_out(self, n):
        with contextlib.suppress(kvpool.OutOfBlocks):
            self.pool.swap_out(n)

    @rule(name=name, turn=turn, blocks=blocks, namespace=namespace)
    def swap_in(self, name, turn, blocks, namespace):
        with self.pool.match(self.tokens(name, turn, blocks), namespace=namespace) as hit:
            with contextlib.suppress(kvpool.OutOfBlocks):
                self.pool.swap_in(hit.addrs).close()

    @rule()
    def join_again(self):
        """A snapshot in the middle of the events, which are repeated after it."""
        with self.pool.subscribe(include_cached=True) as everything:
            self.picture.apply([AllBlocksCleared()])
            self.take(everything.drain())

    @rule()
    def look(self):
        self.take(self.stream.drain())
        self.index.audit()
        assert self.index.blocks(1) == len(self.picture) == self.pool.stats().index_blocks
        for (*_, namespace), tokens in self.prompts.items():
            assert told(self.index, tokens, namespace) == cached_tokens(self.pool, tokens, namespace)

    def take(self, events):
        for batch in self.translator.batches(events):
            self.picture.apply(decode(encode(EventBatch(0.0, batch))).events)

    def teardown(self):
        try:
            self.look()
        finally:
            self.pool.close()


Follow.TestCase.settings = settings(max_examples=repeats(100, long=2000), stateful_step_count=40, deadline=None)
test_the_index_follows_whatever_happens = Follow.TestCase


class Engine(RuleBasedStateMachine):
    """An engine that drops blocks in any order, the middle of a prompt before its end, and tells them in any order."""

    # A tree of twelve blocks: each but the first two hangs below an earlier one.
    PARENTS = (None, None, 0, 0, 1, 2, 2, 3, 4, 5, 5, 9)
    CONTENT = tuple(range(12))

    def __init__(self):
        super().__init__()
        self.index, self.picture = picture()
        self.held = {}

    def path(self, block):
        return [*(self.path(self.PARENTS[block]) if self.PARENTS[block] is not None else []), block]

    def tokens(self, block):
        return np.repeat(np.array(self.content(block), np.int32) + 50, BLOCK)

    def content(self, block):
        return tuple(self.CONTENT[at] for at in self.path(block))

    block = st.integers(0, len(PARENTS) - 1)
    medium = st.sampled_from(["GPU", "CPU"])

    @rule(block=block, medium=medium)
    def store(self, block, medium):
        event = BlockStored([block], self.PARENTS[block], self.tokens(block)[-BLOCK:], BLOCK, medium)
        self.picture.apply([event])
        self.held.setdefault(block, set()).add(medium)

    @rule(blocks=st.lists(block, max_size=4), medium=st.sampled_from(["GPU", "CPU", None]))
    def remove(self, blocks, medium):
        self.picture.apply([BlockRemoved(blocks, medium)])
        for block in blocks:
            kept = self.held.get(block, set()) - {medium}
            self.held[block] = set() if medium is None else kept

    @rule()
    def clear(self):
        self.picture.apply([AllBlocksCleared()])
        self.held.clear()

    @invariant()
    def the_index_has_every_block_whose_whole_prefix_is_there(self):
        self.index.audit()
        live = {block for block in range(len(self.PARENTS)) if all(self.held.get(at) for at in self.path(block))}
        assert self.index.blocks(1) == len({self.content(block) for block in live})
        assert len(self.picture) == len(live)
        for block in live:
            assert told(self.index, self.tokens(block)) == len(self.path(block)) * BLOCK

    @invariant()
    def what_is_nowhere_is_not_kept(self):
        needed = {at for block, media in self.held.items() if media for at in self.path(block)}
        assert set(self.picture._blocks) <= needed


Engine.TestCase.settings = settings(max_examples=repeats(100, long=2000), stateful_step_count=40, deadline=None)
test_an_engine_may_drop_blocks_in_any_order = Engine.TestCase


class Twins(Engine):
    """One that has several blocks of the same tokens after the same tokens, by other hashes."""

    CONTENT = (0, 0, 2, 2, 2, 5, 5, 5, 5, 9, 10, 11)


Twins.TestCase.settings = Engine.TestCase.settings
test_a_block_is_cached_as_long_as_any_of_its_hashes_is = Twins.TestCase


def block(name, parent=None, **fields):
    return BlockStored([name], parent, np.full(BLOCK, name, np.int32), BLOCK, **fields)


def test_a_salt_is_a_namespace_of_all_that_follows():
    """vLLM puts it beside the first block alone, an adapter beside each."""
    index, held = picture()
    tokens = np.repeat(np.array([1, 2], np.int32), BLOCK)
    held.apply([block(1, extra_keys=[["salt"]]), block(2, 1, extra_keys=[None])])
    assert (told(index, tokens), told(index, tokens, "salt")) == (0, 2 * BLOCK)
    index, held = picture()
    held.apply([block(1, cache_salt="salt"), block(2, 1, cache_salt="salt")])  # SGLang
    assert (told(index, tokens), told(index, tokens, "salt")) == (0, 2 * BLOCK)


def test_an_adapter_is_a_namespace_that_no_salt_and_no_other_adapter_has():
    tokens = np.repeat(np.array([1, 2], np.int32), BLOCK)
    with_keys = [block(1, lora_name="a", extra_keys=[["a"]]), block(2, 1, lora_name="a", extra_keys=[["a"]])]
    before_there_were_keys = [block(1, lora_name="a", lora_id=1), block(2, 1, lora_name="a", lora_id=1)]
    for events in (with_keys, before_there_were_keys):
        index, held = picture()
        held.apply(events)
        assert told(index, tokens, adapter_namespace("a")) == 2 * BLOCK
        assert [told(index, tokens, each) for each in ("", "a", adapter_namespace("b"))] == [0, 0, 0]
    index, held = picture()
    salted = block(1, lora_name="a", extra_keys=[["a", "salt"]]), block(2, 1, lora_name="a", extra_keys=[["a"]])
    held.apply([*salted, block(3, 2)])  # the last is of the model itself, and follows nothing
    assert told(index, tokens, adapter_namespace("a", "salt")) == index.blocks(1) * BLOCK == 2 * BLOCK


def test_blocks_of_one_namespace_share_its_text():
    _, held = picture()
    for name in range(1, 4):  # kvpool names it at each block; a text of each message
        salt = "".join(["a long", " salt"])
        held.apply([block(name, name - 1 if name > 1 else None, extra_keys=[[salt]])])
    assert len({id(each.extra) for each in held._blocks.values()}) == 1
    held.apply([block(9, extra_keys=[["x" * 5000]])])
    assert held._blocks[9].extra is None, "a namespace that is too long is not kept"


def test_blocks_with_equal_tokens_and_other_content_are_no_hits():
    """Pictures in a prompt; a salt and an adapter at once; an adapter that is a number."""
    for fields in (
        {"extra_keys": [[["picture", 0]]]},
        {"extra_keys": [["salt", "adapter"]]},
        {"lora_id": 3},
    ):
        index, held = picture()
        held.apply([block(1, **fields), block(2, 1)])
        assert index.blocks(1) == 0
    index, held = picture()
    held.apply([block(1), block(2, 1, extra_keys=[["picture"]]), block(3, 2)])
    assert index.blocks(1) == 1


def test_blocks_that_do_not_fit_the_index_are_left_out_and_counted():
    index, held = picture()
    held.apply([BlockStored([1, 2], None, np.zeros(6, np.int32), 3), block(3, group_idx=1), block(4, group_idx=0)])
    assert (index.blocks(1), held.left_out) == (1, 3)


def test_a_block_and_the_one_behind_it_may_come_and_go_in_one_batch_the_end_first():
    index, copy = picture()
    first, second = np.arange(BLOCK, dtype=np.int32), np.arange(BLOCK, 2 * BLOCK, dtype=np.int32)
    copy.apply(
        [
            BlockStored([2], 1, second, BLOCK, "CPU"),
            BlockRemoved([2], "CPU"),
            BlockStored([1], None, first, BLOCK, "CPU"),
            BlockRemoved([1], "CPU"),
        ]
    )
    assert copy.is_empty
    assert index.blocks(1) == 0


def test_a_cycle_of_parents_does_not_hang():
    index, held = picture()
    held.apply([block(1, 1), block(2, 3), block(3, 2)])
    held.apply([BlockRemoved([1, 2, 3])])
    assert index.blocks(1) == 0


def test_events_can_fill_the_routers_own_tree():
    tree = PromptTree(BLOCK, clock=lambda: 1.0)
    held = Picture(tree, 1, BLOCK)
    held.apply([block(1), block(2, 1)])
    assert tree.blocks(1) == 2
    held.apply([AllBlocksCleared()])
    assert tree.blocks(1) == 0


@given(st.integers(1, 40), st.integers(0, 39))
def test_batches_are_whole_and_bounded(blocks, first):
    """Every block is reported once, in order, whatever the pieces are."""
    first = min(first, blocks - 1)
    size = 4096  # so that four blocks are a batch
    addrs = np.array([(1 << 47) + n if n % 7 else (2 << 47) + n for n in range(first, blocks)], np.uint64)
    tokens = np.repeat(np.arange(blocks, dtype=np.int32), size)
    event = kvpool.StoredEvent(1, "", tokens, first, addrs)
    batches = list(Translator(size).batches([event, event]))
    assert all(sum(len(one.block_hashes) for one in batch) <= 4 for batch in batches)
    told = [name for batch in batches for one in batch for name in one.block_hashes]
    assert len(told) == 2 * (blocks - first)
    assert told[: len(told) // 2] == told[len(told) // 2 :]
    assert len(set(told)) == blocks - first
