"""What a picture of a publisher costs: blocks are bounded, and a long prompt costs as much as its blocks alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kit import BLOCK, repeats

from kvpool import InstanceIndex
from kvpool.errors import ProtocolError
from kvpool.index import StoredEvent
from kvpool.observe.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode, encode, picture
from kvpool.observe.events.picture import Picture


class Counted:
    """An index, and how many tokens it was told."""

    def __init__(self):
        self.index = InstanceIndex(BLOCK)
        self.tokens = 0
        self.stored = 0

    def apply(self, instance, event):
        self.tokens += len(event.tokens)
        self.stored += isinstance(event, StoredEvent)
        self.index.apply(instance, event, lasting=True)

    def forget(self, instance):
        self.index.remove_instance(instance)

    def holds(self, tokens):
        return dict(self.index.match(tokens)).get(1, 0) // BLOCK


def block(number, parent=None, **fields):
    return BlockStored([number], parent, np.full(BLOCK, number % 1000, np.int32), BLOCK, **fields)


def chain(start, blocks):
    """One prompt, block by block."""
    return [block(start + at, start + at - 1 if at else None) for at in range(blocks)]


def tokens_of(events):
    return np.concatenate([event.token_ids for event in events])


def test_a_prompt_stored_block_by_block_costs_as_much_as_its_blocks():
    blocks = 20_000
    target = Counted()
    held = Picture(target, 1, BLOCK)
    events = chain(0, blocks)
    whole = tokens_of(events)
    for at, event in enumerate(events, 1):
        held.apply([event])
        if at % 997 == 0:  # what is matched is at most a 32nd too short
            assert at - at // 32 - 1 <= target.holds(whole) <= at
    assert target.tokens < 40 * blocks * BLOCK  # and not blocks / 2 times
    while not held.is_caught_up:
        held.catch_up()
    assert target.holds(whole) == target.index.blocks(1) == len(held) == blocks


def test_branches_of_a_long_prompt_wait_until_nothing_else_is_to_be_done():
    target = Counted()
    held = Picture(target, 1, BLOCK)
    trunk = chain(0, 1000)
    held.apply(trunk)
    held.catch_up()
    before = target.tokens
    branches = [block(10_000 + each, 999) for each in range(200)]
    for branch in branches:
        held.apply([branch])
    assert target.tokens - before < 40 * len(branches) * BLOCK
    while not held.is_caught_up:
        told = target.tokens
        held.catch_up()
        assert target.tokens - told <= (picture._CATCH_UP_BLOCKS + 1001) * BLOCK
    assert target.holds(tokens_of([*trunk, branches[-1]])) == 1001


def test_a_prompt_that_goes_in_one_batch_is_removed_in_one_go():
    target = Counted()
    held = Picture(target, 1, BLOCK)
    held.apply(chain(0, 3000))
    held.catch_up()
    before = target.tokens
    held.apply([BlockRemoved([each]) for each in range(2999, -1, -1)])  # ends first, as engines evict
    assert target.tokens - before == BLOCK
    assert held.is_empty
    assert target.index.blocks(1) == 0


def test_beyond_the_most_blocks_the_oldest_prompts_go_from_their_ends():
    target = Counted()
    held = Picture(target, 1, BLOCK, blocks_max=12)
    first, second, third = chain(0, 6), chain(100, 6), chain(200, 3)
    for events in (first, second, third):
        held.apply(events)
    assert [target.holds(tokens_of(each)) for each in (first, second, third)] == [3, 6, 3]
    assert (held.dropped, target.index.blocks(1), len(held)) == (3, 12, 12)
    held.apply([block(106, 105)])  # the second is in use, and the rest of the first goes
    assert [target.holds(tokens_of(each)) for each in (first, second, third)] == [2, 6, 3]
    held.apply([AllBlocksCleared()])
    assert held.is_empty


def test_one_event_of_more_blocks_than_fit_keeps_the_beginning():
    target = Counted()
    held = Picture(target, 1, BLOCK, blocks_max=10)
    whole = np.arange(50 * BLOCK, dtype=np.int32)
    held.apply([BlockStored(list(range(50)), None, whole, BLOCK)])
    assert (target.holds(whole), held.dropped) == (10, 40)


def test_parents_in_a_circle_are_bounded():
    held = Picture(Counted(), 1, BLOCK, blocks_max=10)
    for each in range(0, 100, 2):
        held.apply([block(each, each + 1), block(each + 1, each)])
        assert len(held._blocks) <= 10
    assert held.dropped > 80


def test_what_an_event_keeps_is_bounded_by_its_blocks():
    """A block keeps its tokens and not its message; a name, namespace or medium is of some length."""
    held = Picture(Counted(), 1, BLOCK)
    held.apply([BlockStored([1, 2], None, np.zeros(2 * BLOCK, np.int32), BLOCK)])
    assert [len(each.tokens) for each in held._blocks.values()] == [4 * BLOCK, 4 * BLOCK]
    for number in range(100):
        held.apply([block(1, medium=f"m{number}")])
    assert len(held._blocks[1].media) <= 8
    held.apply([block(3, extra_keys=[["x" * 5000]])])
    assert not held._blocks[3].live
    for fields in ({"medium": "x" * 100}, {"block_hashes": [b"x" * 100]}):
        event = BlockStored(**({"block_hashes": [1], "parent_block_hash": None, "medium": None} | fields),
                            token_ids=np.zeros(BLOCK, np.int32), block_size=BLOCK)  # fmt: skip
        with pytest.raises(ProtocolError):
            decode(encode(EventBatch(0.0, [event])))


class Bounded(RuleBasedStateMachine):
    """Any events, with room for few blocks, and paths that wait as soon as they have two blocks."""

    PARENTS = (None, None, 0, 0, 1, 2, 2, 3, 4, 5, 5, 9, 11, 12)
    MOST = 7

    def __init__(self):
        super().__init__()
        self.stride, picture._STRIDE = picture._STRIDE, 1
        self.target = Counted()
        self.picture = Picture(self.target, 1, BLOCK, self.MOST)

    number = st.integers(0, len(PARENTS) - 1)

    @rule(numbers=st.lists(number, max_size=4))
    def store(self, numbers):
        self.picture.apply([block(each, self.PARENTS[each], medium="GPU") for each in numbers])

    @rule(numbers=st.lists(number, max_size=4))
    def remove(self, numbers):
        self.picture.apply([BlockRemoved(numbers, "GPU")])

    @rule()
    def catch_up(self):
        self.picture.catch_up()
        assert self.picture.is_caught_up
        assert self.target.index.blocks(1) == len(self.picture)

    @invariant()
    def blocks_are_few_and_the_index_has_those_that_it_was_told_of(self):
        self.target.index.audit()
        held = self.picture._blocks
        assert len(held) <= self.MOST
        assert set(self.picture._ends) == {name for name, each in held.items() if not each.after}
        told = [each for each in held.values() if each.told]
        assert self.target.index.blocks(1) == len(told)
        assert all(each.live and (each.before is None or each.before.told) for each in told)
        assert all(each.live and not each.told for each in self.picture._waiting)
        for each in held.values():
            assert each.media or each.after
            assert each.before is None or held[each.before.hash] is each.before

    def teardown(self):
        try:
            self.catch_up()
        finally:
            picture._STRIDE = self.stride


Bounded.TestCase.settings = settings(max_examples=repeats(100, long=2000), stateful_step_count=40, deadline=None)
test_whatever_happens_blocks_are_bounded_and_the_index_agrees = Bounded.TestCase
