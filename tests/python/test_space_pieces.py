"""Blocks of a space that lie in several pieces, one for each layer."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, LONG, prompt
from space_kit import UNIT, comb, layered, layout, space_of

import kvpool
from kvpool import DRAM, HBM, KVLayout


@pytest.fixture
def space() -> Any:
    with space_of() as made:
        yield made
        made.audit()


def write(pool: Any, addrs: Any, value: int, medium: kvpool.Medium = HBM) -> None:
    """Each layer of each block gets another number."""
    view = pool.pages(medium).numpy()
    table = pool.block_table(addrs)
    for layer, units in enumerate(table):
        for at, unit in enumerate(units):
            view[unit] = 1000 * value + 100 * at + layer


def is_written(pool: Any, addrs: Any, value: int, medium: kvpool.Medium = HBM) -> bool:
    view = pool.pages(medium).numpy()
    table = pool.block_table(addrs)
    return all(
        (view[unit] == 1000 * value + 100 * at + layer).all()
        for layer, units in enumerate(table)
        for at, unit in enumerate(units)
    )


def test_a_block_that_finds_no_run_lies_in_a_piece_for_each_layer(space):
    small = space.load("small", layout(1))
    held = comb(small, 24)
    small.tensor().numpy()[kvpool.block_ids(held)] = 77
    large = space.load("large", layered(4), pieces="layer")
    assert large.stats().hbm.free == 3
    addrs = large.alloc(3)
    table = large.block_table(addrs)
    assert table.shape == (4, 3)
    assert table.dtype == np.int32
    assert sorted(table.ravel().tolist()) == list(range(0, 24, 2))
    assert (table.min(axis=0) == kvpool.block_ids(addrs)).all()
    write(large, addrs, 1)
    assert is_written(large, addrs, 1)
    assert (small.tensor().numpy()[kvpool.block_ids(held)] == 77).all()
    with pytest.raises(kvpool.OutOfQuota):
        large.alloc(1)
    large.free(addrs[1:])
    assert space.stats().hbm.free == 8 * UNIT
    assert is_written(large, addrs[:1], 1)
    with pytest.raises(kvpool.StaleAddress):
        large.block_table(addrs)
    with pytest.raises(kvpool.NotOwner):
        large.block_table(held)


def test_a_first_block_that_is_freed_while_it_is_read_passes_the_audit():
    with space_of(audit=True) as space:
        pool = space.load("a", layered(1, 2), audit=True)
        addrs = pool.alloc(1)
        assert kvpool.block_ids(addrs).tolist() == [0]
        sequence = pool.sequence(addrs)
        pool.free(addrs)
        pool.free(pool.alloc(1))
        space.audit()
        sequence.close()
        assert space.audit().hbm.free == 24 * UNIT


@pytest.mark.parametrize("pieces", [None, ["layer"], np.array(["layer", "whole"]), 1])
def test_pieces_that_are_no_word_are_of_a_wrong_type(space, pieces):
    with pytest.raises(kvpool.ArgumentTypeError, match="pieces must be"):
        kvpool.Space(24 * UNIT, 12 * UNIT, pieces=pieces)
    with pytest.raises(kvpool.ArgumentTypeError, match="pieces must be"):
        space.load("a", layered(4), pieces=pieces)
    assert space.models == ()


def test_a_block_that_finds_a_run_is_whole(space):
    pool = space.load("a", layered(4), pieces="layer")
    addrs = pool.alloc(2)
    assert pool.block_table(addrs).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert pool.pages().shape == (24, 2, 2, BLOCK, 64)
    assert pool.pages().strides[0] == UNIT
    whole = space.load("b", layered(3))
    assert whole.block_table(whole.alloc(2)).tolist() == [8, 11]
    with pytest.raises(kvpool.StateError):
        whole.pages()


def test_a_model_of_one_layer_has_the_views_that_its_pieces_say(space):
    layered_pool = space.load("layer", layered(1, 2), pieces="layer")
    addrs = layered_pool.alloc(2)
    assert layered_pool.block_table(addrs).tolist() == [[0, 2]]
    write(layered_pool, addrs, 2)
    assert is_written(layered_pool, addrs, 2)
    whole = space.load("whole", layered(1, 2))
    assert whole.block_table(whole.alloc(2)).tolist() == [4, 6]
    with pytest.raises(kvpool.StateError):
        whole.pages()
    layered_pool.free(addrs)
    space.unload("layer", keep="dram")
    with pytest.raises(kvpool.ArgumentError, match="pieces"):
        space.load("layer", layered(1, 2))
    assert space.load("layer", layered(1, 2), pieces="layer") is layered_pool


def test_a_prompt_goes_to_dram_and_back_with_all_of_its_pieces(space):
    small = space.load("small", layout(1))
    comb(small, 24)
    comb(small, 12, DRAM)
    pool = space.load("a", layered(3), pieces="layer")
    addrs = pool.alloc(2)
    assert len(set(np.diff(pool.block_table(addrs), axis=0).ravel().tolist()) - {1}) > 0
    write(pool, addrs, 5)
    pool.insert(prompt(2), addrs).close()
    assert len(pool.swap_out(2)) == 2
    with pool.match(prompt(2)) as hit:
        assert kvpool.media(hit.addrs).tolist() == [DRAM] * 2
        assert is_written(pool, hit.addrs, 5, DRAM)
    others = pool.alloc(3)
    pool.pages().numpy()[pool.block_table(others)] = -1  # over what was there
    pool.free(others)
    with pool.match(prompt(2), into=HBM) as hit:
        assert kvpool.media(hit.addrs).tolist() == [HBM] * 2
        assert is_written(pool, hit.addrs, 5)


def test_blocks_in_pieces_are_zeroed_when_that_is_asked_for(space):
    comb(space.load("small", layout(1)), 24)
    pool = space.load("a", layered(3), pieces="layer", zero_on_alloc=True)
    addrs = pool.alloc(4)
    write(pool, addrs, 3)
    pool.free(addrs)
    again = pool.alloc(4)
    assert not pool.pages().numpy()[pool.block_table(again)].any()


def test_what_cannot_read_pieces_is_refused(space):
    pool = space.load("a", layered(2), pieces="layer")
    addrs = pool.alloc(1)
    for call in (pool.tensor, lambda: kvpool.KeyedCache(pool, 2), lambda: pool.sequence(addrs)):
        with pytest.raises(kvpool.Unsupported):
            call()
    pool.free(addrs)
    pool.free(pool.alloc(3))


def test_an_allocation_that_finds_no_place_for_pieces_says_what_it_looked_for():
    with space_of() as space:
        comb(space.load("small", layout(1)), 24)
        pool = space.load("a", layered(2, 2), pieces="layer")
        with pytest.raises(kvpool.OutOfBlocks, match="one run of units or in 2 pieces, each in one run of 2 units"):
            pool.alloc(1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"pieces": "layer", "layout": layout(4)},
        {"pieces": "layer", "layout": KVLayout(4, 1, 64, "float32", BLOCK)},
        {"pieces": "head"},
    ],
)
def test_a_layout_that_cannot_be_cut_is_refused(space, arguments):
    given: dict[str, Any] = {"layout": layered(2)} | arguments
    with pytest.raises(kvpool.ArgumentError):
        space.load("a", given.pop("layout"), **given)
    assert space.models == ()


def test_a_kept_model_comes_back_with_the_pieces_that_it_had(space):
    pool = space.load("a", layered(2), pieces="layer")
    pool.insert(prompt(1), pool.alloc(1)).close()
    space.unload("a", keep="dram")
    with pytest.raises(kvpool.ArgumentError, match="pieces"):
        space.load("a", layered(2))
    assert space.load("a", layered(2), pieces="layer") is pool


def test_a_block_that_a_neighbour_needs_goes_with_all_of_its_pieces_and_no_other_block_goes():
    with space_of(audit=False) as space:  # an audit would find what this test is about
        small = space.load("small", layout(1))
        between = comb(small, 24)
        pool = space.load("a", layered(3), pieces="layer")
        blocks = pool.alloc(2)
        write(pool, blocks, 6)
        for at in range(2):
            pool.insert(prompt(1, at + 1), blocks[at : at + 1]).close()
        # One unit between two pieces of the second block becomes free: a place with either of them.
        units = pool.block_table(blocks)[:, 1]
        small.free(between[kvpool.block_ids(between) == units[1] + 1])
        wide = space.load("wide", layout(2))
        (taken,) = kvpool.block_ids(wide.alloc(1))
        wide.tensor().numpy()[taken] = 1
        assert pool.match(prompt(1, 2)).tokens == 0
        with pool.match(prompt(1, 1)) as hit:
            assert hit.tokens == BLOCK
            view = pool.pages().numpy()
            for layer, unit in enumerate(pool.block_table(hit.addrs)[:, 0]):
                assert (view[unit] == 6000 + layer).all()
        assert pool.stats().hbm.historical == 1


def places(units: int, held: list[Any], size: int) -> int:
    """How many runs of `size` units lie in a tier beside the held blocks."""
    taken = np.zeros(units, bool)
    for pool, addrs, _ in held:
        of_layer = pool.kv_layout.block_bytes // pool.kv_layout.layers // UNIT
        for first in pool.block_table(addrs).ravel():
            assert not taken[first : first + of_layer].any()
            taken[first : first + of_layer] = True
    runs = "".join("x" if one else "." for one in taken).split("x")
    return sum(len(run) // size for run in runs)


@pytest.mark.parametrize(
    "sizes", [((4, 1), (7, 1), (1, 1)), ((3, 2), (2, 3), (2, 5))], ids=["layers of a unit", "layers of 2, 3, 5 units"]
)
def test_no_allocation_fails_while_free_and_cached_places_suffice(sizes):
    units = 60 if sizes[0][1] == 1 else 90
    for seed in range(20 if LONG else 3):
        dice = random.Random(seed)
        with space_of(units, 24) as space:
            pools: list[Any] = [space.load(f"{at}", layered(*size), pieces="layer") for at, size in enumerate(sizes)]
            held: list[tuple[Any, Any, int]] = []
            for step in range(200):
                pool = dice.choice(pools)
                layers, size = sizes[pools.index(pool)]
                n = dice.randint(1, 3)
                full = False
                try:
                    addrs = pool.alloc(n)
                except kvpool.OutOfQuota:
                    full = True
                except kvpool.OutOfBlocks:  # only where blocks in use leave too few runs of a layer's units
                    full = True
                    assert size > 1
                    assert places(units, held, size) < n * layers
                else:
                    write(pool, addrs, step)
                    held.append((pool, addrs, step))
                while len(held) > 6 or (full and held):
                    full = False
                    pool, addrs, value = held.pop(dice.randrange(len(held)))
                    assert is_written(pool, addrs, value)
                    if dice.random() < 0.5:
                        pool.free(addrs)
                    else:
                        pool.insert(prompt(len(addrs), step), addrs, free_duplicates=True).close()
            space.audit()
