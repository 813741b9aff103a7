"""A space: several models in one memory, and their quotas."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, prompt
from space_kit import UNIT, fill, layout, space_of

import kvpool
from kvpool import DRAM, HBM, MIXED, KVLayout, RawLayout, Space
from kvpool.policy.multiplexing import Adaptation
from kvpool.space.units import unit_from

KIB = 1 << 10


@pytest.fixture
def space() -> Any:
    with space_of() as made:
        yield made
        made.audit()


# --- the memory ---


@pytest.mark.parametrize(
    ("size", "wanted"), [("8KiB", 8192), ("0.5 MiB", 1 << 19), ("4096", 4096), (12288, 12288), ("0.5KiB", 512)]
)
def test_sizes_are_bytes_or_text(size, wanted):
    with Space(hbm=1 << 20, dram=0, activations=size, huge_pages="never") as space:
        assert space.activations == wanted
        assert space.stats().hbm.capacity == ((1 << 20) - wanted) // UNIT * UNIT


@pytest.mark.parametrize("size", ["8GB", "", "-1", "1e9", "0.3", "nan", -1, 1 << 61, "9999999999999TiB"])
def test_a_size_that_says_nothing_is_refused(size):
    with pytest.raises(kvpool.ArgumentError):
        Space(hbm=size)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"hbm": 8.0}, kvpool.ArgumentTypeError),
        ({"hbm": True}, kvpool.ArgumentTypeError),
        ({"unit": 3 * 4096}, kvpool.ArgumentError),
        ({"unit": 2048}, kvpool.ArgumentError),
        ({"unit": "128KiB"}, kvpool.ArgumentError),
        ({"unit": "automatic"}, kvpool.ArgumentError),
        ({"layouts": [3]}, kvpool.ArgumentTypeError),
        ({"activations": "2MiB"}, kvpool.ArgumentError),
        ({"hbm": 0}, kvpool.ArgumentError),
        ({"hbm": (1 << 36) + 4096, "unit": 4096}, kvpool.ArgumentError),
        ({"models_max": 1}, kvpool.ArgumentError),
        ({"models_max": 17}, kvpool.ArgumentError),
        ({"models_max": "8"}, kvpool.ArgumentTypeError),
        ({"device": "cuda:0"}, kvpool.Unsupported),
        ({"device": 0}, kvpool.ArgumentTypeError),
        ({"copy_thread": 1}, kvpool.ArgumentError),
    ],
)
def test_a_space_of_wrong_arguments_is_refused(arguments, error):
    with pytest.raises(error):
        Space(**({"hbm": "1MiB"} | arguments))


def test_the_unit_is_the_largest_that_wastes_one_percent_at_most():
    def unit(*layouts: RawLayout) -> int:
        with Space(hbm="1MiB", layouts=layouts, huge_pages="never") as space:
            return space.unit_bytes

    assert unit() == 4 * KIB
    assert unit(RawLayout(128 * KIB, 16)) == 64 * KIB
    assert unit(RawLayout(128 * KIB, 16), RawLayout(24 * KIB, 16)) == 8 * KIB
    assert unit(RawLayout(128 * KIB - 1000, 16)) == 64 * KIB
    assert unit(RawLayout(5000, 16)) == 4 * KIB
    assert unit_from("auto", [], 1 << 36) == 4 * KIB
    assert unit_from("auto", [RawLayout(5000, 16)], 1 << 37) == 8 * KIB  # a tier has at most 2^24 units
    llama = KVLayout(10, 2, 64, "float16", 16)  # 8 KiB a layer
    assert unit_from("auto", [llama], 1 << 30) == 16 * KIB
    assert unit_from("auto", [llama], 1 << 30, "layer") == 8 * KIB
    assert unit_from("auto", [llama, RawLayout(64 * KIB, 16)], 1 << 30, "layer") == 8 * KIB
    assert unit_from("auto", [KVLayout(10, 3, 64, "float16", 1)], 1 << 30, "layer") == 4 * KIB  # which load() refuses


def test_a_block_that_would_waste_more_than_a_twentieth_is_refused_unless_allowed(space):
    small = layout(2, bytes_less=500)
    with pytest.raises(kvpool.ArgumentError, match=r"6\.1% of their units"):
        space.load("a", small)
    assert space.models == ()
    pool = space.load("a", small, allow_waste=True)
    assert space.quotas()["a"].waste == pytest.approx(500 / 8192)
    view = pool.tensor(HBM).numpy()
    assert view.shape == (23, 7692)  # a block's number is its first unit
    assert view.strides == (UNIT, 1)


def test_models_write_to_their_own_blocks_of_one_memory(space):
    a = space.load("a", layout(3), reserve=6 * UNIT)
    b = space.load("b", KVLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32", block_tokens=8))
    mine, its = a.alloc(3), b.alloc(3)
    a.tensor(HBM).numpy()[kvpool.block_ids(mine)] = 7
    b.tensor(HBM).numpy()[kvpool.block_ids(its)] = 1.5
    assert (a.tensor(HBM).numpy()[kvpool.block_ids(mine)] == 7).all()
    assert (b.tensor(HBM).numpy()[kvpool.block_ids(its)] == 1.5).all()
    units = np.zeros(24, int)
    for addrs, size in ((mine, 3), (its, 4)):
        for block in kvpool.block_ids(addrs):
            units[block : block + size] += 1
    assert units.sum() == 21
    assert units.max() == 1
    tier = a.stats().hbm
    assert tier.overlapped >= 4
    assert tier.free + tier.active + tier.overlapped == tier.capacity == 8


def test_a_prompt_comes_back_from_dram_with_its_bytes(space):
    a, b = space.load("a", layout(3)), space.load("b", layout(4))
    addrs = a.alloc(2)
    a.tensor(HBM).numpy()[kvpool.block_ids(addrs)] = np.arange(2, dtype=np.uint8)[:, None] + 5
    a.insert(prompt(2), addrs).close()
    taken = b.alloc(6)
    assert kvpool.media(taken).tolist() == [HBM] * 6
    b.free(taken)
    with a.match(prompt(2), into=HBM) as hit:
        assert hit.tokens == 2 * BLOCK
        assert (a.tensor(HBM).numpy()[kvpool.block_ids(hit.addrs)][:, 0] == [5, 6]).all()


# --- models ---


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"layout": 3}, kvpool.ArgumentTypeError),
        ({"name": 3}, kvpool.ArgumentTypeError),
        ({"name": ""}, kvpool.ArgumentError),
        ({"name": "old"}, kvpool.ArgumentError),
        ({"weight": 0}, kvpool.ArgumentError),
        ({"weight": float("nan")}, kvpool.ArgumentError),
        ({"weight": "1"}, kvpool.ArgumentTypeError),
        ({"reserve": 15 * UNIT, "limit": 12 * UNIT}, kvpool.ArgumentError),
        ({"limit": 2 * UNIT}, kvpool.ArgumentError),
        ({"reserve": 22 * UNIT}, kvpool.ArgumentError),
        ({"reserve": -1}, kvpool.ArgumentError),
        ({"dram_reserve": 13 * UNIT}, kvpool.ArgumentError),
        ({"layout": layout(25)}, kvpool.ArgumentError),
        ({"layout": KVLayout(2, 2, 64, "float32", 8, order="discrete")}, kvpool.ArgumentError),
        ({"allow_waste": 1}, kvpool.ArgumentTypeError),
        ({"polcy": "lru"}, kvpool.ArgumentError),
    ],
)
def test_a_model_of_wrong_arguments_is_refused_and_nothing_has_changed(space, arguments, error):
    space.load("old", layout(3), reserve=3 * UNIT)
    before = space.quotas()
    given: dict[str, Any] = {"name": "new", "layout": layout(3)} | arguments
    with pytest.raises(error):
        space.load(given.pop("name"), given.pop("layout"), **given)
    assert space.models == ("old",)
    assert space.quotas() == before
    space.load("new", layout(3), reserve=21 * UNIT)


def test_a_reserve_that_does_not_fit_beside_what_is_active_is_refused_until_it_does(space):
    a = space.load("a", layout(3))
    busy = a.alloc(5)
    with pytest.raises(kvpool.OutOfQuota) as refused:
        space.load("b", layout(4), reserve=12 * UNIT)
    assert (refused.value.requested, refused.value.active, refused.value.capacity) == (12, 15, 24)
    assert refused.value.model == "b"
    a.free(busy[:1])
    space.load("b", layout(4), reserve=12 * UNIT)


def test_more_models_than_the_space_has_room_for_are_refused():
    with space_of(models_max=2) as space:
        a = space.load("a", layout(1))
        space.load("b", layout(1))
        with pytest.raises(kvpool.StateError):
            space.load("c", layout(1))
        space.unload("a")
        del a
        gc.collect()
        space.load("c", layout(1))


def test_the_address_of_another_model_is_not_the_owners(space):
    a, b = space.load("a", layout(3)), space.load("b", layout(3))
    its, mine = a.alloc(1), b.alloc(1)
    for call in (b.free, lambda addrs: b.insert(prompt(1), addrs), b.swap_in):
        with pytest.raises(kvpool.NotOwner):
            call(its)
    a.free(its)
    taken = b.alloc(7)
    with pytest.raises(kvpool.NotOwner):
        b.free(its)
    with pytest.raises(kvpool.StaleAddress):
        a.free(its)
    with pytest.raises(kvpool.NotOwner):
        b.free([*mine, *its])
    b.free([*mine, *taken])


# --- quotas ---


def test_a_reserve_is_there_whatever_the_neighbours_cache(space):
    a = space.load("a", layout(3), reserve=12 * UNIT)
    b = space.load("b", layout(4))
    fill(b, 6)
    assert space.quotas()["b"].hbm.cached == 24 * UNIT
    assert len(a.alloc(4)) == 4
    with pytest.raises(kvpool.OutOfQuota) as refused:
        b.alloc(4)
    assert isinstance(refused.value, kvpool.OutOfBlocks)
    assert (refused.value.model, refused.value.requested, refused.value.limit) == ("b", 16, 24)


def test_a_limit_that_is_raised_again_lets_the_model_grow(space):
    a = space.load("a", layout(3), limit=6 * UNIT)
    held = a.alloc(2)
    for evict in (True, False):
        with pytest.raises(kvpool.OutOfQuota):
            a.alloc(1, evict=evict)
    space.set_quota("a", limit=12 * UNIT)
    assert len(a.alloc(2)) == 2
    space.set_quota("a", limit=3 * UNIT)
    assert space.quotas()["a"].hbm.active == 12 * UNIT
    with pytest.raises(kvpool.OutOfQuota):
        a.alloc(1)
    a.free(held)
    space.set_quota("a", limit=None)
    a.alloc(6)


def test_a_wrong_quota_changes_nothing(space):
    a = space.load("a", layout(3), reserve=6 * UNIT, dram_limit=6 * UNIT)
    space.load("b", layout(4), reserve=8 * UNIT)
    a.alloc(4)
    before = space.quotas()
    wrong: Any
    for wrong in ({"reserve": 18 * UNIT}, {"limit": 3 * UNIT}, {"weight": -1.0}, {"dram_reserve": 9 * UNIT}):
        with pytest.raises(kvpool.ArgumentError):
            space.set_quota("a", **wrong)
    with pytest.raises(kvpool.OutOfQuota):
        space.set_quota("b", reserve=16 * UNIT)
    with pytest.raises(kvpool.ArgumentError, match="no model is called"):
        space.set_quota("c", weight=2.0)
    assert space.quotas() == before


def test_quotas_follow_what_models_need_and_sum_up_to_the_capacity(space):
    a = space.load("a", layout(3))
    space.load("b", layout(4), weight=2.0)
    dice = np.random.default_rng(3)
    for _ in range(50):
        space.adapt(
            {"a": int(dice.integers(0, 9)), "b": int(dice.integers(0, 9))},
            elapsed_s=1.0,
            settings=Adaptation(half_life_s=0.5, band=0.0),
        )
        quotas = space.quotas().values()
        assert sum(each.hbm.quota for each in quotas) == 24 * UNIT
        assert sum(each.dram.quota for each in quotas) == 12 * UNIT
    a.alloc(4)
    for _ in range(8):
        space.adapt(elapsed_s=10.0)
    found = space.quotas()
    assert found["a"].hbm.quota >= 12 * UNIT
    space.unload("b")
    assert space.quotas()["a"].hbm.quota == 24 * UNIT


def test_models_that_all_lack_memory_share_it_by_their_demands(space):
    space.load("a", layout(2))
    space.load("b", layout(4))
    backlog = {"a": 12, "b": 6}  # each needs all of it
    now = Adaptation(half_life_s=0.001, band=0.0)
    space.adapt(backlog, elapsed_s=1.0, settings=now)
    assert [each.hbm.quota for each in space.quotas().values()] == [12 * UNIT, 12 * UNIT]
    space.adapt(backlog, demands={"a": 6.0, "b": 1.0}, elapsed_s=1.0, settings=now)  # 12 units and 4
    assert [each.hbm.quota for each in space.quotas().values()] == [18 * UNIT, 6 * UNIT]
    space.adapt(backlog, demands={"b": 1}, elapsed_s=1.0, settings=now)
    assert [each.hbm.quota for each in space.quotas().values()] == [0, 24 * UNIT]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"backlog": {"c": 1}}, kvpool.ArgumentError),
        ({"backlog": {"a": -1}}, kvpool.ArgumentError),
        ({"backlog": {"a": 1.5}}, kvpool.ArgumentTypeError),
        ({"backlog": {"a": True}}, kvpool.ArgumentTypeError),
        ({"backlog": {3: 1}}, kvpool.ArgumentTypeError),
        ({"backlog": [1]}, kvpool.ArgumentTypeError),
        ({"demands": {"c": 1.0}}, kvpool.ArgumentError),
        ({"demands": {"a": -1.0}}, kvpool.ArgumentError),
        ({"demands": {"a": float("nan")}}, kvpool.ArgumentError),
        ({"demands": {"a": "1"}}, kvpool.ArgumentTypeError),
        ({"demands": [1.0]}, kvpool.ArgumentTypeError),
        ({"settings": 3}, kvpool.ArgumentTypeError),
        ({"elapsed_s": -1}, kvpool.ArgumentError),
        ({"elapsed_s": "1"}, kvpool.ArgumentTypeError),
    ],
)
def test_wrong_observations_change_no_quota(space, arguments, error):
    space.load("a", layout(3))
    before = space.quotas()
    with pytest.raises(error):
        space.adapt(**arguments)
    assert space.quotas() == before


def test_no_place_for_a_block_is_told_from_too_little_memory():
    with space_of(16, 0) as space:
        small, large = space.load("small", layout(1)), space.load("large", layout(4))
        addrs = small.alloc(16)
        at = {int(kvpool.block_ids(addrs[i : i + 1])[0]): addrs[i] for i in range(16)}
        keep = [at.pop(unit) for unit in (3, 7, 11, 15)]
        small.free(list(at.values()))
        with pytest.raises(kvpool.OutOfBlocks) as refused:
            large.alloc(1)
        assert not isinstance(refused.value, kvpool.OutOfQuota)
        assert refused.value.fragmented is True
        assert refused.value.largest_run == 3
        small.free(keep[1:2])
        assert len(large.alloc(1)) == 1


def test_mixed_blocks_go_to_dram_when_others_reserve_hbm(space):
    a = space.load("a", layout(3))
    space.load("b", layout(4), reserve=20 * UNIT)
    assert kvpool.media(a.alloc(5, medium=MIXED)).tolist() == [HBM] + [DRAM] * 4


# --- what is refused changes nothing ---


@pytest.mark.parametrize("reserve", [1 << 59, 25 * UNIT, "1TiB"])
def test_a_reserve_above_the_capacity_is_refused_in_a_full_space_too(reserve):
    with space_of(models_max=2) as space:
        space.load("a", layout(1))
        with pytest.raises(kvpool.ArgumentError):
            space.set_quota("a", reserve=reserve)
        b = space.load("b", layout(1))
        for _ in range(2):
            with pytest.raises(kvpool.ArgumentError) as refused:
                space.load("c", layout(1), reserve=reserve)
            assert refused.value.capacity == 24
        with pytest.raises(kvpool.ArgumentError):
            space.load("c", layout(1), dram_reserve=reserve)
        assert space.models == ("a", "b")
        assert len(b.alloc(24)) == 24


def test_a_load_that_is_refused_registers_no_model(space):
    a = space.load("a", layout(1), reserve=4 * UNIT)
    addrs = a.alloc(20)
    with pytest.raises(kvpool.OutOfQuota):
        space.load("b", layout(1), reserve=8 * UNIT)
    assert space.models == ("a",)
    a.free(addrs)
    space.load("b", layout(1), reserve=8 * UNIT)


@pytest.mark.parametrize("blocks", [1 << 80, 1 << 1100], ids=["80 bits", "1100 bits"])
def test_a_backlog_above_the_capacity_counts_as_the_capacity(space, blocks):
    space.load("a", layout(1))
    space.load("b", layout(1))
    space.adapt({"a": blocks, "b": 24}, elapsed_s=1000.0)
    assert space.quotas()["a"].hbm.quota == space.quotas()["b"].hbm.quota == 12 * UNIT


def test_an_allocation_that_finds_no_places_drops_no_caches(space):
    a = space.load("a", layout(1))
    addrs = a.alloc(24)
    holds = [a.insert(prompt(1, at + 1), addrs[at : at + 1]) for at in range(24)]
    for at, hold in enumerate(holds):
        if kvpool.block_ids(addrs)[at] % 8:
            hold.close()  # one in each place stays
    b = space.load("b", layout(8))
    with pytest.raises(kvpool.OutOfBlocks) as refused:
        b.alloc(1)
    assert refused.value.fragmented
    assert space.quotas()["a"].hbm.cached == 21 * UNIT
    for hold in holds:
        hold.close()


def test_what_the_allocator_takes_is_counted_once_for_all_models():
    sizes = []
    for units in (4096, 8192):
        with Space(units * UNIT, unit=UNIT, huge_pages="never") as space:
            space.load("a", layout(8))
            space.load("b", layout(4))
            stats = space.stats()
            sizes.append(stats.metadata_bytes)
            assert stats.metadata_bytes > sum(pool.metadata_bytes for pool in stats.models.values())
    # 8 bytes a unit, and for each block of a model 20, and 2 for its readers.
    assert sizes[1] - sizes[0] == 4096 * 8 + (512 + 1024) * 22
