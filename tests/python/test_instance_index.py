"""kvpool.InstanceIndex: a router's tree, fed by hand or by the event streams of pools."""

from __future__ import annotations

import numpy as np
import pytest
from kit import BLOCK, LONG, cached_tokens, prompt, small_pool, store

import kvpool
from kvpool import DRAM, HBM


@pytest.fixture
def index():
    return kvpool.InstanceIndex(block_tokens=BLOCK)


def test_each_instance_is_found_with_what_it_holds(index):
    assert index.insert(prompt(4), 1) == 4
    assert index.insert(prompt(2), 2) == 2
    assert index.insert(prompt(3, 7), 3) == 3
    assert index.match(prompt(5)) == [(1, 4 * BLOCK), (2, 2 * BLOCK)]
    assert index.match(prompt(1)) == [(1, BLOCK), (2, BLOCK)]
    assert index.match(prompt(1, 9)) == []
    assert [index.blocks(instance) for instance in (1, 2, 3, 4)] == [4, 2, 3, 0]
    assert len(index) == 7
    assert index.block_tokens == BLOCK


def test_inserting_again_adds_nothing(index):
    index.insert(prompt(3), 1)
    assert index.insert(prompt(2), 1) == 0
    assert index.insert(prompt(4), 1) == 1


def test_beyond_its_largest_size_it_forgets_the_longest_unused():
    index = kvpool.InstanceIndex(BLOCK, blocks_max=6)
    index.insert(prompt(3, 1), 1)
    index.insert(prompt(3, 2), 2, lasting=True)
    index.match(prompt(2, 1), now=1)  # a use, but for the last block
    assert (len(index), index.evicted) == (6, 0)
    assert index.insert(prompt(3, 3), 3) == 3
    assert (len(index), index.evicted, index.blocks_max) == (6, 3, 6)
    assert [index.match(prompt(3, name)) for name in (1, 2, 3)] == [[(1, 2 * BLOCK)], [(2, BLOCK)], [(3, 3 * BLOCK)]]
    assert [index.blocks(instance) for instance in (1, 2, 3)] == [2, 1, 3]
    assert index.insert(prompt(10, 4), 4) == 10  # longer than all of it: the end is not kept
    assert (index.match(prompt(10, 4)), len(index), index.evicted) == ([(4, 6 * BLOCK)], 6, 13)
    index.audit()
    assert (kvpool.InstanceIndex(BLOCK).blocks_max, kvpool.InstanceIndex(BLOCK).evicted) == (None, 0)


def test_tokens_that_do_not_fill_a_block_are_ignored(index):
    assert index.insert(prompt(2)[:-1], 1) == 1
    assert index.match(prompt(2)) == [(1, BLOCK)]


def test_an_instance_loses_a_prompt_from_a_block_on(index):
    index.insert(prompt(4), 1)
    index.insert(prompt(4), 2)
    assert index.remove(prompt(4), 1, first_block=2) == 2
    assert index.match(prompt(4)) == [(2, 4 * BLOCK), (1, 2 * BLOCK)]
    assert index.remove(prompt(1), 1) == 2  # and everything longer
    assert index.match(prompt(4)) == [(2, 4 * BLOCK)]
    assert index.remove(prompt(4), 3) == 0
    assert index.remove(prompt(4), 2, first_block=4) == 0


def test_an_instance_that_is_gone_holds_nothing(index):
    for name in range(3):
        index.insert(prompt(2, name), 1)
        index.insert(prompt(3, name), 2, namespace="n")
    assert index.remove_instance(1) == 6
    assert index.blocks(1) == 0
    assert len(index) == 9
    assert index.remove_instance(2) == 9
    assert len(index) == 0
    index.audit()


def test_unused_pages_expire(index):
    index.insert(prompt(2, 1), 1, now=10)
    index.insert(prompt(2, 2), 1, now=20)
    index.insert(prompt(2, 3), 2, now=20)
    assert index.match(prompt(1, 1), now=30) == [(1, BLOCK)]
    assert index.match(prompt(2, 2)) == [(1, 2 * BLOCK)]  # does not count as a use
    assert index.expire(before=25) == 5
    assert index.match(prompt(2, 1)) == [(1, BLOCK)]
    assert index.match(prompt(2, 2)) == []
    assert index.expire(before=25) == 0
    assert index.expire(before=31) == 1
    assert len(index) == 0


