"""Values out of range, not finite or of no meaning: a typed error before anything is taken."""

from __future__ import annotations

import math

import pytest
from control.rebalancing_kit import World
from kit import small_pool

import kvpool
from kvpool.control.migration import Migrations, Timing
from kvpool.control.rebalancing import Rebalancer

BAD_SECONDS = [0, -1.0, math.nan, math.inf, "1", True]


@pytest.mark.parametrize("value", BAD_SECONDS)
@pytest.mark.parametrize("name", ["repeat_s", "silence_s", "stop_s"])
def test_times_of_the_protocol_are_finite_and_above_0(name, value):
    with pytest.raises(kvpool.ArgumentError, match=name):
        Timing(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("medium", 7), ("medium", kvpool.DISK), ("arrivals_max", -1), ("arrivals_max", 1.5), ("bytes_per_s", math.nan)],
)
def test_migrations_that_cannot_be_take_nothing_and_others_can_be_made(name, value):
    with small_pool(8, 0, name="a") as pool:
        pool.peers.listen("unix:@kvpool-migration-arguments")
        with pytest.raises(kvpool.ArgumentError, match=name):
            Migrations(pool, None, **{name: value})
        assert pool.stats().hbm.free == 8
        Migrations(pool, None).close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("epoch_s", value) for value in BAD_SECONDS),
        *(("move_s", value) for value in BAD_SECONDS),
        ("capacity", 0), ("capacity", 9.5), ("growth", -1), ("moves_at_once", 0),
    ],
)  # fmt: skip
def test_a_rebalancer_that_cannot_be_says_nothing(name, value):
    (one,) = World().add_all({"a": 30})
    with pytest.raises(kvpool.ArgumentError, match=name):
        Rebalancer(one.migrations, one.engine, one.cluster, **{"capacity": 96} | {name: value})
    assert one.record == {}
