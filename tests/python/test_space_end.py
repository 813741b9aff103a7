"""How a model leaves a space, what is kept of it, and how a space ends; and models as members of a cluster."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from attach_kit import url  # noqa: F401  (a fixture)
from kit import BLOCK, prompt, run_script
from space_kit import UNIT, fill, layout, space_of

import kvpool
from kvpool import DRAM, HBM


@pytest.fixture
def space() -> Any:
    with space_of() as made:
        yield made
        made.audit()


@pytest.mark.parametrize("held", ["pin", "block"])
def test_a_model_in_use_is_not_unloaded_and_goes_on(space, held):
    a = space.load("a", layout(3), reserve=6 * UNIT)
    fill(a, 2)
    before = space.quotas()
    holds: Any = a.match(prompt(1, 1)) if held == "pin" else a.alloc(1)
    with pytest.raises(kvpool.DeadlineExceeded):
        space.unload("a", drain=0.02)
    assert space.models == ("a",)
    assert space.quotas()["a"].hbm.reserve == before["a"].hbm.reserve
    a.free(a.alloc(2))
    with a.match(prompt(1, 2)) as hit:
        assert hit.tokens == BLOCK
    if held == "pin":
        holds.close()
    else:
        a.free(holds)
    space.unload("a", drain=0)
    assert space.models == ()
    assert a.closed
    assert space.stats().hbm.free == 24 * UNIT


def test_a_model_is_unloaded_as_soon_as_its_last_block_is_free(space):
    a = space.load("a", layout(3))
    addrs = a.alloc(2)
    worker = threading.Thread(target=space.unload, args=("a",))
    worker.start()
    for _ in range(20000):
        try:
            a.free(a.alloc(1))
            time.sleep(0.001)
        except kvpool.OutOfQuota:
            break
    else:
        pytest.fail("a model that is being unloaded still gets blocks")
    with pytest.raises(kvpool.StateError):
        space.unload("a")
    a.free(addrs)
    worker.join(20)
    assert not worker.is_alive()
    assert a.closed


def test_the_cache_of_an_unloaded_model_is_kept_in_dram_until_it_is_loaded_again(space):
    a, b = space.load("a", layout(3), reserve=12 * UNIT), space.load("b", layout(4))
    addrs = a.alloc(3)
    a.tensor(HBM).numpy()[kvpool.block_ids(addrs)] = 9
    a.insert(prompt(3), addrs).close()
    space.unload("a", keep="dram")
    assert space.models == ("b",)
    assert space.quotas()["a"].kept
    assert space.quotas()["a"].hbm.cached == 0
    assert space.quotas()["a"].dram.cached == 9 * UNIT
    assert len(b.alloc(6)) == 6  # its reserve went with it
    with pytest.raises(kvpool.OutOfQuota):
        a.alloc(1)
    with pytest.raises(kvpool.StateError):
        space.set_quota("a", weight=2.0)
    with pytest.raises(kvpool.LayoutMismatch):
        space.load("a", layout(4))
    with pytest.raises(kvpool.OutOfQuota):
        space.load("a", layout(3), reserve=3 * UNIT)
    assert space.quotas()["a"].kept
    assert space.load("a", layout(3)) is a
    with a.match(prompt(3)) as hit:
        assert hit.tokens == 3 * BLOCK
        assert (a.tensor(DRAM).numpy()[kvpool.block_ids(hit.addrs)] == 9).all()


def test_what_was_used_last_is_kept(space):
    a = space.load("a", layout(3), dram_limit=6 * UNIT)
    fill(a, 6)
    a.match(prompt(1, 2)).close()
    space.unload("a", keep="dram")
    a = space.load("a", layout(3))
    found = [name for name in range(1, 7) if a.match(prompt(1, name)).tokens]
    assert found == [2, 6]


def test_a_kept_cache_goes_when_others_need_the_room_and_can_be_dropped(space):
    a, b = space.load("a", layout(3)), space.load("b", layout(4))
    fill(a, 4)
    space.unload("a", keep="dram")
    assert len(b.alloc(3, DRAM)) == 3
    assert space.quotas()["a"].dram.cached == 0
    space.unload("a", keep="none")
    assert list(space.quotas()) == ["b"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": "b"}, kvpool.ArgumentError),
        ({"name": 3}, kvpool.ArgumentTypeError),
        ({"keep": "hbm"}, kvpool.ArgumentError),
        ({"drain": -1}, kvpool.ArgumentError),
        ({"drain": "1"}, kvpool.ArgumentTypeError),
    ],
)
def test_a_wrong_unload_changes_nothing(space, arguments, error):
    a = space.load("a", layout(3))
    with pytest.raises(error):
        space.unload(**({"name": "a"} | arguments))
    a.alloc(1)


def test_a_pool_that_was_closed_frees_its_cache_and_can_be_unloaded(space):
    a, b = space.load("a", layout(3), reserve=12 * UNIT), space.load("b", layout(4))
    fill(a, 8)
    a.close()
    assert len(b.alloc(6)) == 6
    space.unload("a")
    assert space.models == ("b",)


def test_a_closed_space_ends_its_pools_and_says_so():
    space = space_of()
    a = space.load("a", layout(3))
    view = a.tensor(HBM).numpy()
    space.close()
    space.close()
    assert a.closed
    assert repr(space) == "<Space closed>"
    for call in (space.stats, space.audit, space.quotas, space.adapt, lambda: space.load("b", layout(3))):
        with pytest.raises(kvpool.ClosedError):
            call()
    with pytest.raises(kvpool.ClosedError):
        a.alloc(1)
    view[:] = 1  # views stay valid


def test_in_a_forked_child_every_call_of_a_space_raises_fork_error():
    run_script(
        """
