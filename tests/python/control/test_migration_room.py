"""Migrations between pools that are full, or nearly."""

from __future__ import annotations

import numpy as np
import pytest
from control.migration_kit import BLOCK, LENGTH, Place, check, prompt_of

import kvpool
from kvpool.control.migration.room import Room


def test_a_full_destination_refuses_before_anything_has_moved(places, reader):
    a, b = places
    prompt = prompt_of(6)
    a.engine.begin("r", prompt, LENGTH)
    filler = b.pool.alloc(b.pool.stats().hbm.free)
    moving = a.migrations.migrate("r", "b")
    with pytest.raises(kvpool.OutOfBlocks, match="b has no room"):
        moving.wait()
    assert moving.state == "here"
    assert not a.engine.requests["r"].stopped
    assert b.pool.peers.totals()["fetch"].succeeded == 0
    b.pool.free(filler)
    check(reader, a.engine, "r", prompt)
    b.check_empty()


def test_a_destination_with_room_for_a_part_refuses_before_anything_has_moved(reader):
    block_bytes = 4 * BLOCK * 2 * 2 * 2 * 4
    places = [Place("a", reader), Place("b", reader, bytes_per_s=20 * block_bytes)]  # a block at a time
    try:
        a, b = places
        a.pool.peers.connect(b.address)
        prompt = prompt_of(23, 40)
        a.engine.begin("r", prompt, LENGTH)
        filler = b.pool.alloc(b.pool.stats().hbm.free - 5)
        with pytest.raises(kvpool.OutOfBlocks):
            a.migrations.migrate("r", "b").wait()
        assert b.pool.peers.totals()["fetch"].succeeded == 0
        b.pool.free(filler)
        check(reader, a.engine, "r", prompt)
        b.check_empty()
    finally:
        for each in places:
            each.close()


def test_blocks_that_are_quarantined_are_freed_when_they_are_ours_again(places):
    """A fetch has failed, and its source may still write: the pool refuses to free the blocks until then."""
    _, b = places
    own = b.pool.alloc(4)
    free, refused = b.pool.free, [int(own[1])]
    free(own[2:3])  # by the pool, after a quarantine

    def refuse(addrs):
        if {int(addr) for addr in addrs} & set(refused):
            raise kvpool.StateError("the block is quarantined, not active")
        free(addrs)

    b.pool.free = refuse
    room = Room(b.pool, kvpool.HBM, b.pool.match(own[:0].astype(np.int32)), own)
    assert not room.give_up()
    assert room.own.tolist() == refused
    assert b.pool.stats().hbm.active == 1
    refused.clear()
    assert room.give_up()
    del b.pool.free
    b.check_empty()


def test_a_full_source_can_still_send_its_requests_away(places, reader):
    a, b = places
    prompt = prompt_of(7)
    a.engine.begin("r", prompt, LENGTH)
    filler = a.pool.alloc(a.pool.stats().hbm.free)
    a.migrations.migrate("r", "b").wait()
    a.pool.free(filler)
    check(reader, b.engine, "r", prompt)


def test_a_destination_evicts_cached_prompts_for_what_comes_and_never_what_has_come(places, reader):
    a, b = places
    for each in range(63):
        with b.pool.insert(prompt_of(1000 + each, BLOCK), b.pool.alloc(1)):
            pass
    assert b.pool.stats().hbm.free == 0
    prompt = prompt_of(8, 40)
    a.engine.begin("r", prompt, LENGTH)
    a.migrations.migrate("r", "b").wait()
    with pytest.raises(kvpool.OutOfBlocks):
        b.pool.alloc(60)
    check(reader, b.engine, "r", prompt)