def test_lasting_pages_do_not_expire(index):
    index.insert(prompt(2), 1, now=10, lasting=True)
    index.insert(prompt(3), 1, now=20)
    index.insert(prompt(2), 2, now=20)
    assert index.expire(before=1000) == 3
    assert index.match(prompt(3)) == [(1, 2 * BLOCK)]
    assert index.remove(prompt(1), 1) == 2
    index.audit()


def test_a_match_as_arrays_has_the_same_contents(index):
    for instance, blocks in ((3, 2), (1, 4), (2, 4)):
        index.insert(prompt(blocks), instance, namespace="n")
    instances, tokens = index.match_arrays(prompt(5), namespace="n")
    assert (instances.dtype, tokens.dtype) == (np.int64, np.int64)
    assert list(zip(instances.tolist(), tokens.tolist(), strict=True)) == index.match(prompt(5), namespace="n")
    assert [len(array) for array in index.match_arrays(prompt(5))] == [0, 0]
    index.match_arrays(prompt(2), now=9, namespace="n")  # a use, as with match
    assert index.expire(before=5) == 4


def test_a_match_can_be_read_in_parts(index):
    for instance, blocks in ((3, 2), (1, 4), (2, 4), (9, 2)):
        index.insert(prompt(blocks), instance, namespace="n")
    found = index.find(prompt(5), "n")
    assert (len(found), found.lengths, found.bounds) == (4, [4 * BLOCK, 2 * BLOCK], [0, 2, 4])
    assert [found.level(instance) for instance in (1, 2, 3, 9, 4)] == [0, 0, 1, 1, 2]
    assert found.instances(0, 4).dtype == np.int64
    assert [found.instances(*part).tolist() for part in ((0, 2), (2, 9), (3, 1), (7, 9))] == [[1, 2], [3, 9], [], []]
    index.remove_instance(1)
    assert found.instances(0, 1).tolist() == [1]  # as it was
    assert index.expire(before=5) == 8  # looking was no use
    nothing = index.find(prompt(5))
    assert (len(nothing), nothing.lengths, nothing.bounds, nothing.level(1)) == (0, [], [0], 0)


def test_namespaces_are_separate(index):
    index.insert(prompt(1), 1, namespace="a")
    assert index.match(prompt(1)) == []
    assert index.match(prompt(1), namespace="a") == [(1, BLOCK)]
    assert index.remove(prompt(1), 1) == 0
    assert index.remove(prompt(1), 1, namespace="a") == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda index: kvpool.InstanceIndex(0), kvpool.ArgumentError, "0"),
        (lambda index: kvpool.InstanceIndex(4, 0), kvpool.ArgumentError, "blocks_max"),
        (lambda index: kvpool.InstanceIndex(4, -1), kvpool.ArgumentError, "-1"),
        (lambda index: kvpool.InstanceIndex("4"), kvpool.ArgumentTypeError, "str"),
        (lambda index: index.insert(prompt(1), 2**14), kvpool.ArgumentError, "16384"),
        (lambda index: index.insert(prompt(1), -1), kvpool.ArgumentError, "-1"),
        (lambda index: index.insert(prompt(1), "a"), kvpool.ArgumentTypeError, "str"),
        (lambda index: index.insert(prompt(1), 1, now=-1), kvpool.ArgumentError, "-1"),
        (lambda index: index.insert(prompt(1).astype(float), 1), kvpool.ArgumentTypeError, "float64"),
        (lambda index: index.match(prompt(1), now="x"), kvpool.ArgumentTypeError, "str"),
        (lambda index: index.remove(prompt(1), 1, first_block=-1), kvpool.ArgumentError, "-1"),
        (lambda index: index.remove_instance(2**14), kvpool.ArgumentError, "16384"),
        (lambda index: index.expire(-1), kvpool.ArgumentError, "-1"),
        (lambda index: index.blocks(-1), kvpool.ArgumentError, "-1"),
        (lambda index: index.match(prompt(1), namespace=None), kvpool.ArgumentTypeError, "NoneType"),
        (lambda index: index.apply(1, "event"), kvpool.ArgumentTypeError, "str"),
    ],
)
def test_bad_input_is_a_typed_error(index, call, error, text):
    index.insert(prompt(2), 1)
    with pytest.raises(error, match=text):
        call(index)
    assert index.match(prompt(2)) == [(1, 2 * BLOCK)]
    index.audit()


