"""Event streams: what is stored, removed and moved."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from kit import BLOCK, prompt, small_pool, store

import kvpool
from kvpool import DRAM, HBM


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


def test_an_insertion_is_reported_with_its_whole_prefix(pool):
    first = store(pool, prompt(2), namespace="n")
    with pool.subscribe() as stream:
        with pool.insert(prompt(4), np.r_[first, pool.alloc(2)], namespace="n") as held:
            pass
        (event,) = stream.drain()
        assert isinstance(event, kvpool.StoredEvent)
        assert (event.namespace, event.first_block) == ("n", 2)
        assert event.tokens.dtype == np.int32
        assert event.tokens.tolist() == prompt(4).tolist()
        assert event.addrs.tolist() == held.addrs[2:].tolist()


def test_prompts_cached_before_the_subscription_are_not_reported(pool):
    store(pool, prompt(2))
    with pool.subscribe() as stream:
        store(pool, prompt(2))
        pool.match(prompt(2)).close()
        assert stream.drain() == []


def test_evictions_and_deletions_are_reported_with_the_place_of_the_blocks(pool):
    addrs = store(pool, prompt(3))
    with pool.subscribe() as stream:
        pool.evict(1, medium=HBM)
        pool.delete(prompt(2))
        events = stream.drain()
    assert [type(event) for event in events] == [kvpool.RemovedEvent] * 2
    assert [(event.first_block, event.addrs.tolist()) for event in events] == [
        (2, addrs[2:].tolist()),
        (0, addrs[:2].tolist()),
    ]
    assert [len(event.tokens) for event in events] == [3 * BLOCK, 2 * BLOCK]


def test_moves_are_reported_in_both_directions(pool):
    addrs = store(pool, prompt(3))
    with pool.subscribe() as stream:
        down = pool.swap_out(2)
        (event,) = stream.drain()
        assert isinstance(event, kvpool.MovedEvent)
        assert event.first_block == 1
        assert event.old_addrs.tolist() == addrs[1:].tolist()
        assert event.addrs.tolist() == down.tolist()
        with pool.match(prompt(3)) as hit, pool.swap_in(hit.addrs) as held:
            (event,) = stream.drain()
            assert event.old_addrs.tolist() == down.tolist()
            assert event.addrs.tolist() == held.addrs[1:].tolist()


def test_events_are_numbered_in_order(pool):
    with pool.subscribe() as stream, pool.subscribe() as other:
        for name in range(12):
            store(pool, prompt(2, name), evict=True)
        events = stream.drain()
        assert [event.sequence for event in events] == list(range(events[0].sequence, events[0].sequence + len(events)))
        assert {type(event) for event in events} == {kvpool.StoredEvent, kvpool.MovedEvent, kvpool.RemovedEvent}
        assert [event.sequence for event in other] == [event.sequence for event in events]


def test_a_stream_can_be_iterated_and_is_empty_then(pool):
    with pool.subscribe() as stream:
        store(pool, prompt(1, 1))
        store(pool, prompt(1, 2))
        assert [int(event.tokens[0]) for event in stream] == [-1, -2]
        assert list(stream) == []


def test_a_stream_that_is_not_read_loses_its_oldest_events_and_counts_them(pool):
    with pool.subscribe(capacity_tokens=3 * BLOCK) as stream:
        for name in range(8):
            store(pool, prompt(1, name))
        events = stream.drain()
        assert [int(event.tokens[0]) for event in events] == [-5, -6, -7]
        assert stream.lost == 5
        store(pool, prompt(1, 9), evict=True)
        assert stream.drain()
        assert stream.lost == 5


def test_the_newest_event_is_kept_whatever_its_size(pool):
    with pool.subscribe(capacity_tokens=0) as stream:
        store(pool, prompt(1, 1))
        store(pool, prompt(4, 2))
        (event,) = stream.drain()
        assert len(event.tokens) == 4 * BLOCK
        assert stream.lost == 1


def test_a_stream_can_begin_with_what_is_cached(pool):
    store(pool, prompt(3, 1))
    store(pool, np.r_[prompt(2, 1), np.full(BLOCK, 60)], namespace="")
    store(pool, prompt(1), namespace="n", medium=DRAM)
    pool.swap_out(1)
    with pool.subscribe(capacity_tokens=0, include_cached=True) as stream, pool.subscribe() as other:
        events = stream.drain()
        assert {type(event) for event in events} == {kvpool.StoredEvent}
        assert other.drain() == []
        told = {
            (event.namespace, tuple(event.tokens[: (event.first_block + at + 1) * BLOCK].tolist())): addr
            for event in events
            for at, addr in enumerate(event.addrs.tolist())
        }
        assert len(told) == sum(len(event.addrs) for event in events) == pool.stats().index_blocks == 5
        for tokens, namespace in ((prompt(3, 1), ""), (np.r_[prompt(2, 1), np.full(BLOCK, 60)], ""), (prompt(1), "n")):
            addrs = pool.explain_match(tokens, namespace=namespace).addrs.tolist()
            assert [told[namespace, tuple(tokens[: at * BLOCK].tolist())] for at in range(1, len(addrs) + 1)] == addrs
        store(pool, prompt(1, 9))
        (event,) = stream.drain()
        assert event.sequence > max(known.sequence for known in events)
        assert stream.lost == 0


def test_a_reader_that_lost_events_starts_again_from_a_snapshot(pool):
    index = kvpool.InstanceIndex(BLOCK)
    with pool.subscribe(capacity_tokens=2 * BLOCK) as stream:
        for name in range(6):
            store(pool, prompt(1, name), evict=True)
        stream.drain()
        assert stream.lost
    with pool.subscribe(include_cached=True) as stream:
        for event in stream:
            index.apply(1, event)
        pool.evict(2, medium=HBM)
        for event in stream:
            index.apply(1, event)
    assert index.blocks(1) == pool.stats().index_blocks
    for name in range(6):
        held = pool.explain_match(prompt(1, name)).matched_tokens
        assert index.match(prompt(1, name)) == ([(1, held)] if held else [])


def test_a_closed_stream_says_so(pool):
    stream = pool.subscribe()
    stream.close()
    stream.close()
    with pytest.raises(kvpool.ClosedError):
        stream.drain()
    store(pool, prompt(1))


def test_the_stream_of_a_closed_pool_says_so(pool):
    stream = pool.subscribe()
    pool.close()
    with pytest.raises(kvpool.ClosedError):
        stream.drain()
    stream.close()


def test_dropping_a_stream_ends_its_cost(pool):
    streams = [pool.subscribe() for _ in range(10)]
    del streams
    gc.collect()
    store(pool, prompt(2))
    with pool.subscribe() as stream:
        store(pool, prompt(2, 5))
        assert len(stream.drain()) == 1


def test_events_stay_valid_after_the_pool_is_gone():
    pool = small_pool()
    with pool.subscribe() as stream:
        store(pool, prompt(2))
        (event,) = stream.drain()
    pool.close()
    del pool, stream
    gc.collect()
    assert event.tokens.tolist() == prompt(2).tolist()
    assert kvpool.media(event.addrs).tolist() == [HBM] * 2


def test_an_index_alone_has_a_stream_too():
    index = kvpool.PromptIndex(BLOCK)
    with index.subscribe() as stream:
        index.insert(prompt(3), [7, 8, 9]).close()
        with index.subscribe(include_cached=True) as late:
            assert [event.addrs.tolist() for event in late] == [[7, 8, 9]]
        index.evict(1)
        stored, removed = stream.drain()
        assert stored.addrs.tolist() == [7, 8, 9]
        assert (removed.first_block, removed.addrs.tolist()) == (2, [9])


def test_the_events_of_a_random_life_rebuild_the_index():
    random = np.random.default_rng(14)
    with small_pool(10, 10, audit=False) as pool, pool.subscribe() as stream:
        where: dict[tuple[int, ...], int] = {}
        for step in range(500):
            tokens = np.repeat(random.integers(0, 3, random.integers(1, 5)), BLOCK)
            store(pool, tokens, evict=True, medium=[HBM, DRAM][step % 2])
            pool.swap_out(int(random.integers(0, 3)))
            with pool.match(np.repeat(random.integers(0, 3, 3), BLOCK)) as hit:
                pool.swap_in(hit.addrs).close()
            if step % 9 == 0:
                pool.delete(tokens[:BLOCK], descendants=True)
            for event in stream:
                pages = [tuple(event.tokens[: end * BLOCK : BLOCK].tolist()) for end in range(1, 5)]
                changed = pages[event.first_block : event.first_block + len(event.addrs)]
                assert len(event.tokens) == (event.first_block + len(event.addrs)) * BLOCK
                for at, page in enumerate(changed):
                    if isinstance(event, kvpool.StoredEvent):
                        assert page not in where
                        where[page] = int(event.addrs[at])
                    elif isinstance(event, kvpool.MovedEvent):
                        assert where[page] == event.old_addrs[at]
                        where[page] = int(event.addrs[at])
                    else:
                        assert where.pop(page) == event.addrs[at]
            assert len(where) == pool.stats().index_blocks
            report = pool.explain_match(tokens)
            pages = [tuple(tokens[: end * BLOCK : BLOCK].tolist()) for end in range(1, len(report.addrs) + 1)]
            assert report.addrs.tolist() == [where[page] for page in pages]
        assert stream.lost == 0
