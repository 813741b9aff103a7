"""Pool.insert and match: what is found, duplicates, batches, namespaces and pins."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from kit import BLOCK, Stamps, cached_tokens, prompt, refused, small_layout, small_pool, store

import kvpool
from kvpool import DRAM, HBM, MIXED


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


# ---- insert and match


def test_an_inserted_prompt_is_found(pool):
    addrs = pool.alloc(3)
    with pool.insert(prompt(3), addrs) as held:
        assert (held.tokens, held.inserted, len(held.duplicates)) == (3 * BLOCK, 3, 0)
        assert held.addrs.tolist() == addrs.tolist()
    with pool.match(prompt(3)) as hit:
        assert (hit.tokens, hit.partial_tokens) == (3 * BLOCK, 0)
        assert hit.addrs.tolist() == addrs.tolist()
        assert hit.addrs.dtype == np.uint64
    tier = pool.stats().hbm
    assert (tier.active, tier.historical) == (0, 3)


def test_an_empty_pool_matches_nothing(pool):
    with pool.match(prompt(3)) as hit:
        assert (hit.tokens, hit.partial_tokens, hit.addrs.tolist()) == (0, 0, [])


def test_an_empty_prompt_is_found_and_inserted(pool):
    assert pool.match([]).tokens == 0
    with pool.insert([], []) as held:
        assert (held.tokens, held.inserted) == (0, 0)


@pytest.mark.parametrize("extra", range(BLOCK))
def test_only_whole_blocks_are_found(pool, extra):
    addrs = store(pool, prompt(3))
    with pool.match(prompt(3)[: 2 * BLOCK + extra]) as hit:
        assert hit.tokens == 2 * BLOCK
        assert hit.addrs.tolist() == addrs[:2].tolist()
        assert hit.partial_tokens == extra


def test_partial_agreement_with_the_next_block_is_the_longest_of_all_branches(pool):
    store(pool, np.r_[prompt(1), [1, 2, 3, 4]])
    store(pool, np.r_[prompt(1), [1, 2, 8, 8]])
    store(pool, np.r_[prompt(1), [5, 6, 7, 8]])
    for rest, agreed in (([1, 2, 3, 9], 3), ([1, 2, 9, 4], 2), ([5, 9, 9, 9], 1), ([9, 2, 3, 4], 0), ([1, 2], 2)):
        with pool.match(np.r_[prompt(1), rest]) as hit:
            assert (hit.tokens, hit.partial_tokens) == (BLOCK, agreed)


def test_the_longest_prefix_is_found_where_prompts_branch(pool):
    trunk = store(pool, prompt(2))
    left, right = (np.r_[prompt(2), np.full(BLOCK, name)] for name in (70, 71))
    addrs = {}
    for tokens in (left, right):
        with pool.match(tokens) as hit, pool.insert(tokens, np.r_[hit.addrs, pool.alloc(1)]) as held:
            assert held.inserted == 1
            addrs[int(tokens[-1])] = held.addrs.tolist()
    for tokens in (left, right):
        with pool.match(np.r_[tokens, prompt(1)]) as hit:
            assert hit.addrs.tolist() == addrs[int(tokens[-1])]
            assert hit.addrs[:2].tolist() == trunk.tolist()
    assert pool.stats().index_blocks == 4


def test_a_different_token_ends_the_match_wherever_it_is(pool):
    store(pool, prompt(3))
    for at in range(3 * BLOCK):
        tokens = prompt(3)
        tokens[at] = 99
        with pool.match(tokens) as hit:
            assert (hit.tokens, hit.partial_tokens) == (at // BLOCK * BLOCK, at % BLOCK)


def test_every_vector_of_tokens_is_the_same_prompt(pool):
    store(pool, prompt(2))
    tokens = prompt(2)
    spaced = np.zeros((2 * BLOCK, 2), np.int64)
    spaced[:, 0] = tokens
    forms = [
        tokens,
        tokens.astype(np.int64),
        tokens.tolist(),
        tuple(tokens.tolist()),
        list(tokens),
        array("i", tokens.tolist()),
        array("q", tokens.tolist()),
        memoryview(tokens),
        tokens.tobytes(),
        bytearray(tokens.tobytes()),
        spaced[:, 0],
        np.asfortranarray(tokens[::-1])[::-1],
    ]
    for form in forms:
        with pool.match(form) as hit:
            assert hit.tokens == 2 * BLOCK, type(form)


def test_tokens_may_be_any_int32(pool):
    tokens = np.array([-(2**31), 2**31 - 1, 0, -1], np.int32)
    store(pool, tokens)
    assert cached_tokens(pool, tokens.tolist()) == BLOCK
    assert cached_tokens(pool, tokens.astype(np.int64)) == BLOCK


def test_blocks_of_several_media_stay_in_the_order_of_the_prompt(pool):
    addrs = np.r_[
        pool.alloc(1, medium=DRAM), pool.alloc(2, medium=HBM), pool.alloc(1, medium=DRAM), pool.alloc(1, medium=HBM)
    ]
    pool.insert(prompt(5), addrs).close()
    with pool.match(prompt(5)) as hit:
        assert hit.addrs.tolist() == addrs.tolist()


# ---- duplicates


def test_duplicates_stay_with_the_caller(pool):
    first = store(pool, prompt(2))
    mine = pool.alloc(3)
    with pool.insert(prompt(3), mine) as held:
        assert held.inserted == 1
        assert held.duplicates.tolist() == mine[:2].tolist()
        assert held.addrs.tolist() == [*first.tolist(), int(mine[2])]
    assert pool.stats().hbm.active == 2
    assert pool.stats().duplicate_blocks == 2
    pool.free(held.duplicates)


def test_duplicates_are_freed_on_demand(pool):
    store(pool, prompt(2))
    with pool.insert(prompt(2), pool.alloc(2), free_duplicates=True) as held:
        pass
    tier = pool.stats().hbm
    assert (tier.active, tier.historical, tier.free) == (0, 2, 6)
    with refused(pool, kvpool.StaleAddress):
        pool.free(held.duplicates)


def test_a_matched_prefix_can_be_inserted_again(pool):
    store(pool, prompt(2))
    with pool.match(prompt(4)) as hit, pool.insert(prompt(4), np.r_[hit.addrs, pool.alloc(2)]) as held:
        assert (held.inserted, len(held.duplicates)) == (2, 0)
        assert held.addrs[:2].tolist() == hit.addrs.tolist()


def test_cached_content_is_not_replaced_by_a_duplicate(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(1)), [7])
    mine = pool.alloc(1)
    stamps.write(mine, [8])
    pool.insert(prompt(1), mine).close()
    with pool.match(prompt(1)) as hit:
        assert stamps.read(hit.addrs) == [7]


def test_a_cached_block_cannot_be_inserted_as_another_page(pool):
    addrs = store(pool, prompt(2))
    for tokens, given in (
        (prompt(2, 5), addrs),  # another prompt
        (prompt(2), addrs[::-1]),  # another place
        (prompt(3), np.r_[addrs, addrs[:1]]),  # longer than the cached prompt
    ):
        with refused(pool, kvpool.StateError, "cached already"):
            pool.insert(tokens, given)


# ---- batches


def test_a_batch_of_matches_gives_the_same_as_single_ones(pool):
    store(pool, prompt(2, 1))
    store(pool, prompt(3, 2))
    hits = pool.batch.match([prompt(2, 1), prompt(1, 9), prompt(3, 2).tolist()])
    assert [hit.tokens for hit in hits] == [2 * BLOCK, 0, 3 * BLOCK]
    assert pool.stats().hbm.pinned == 5
    for hit in hits:
        hit.close()
    assert pool.stats().hbm.pinned == 0


def test_a_batch_of_insertions_shares_what_it_can(pool):
    shared = np.r_[prompt(1), np.full(BLOCK, 50)]
    mine, other = pool.alloc(2), pool.alloc(2)
    first, second = pool.batch.insert([(prompt(2), mine), (shared, other)], namespace="n")
    assert (first.inserted, second.inserted) == (2, 1)
    assert second.addrs.tolist() == [int(mine[0]), int(other[1])]
    assert second.duplicates.tolist() == [int(other[0])]
    assert pool.stats().hbm.pinned == 3
    assert cached_tokens(pool, shared, "n") == 2 * BLOCK


def test_a_batch_of_insertions_is_all_or_nothing(pool):
    mine = pool.alloc(3)
    with refused(pool, kvpool.ArgumentError, needed=2, given=1):
        pool.batch.insert([(prompt(1, 1), mine[:1]), (prompt(1, 2), mine[1:2]), (prompt(2, 3), mine[2:])])
    with refused(pool, kvpool.ArgumentError, "twice", address=int(mine[0])):
        pool.batch.insert([(prompt(2, 1), mine[:2]), (prompt(2, 2), mine[[2, 0]])])
    assert cached_tokens(pool, prompt(1, 1)) == 0
    pool.free(mine)


def test_empty_batches_are_fine(pool):
    assert pool.batch.match([]) == []
    assert pool.batch.insert([]) == []


# ---- namespaces


def test_namespaces_keep_prompts_apart(pool):
    store(pool, prompt(2))
    store(pool, prompt(2), namespace="tenant-ä")
    for namespace, tokens in (("", 2), ("tenant-ä", 2), ("tenant", 0), ("tenant-ä ", 0)):
        with pool.match(prompt(2), namespace=namespace) as hit:
            assert hit.tokens == tokens * BLOCK
    assert pool.stats().namespaces == 2
    assert pool.stats().index_blocks == 4


def test_a_namespace_ends_with_its_last_prompt(pool):
    store(pool, prompt(2), namespace="a")
    store(pool, prompt(2), namespace="b")
    assert pool.stats().namespaces == 3
    pool.delete(prompt(2), namespace="a")
    pool.evict(2, medium=HBM)
    assert pool.stats().namespaces == 1


def test_any_text_is_a_namespace(pool):
    names = ["a\0b", "a\0", "a", "\N{SNOWMAN}" * 1000, " "]
    for name, namespace in enumerate(names):
        store(pool, prompt(1, name), namespace=namespace)
    for name, namespace in enumerate(names):
        assert cached_tokens(pool, prompt(1, name), namespace) == BLOCK
        assert cached_tokens(pool, prompt(1, name + 1), namespace) == 0


# ---- pins


def test_matched_blocks_stay_until_the_match_is_closed(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4)), [1, 2, 3, 4])
    hit = pool.match(prompt(4))
    assert not hit.closed
    assert pool.stats().hbm.pinned == 4
    assert len(pool.swap_out(9)) == 0
    assert pool.evict(9, medium=MIXED) == 0
    pool.alloc(4)
    assert stamps.read(hit.addrs) == [1, 2, 3, 4]
    hit.close()
    hit.close()
    assert hit.closed
    assert pool.stats().hbm.evictable == 4


def test_insertions_pin_as_well(pool):
    held = pool.insert(prompt(2), pool.alloc(2))
    assert pool.evict(2, medium=HBM) == 0
    held.close()
    assert pool.evict(2, medium=HBM) == 2


def test_a_match_pins_no_more_than_it_found(pool):
    store(pool, prompt(6))
    with pool.match(prompt(2)):
        assert (pool.stats().hbm.pinned, pool.stats().hbm.evictable) == (2, 4)
        assert pool.evict(6, medium=HBM) == 4


def test_pins_of_several_holders_add_up(pool):
    store(pool, prompt(3))
    first, second = pool.match(prompt(3)), pool.match(prompt(2))
    first.close()
    assert pool.stats().hbm.pinned == 2
    second.close()
    assert pool.stats().hbm.pinned == 0


def test_dropping_a_handle_releases_its_pins(pool):
    store(pool, prompt(3))
    hit = pool.match(prompt(3))
    del hit
    assert pool.stats().hbm.pinned == 0


def test_pins_end_with_their_with_block_even_when_it_raises(pool):
    store(pool, prompt(3))
    with pytest.raises(KeyError), pool.match(prompt(3)):
        raise KeyError
    assert pool.stats().hbm.pinned == 0


def test_a_prompt_that_is_held_can_grow(pool):
    with pool.insert(prompt(2), pool.alloc(2)) as held:
        with pool.insert(prompt(4), np.r_[held.addrs, pool.alloc(2)]) as longer:
            assert longer.inserted == 2
        assert pool.stats().hbm.pinned == 2


# ---- counters and other layouts


def test_counters_count_what_matches_found(pool):
    store(pool, prompt(2))
    pool.match(prompt(4)).close()
    pool.match(prompt(1, 9)).close()
    stats = pool.stats()
    assert (stats.match_calls, stats.requested_tokens, stats.matched_tokens) == (2, 5 * BLOCK, 2 * BLOCK)
    assert stats.hit_ratio == pytest.approx(0.4)


def test_blocks_of_one_token_work():
    with small_pool(layout=small_layout(block_tokens=1)) as pool:
        addrs = pool.alloc(5)
        pool.insert([1, 2, 3, 4, 5], addrs).close()
        with pool.match([1, 2, 3, 9]) as hit:
            assert (hit.tokens, hit.partial_tokens) == (3, 0)
            assert hit.addrs.tolist() == addrs[:3].tolist()


def test_a_pool_of_raw_blocks_caches_prompts_too():
    with small_pool(layout=kvpool.RawLayout(block_bytes=24, block_tokens=BLOCK)) as pool:
        stamps = Stamps(pool)
        addrs = pool.alloc(2)
        stamps.write(addrs, [5, 6])
        pool.insert(prompt(2), addrs).close()
        pool.swap_out(2)
        with pool.match(prompt(2)) as hit:
            assert stamps.read(hit.addrs) == [5, 6]


def test_handles_describe_themselves(pool):
    with pool.insert(prompt(2), pool.alloc(2)) as held, pool.match(prompt(2)) as hit:
        assert repr(held) == f"<Inserted tokens={2 * BLOCK} inserted=2 pinned>"
        assert repr(hit) == f"<Match tokens={2 * BLOCK} partial_tokens=0 pinned>"
        assert "2 cached" in repr(pool)
    assert "pinned" not in repr(hit)