def test_it_agrees_with_a_naive_model():
    random = np.random.default_rng(12)
    index = kvpool.InstanceIndex(1)
    held: dict[tuple[int, ...], dict[int, int]] = {}  # prefix -> instance -> last use
    matched: dict[tuple[int, ...], int] = {}
    for now in range(1, 100_000 if LONG else 5_000):
        tokens = tuple(random.integers(0, 3, random.integers(1, 6)).tolist())
        prefixes = [tokens[: end + 1] for end in range(len(tokens))]
        instance = int(random.integers(0, 5))
        match random.integers(0, 20):
            case 0:
                gone = [prefix for prefix, holders in held.items() if instance in holders]
                assert index.remove_instance(instance) == len(gone)
                for prefix in gone:
                    del held[prefix][instance]
            case 1 | 2:
                first = int(random.integers(0, len(tokens)))
                gone = [p for p, holders in held.items() if instance in holders and p[: first + 1] == prefixes[first]]
                assert index.remove(list(tokens), instance, first_block=first) == len(gone)
                for prefix in gone:
                    del held[prefix][instance]
            case 3:
                before = max(0, now - int(random.integers(0, 60)))
                gone = [
                    (prefix, holder)
                    for prefix, holders in held.items()
                    for holder, used in holders.items()
                    if max(used, matched.get(prefix, 0)) < before
                ]
                assert index.expire(before) == len(gone)
                for prefix, holder in gone:
                    del held[prefix][holder]
            case draw if draw < 12:
                new = [prefix for prefix in prefixes if instance not in held.get(prefix, {})]
                assert index.insert(list(tokens), instance, now=now) == len(new)
                for prefix in prefixes:
                    held.setdefault(prefix, {})[instance] = now
            case draw:
                found = {
                    holder: sum(holder in held.get(prefix, {}) for prefix in prefixes)
                    for holder in held.get(prefixes[0], {})
                }
                wanted = sorted(found.items(), key=lambda hit: (-hit[1], hit[0]))
                assert index.match(list(tokens), now=now if draw % 2 else None) == wanted
                if draw % 2:
                    for prefix in prefixes:
                        if held.get(prefix):
                            matched[prefix] = now
        for prefix in [prefix for prefix, holders in held.items() if not holders]:
            del held[prefix]
            matched.pop(prefix, None)
        assert len(index) == len(held)
        if now % 100 == 0:
            index.audit()


def test_event_streams_of_pools_give_the_whole_picture(index):
    random = np.random.default_rng(13)
    with small_pool(12, 12, audit=False) as first, small_pool(12, 0, policy="fifo", audit=False) as second:
        pools = {1: first, 2: second}
        streams = {instance: pool.subscribe() for instance, pool in pools.items()}
        for step in range(400):
            instance = int(random.integers(1, 3))
            pool, tokens = pools[instance], np.repeat(random.integers(0, 3, random.integers(1, 5)), BLOCK)
            store(pool, tokens, evict=True, medium=[HBM, DRAM][step % 2] if instance == 1 else HBM)
            if step % 7 == 0:
                pool.delete(tokens)
            if step % 5 == 0:
                first.swap_out(2)
            if step % 11 == 0:
                with first.match(tokens) as hit:
                    first.swap_in(hit.addrs).close()
            for name, stream in streams.items():
                for event in stream:
                    index.apply(name, event, now=step)
            for name, pool in pools.items():
                assert index.blocks(name) == pool.stats().index_blocks
            held = {name: cached_tokens(pool, tokens) for name, pool in pools.items()}
            assert dict(index.match(tokens)) == {name: tokens for name, tokens in held.items() if tokens}
        index.audit()