import os
import kvpool
from space_kit import layout, space_of

space = space_of()
pool = space.load("a", layout(3))
child = os.fork()
if child == 0:
    calls = [
        space.stats, space.audit, space.quotas, space.adapt, lambda: space.models, lambda: space.load("b", layout(3)),
        lambda: space.unload("a"), lambda: space.set_quota("a", weight=2.0), lambda: pool.alloc(1),
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except kvpool.ForkError:
            refused += 1
    space.close()
    os._exit(0 if refused == len(calls) and "another process" in repr(space) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
pool.alloc(1)
"""
    )


def test_models_of_a_space_are_members_of_a_cluster_each_and_send_blocks(url):  # noqa: F811
    clusters = [kvpool.Cluster.join(url, heartbeat=0.5) for _ in range(3)]
    try:
        with space_of() as space, kvpool.Pool(layout(3), 8, 8, huge_pages="never") as other:
            a, b = space.load("a", layout(3)), space.load("b", layout(4))
            for pool, cluster, name in ((a, clusters[0], "a"), (b, clusters[1], "b"), (other, clusters[2], "other")):
                pool.attach(cluster, name=name)
            clusters[0].wait_for(n=3, timeout=60)
            mine, its = a.alloc(2), b.alloc(1)
            assert kvpool.decode_address(mine[0]).instance != kvpool.decode_address(its[0]).instance
            with pytest.raises(kvpool.NotOwner):
                b.swap_in(mine)
            a.tensor(HBM).numpy()[kvpool.block_ids(mine)] = 11
            a.transfer_with_insert("other", prompt(2), mine).wait(20)
            with other.match(prompt(2)) as hit:
                assert hit.tokens == 2 * BLOCK
                assert (other.tensor(HBM).numpy()[kvpool.block_ids(hit.addrs)] == 11).all()
            a.free(mine)
            lent = other.alloc(2, instance="a")
            with pytest.raises(kvpool.DeadlineExceeded):
                space.unload("a", drain=0.05)
            other.free(lent)
            space.unload("a", drain=20)
            assert a.closed
    finally:
        for cluster in clusters:
            cluster.close()


def test_a_model_receives_blocks_at_any_units_from_a_pool_whose_blocks_are_units(url):  # noqa: F811
    clusters = [kvpool.Cluster.join(url, heartbeat=0.5) for _ in range(2)]
    try:
        with space_of() as space, kvpool.Pool(layout(3), 8, 8, huge_pages="never") as plain:
            small = space.load("small", layout(1))
            model = space.load("model", layout(3))
            # So that the model's blocks lie at units that are no multiples of three.
            held = small.alloc(24)
            units = kvpool.block_ids(held)
            free = np.isin(units, [1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 14, 15])
            small.free(held[free])
            held = held[~free]
            small.tensor().numpy()[kvpool.block_ids(held)] = 77
            plain.attach(clusters[0], name="plain")
            model.attach(clusters[1], name="model")
            clusters[0].wait_for(n=2, timeout=60)
            addrs = plain.alloc(4)
            view = plain.tensor(HBM).numpy()
            rows = kvpool.block_ids(addrs)
            view[rows] = np.random.default_rng(4).integers(1, 70, view[rows].shape, view.dtype)
            plain.transfer_with_insert("model", prompt(4), addrs).wait(20)
            with model.match(prompt(4)) as hit:
                assert hit.tokens == 4 * BLOCK
                assert sorted(kvpool.block_ids(hit.addrs).tolist()) == [1, 5, 10, 13]
                assert (model.tensor(HBM).numpy()[kvpool.block_ids(hit.addrs)] == view[rows]).all()
            assert (small.tensor().numpy()[kvpool.block_ids(held)] == 77).all()
    finally:
        for cluster in clusters:
            cluster.close()


# --- pools that were closed ---


def test_the_cache_of_a_closed_pool_goes_with_the_last_match(space):
    a, b = space.load("a", layout(1)), space.load("b", layout(1), reserve=4 * UNIT)
    addrs = a.alloc(20)
    holds = [a.insert(prompt(1, at + 1), addrs[at : at + 1]) for at in range(20)]
    a.close()
    assert space.quotas()["a"].hbm.active == 20 * UNIT
    for hold in holds:
        hold.close()
    assert space.stats().hbm.free == 24 * UNIT
    assert len(b.alloc(24)) == 24


def test_a_closed_pool_gets_no_quotas_and_leaves_its_reserve_to_others(space):
    a = space.load("a", layout(1), reserve=16 * UNIT)
    a.close()
    for change in ({"weight": 2.0}, {"reserve": 16 * UNIT}):
        with pytest.raises(kvpool.StateError):
            space.set_quota("a", **change)
    assert space.quotas()["a"].hbm.reserve == 0
    b = space.load("b", layout(1), reserve=16 * UNIT)
    space.adapt()
    assert space.quotas()["a"].hbm.quota == 0
    assert len(b.alloc(24)) == 24


def test_the_core_gives_a_closed_pool_no_rules(space):
    a = space.load("a", layout(1))
    a.close()
    with pytest.raises(kvpool.StateError):
        space._core._set_rules(a._space_number, "a", (8, 24, 0), (0, 12, 0))
    assert space.quotas()["a"].hbm.reserve == 0


def test_a_kept_model_whose_pool_was_closed_gets_a_new_one(space):
    a = space.load("a", layout(1))
    fill(a, 3)
    space.unload("a", keep="dram")
    a.close()
    b = space.load("a", layout(2), reserve=8 * UNIT)
    assert b is not a
    assert len(b.alloc(4)) == 4
    assert space.models == ("a",)


def test_a_load_that_is_refused_keeps_a_model_whose_pool_was_closed(space):
    a, b = space.load("a", layout(1)), space.load("b", layout(1))
    space.unload("a", keep="dram")
    a.close()
    b.alloc(20)
    before = space.quotas()
    with pytest.raises(kvpool.OutOfQuota):
        space.load("a", layout(1), reserve=8 * UNIT)
    assert space.quotas() == before


def test_a_kept_pool_keeps_its_settings_and_others_are_refused(space):
    a = space.load("a", layout(1), policy="fifo")
    space.unload("a", keep="dram")
    with pytest.raises(kvpool.ArgumentError, match="policy"):
        space.load("a", layout(1), policy="lru")
    assert space.quotas()["a"].kept
    assert space.load("a", layout(1), policy="fifo") is a


@pytest.mark.parametrize("keep", ["dram", "none"])
def test_a_space_that_is_closed_ends_an_unload(keep):
    space = space_of()
    a = space.load("a", layout(1))
    addrs = a.alloc(2)
    failed: list[Exception] = []

    def unload() -> None:
        try:
            space.unload("a", keep=keep)
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=unload)
    worker.start()
    for _ in range(20000):  # until it has begun
        try:
            a.free(a.alloc(1))
            time.sleep(0.001)
        except kvpool.OutOfQuota:
            break
    space.close()
    worker.join(20)
    assert not worker.is_alive()
    assert failed == []
    assert len(addrs) == 2
