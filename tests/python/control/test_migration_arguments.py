"""Values out of range, not finite or of no meaning: a typed error before anything is taken."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from control.migration_kit import LENGTH, check, eventually, prompt_of
from control.migration_pair import make, reader
from control.rebalancing_kit import World
from kit import small_pool

import kvpool
from kvpool.control.migration import Migrations, Timing
from kvpool.control.rebalancing import Rebalancer

__all__ = ["make", "reader"]

BAD_SECONDS = [0, -1.0, math.nan, math.inf, "1", True, np.bool_(True), np.float32(-1), Fraction(10**400)]


@pytest.mark.parametrize("value", BAD_SECONDS)
@pytest.mark.parametrize("name", ["repeat_s", "silence_s", "stop_s"])
def test_times_of_the_protocol_are_finite_and_above_0(name, value):
    with pytest.raises(kvpool.ArgumentError, match=name):
        Timing(**{name: value})


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(3), np.float64(0.25), Fraction(1, 2)])
@pytest.mark.parametrize("name", ["repeat_s", "silence_s", "stop_s"])
def test_times_of_the_protocol_are_numbers_of_any_kind_and_become_pythons(name, value):
    timing = Timing(**{name: value})
    assert getattr(timing, name) == value
    assert type(getattr(timing, name)) is float


@pytest.mark.parametrize("value", BAD_SECONDS)
def test_a_timeout_that_cannot_be_moves_nothing(make, reader, value):
    a, _ = make()
    a.engine.begin("r", prompt_of(1), LENGTH)
    with pytest.raises(kvpool.ArgumentError, match="timeout"):
        a.migrations.migrate("r", "b", timeout=value)
    assert not a.migrations.under_way()
    check(reader, a.engine, "r", prompt_of(1))


def test_numpys_numbers_migrate_a_request(make, reader):
    timing = Timing(np.float32(0.05), np.int64(5), np.float32(5))
    a, b = make({"arrivals_max": np.int32(1), "bytes_per_s": np.float32(1e9)}, timing=timing)
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.migrations.migrate("r", "b", timeout=np.float32(20)).wait(20)
    check(reader, b.engine, "r", prompt_of(1))


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
        ("epoch_s", None), ("capacity", 0), ("capacity", 9.5), ("capacity", np.True_), ("growth", -1),
        ("moves_at_once", 0), ("moves_at_once", np.int64(0)),
    ],
)  # fmt: skip
def test_a_rebalancer_that_cannot_be_says_nothing(name, value):
    (one,) = World().add_all({"a": 30})
    with pytest.raises(kvpool.ArgumentError, match=name):
        Rebalancer(one.migrations, one.engine, one.cluster, **{"capacity": 96} | {name: value})
    assert one.record == {}


def test_a_rebalancer_of_numpys_numbers_says_what_it_has():
    (one,) = World().add_all({"a": 30})
    numbers = {"capacity": np.int64(96), "growth": np.int32(1), "moves_at_once": np.int8(2), "epoch_s": np.float32(0.5)}
    with Rebalancer(one.migrations, one.engine, one.cluster, move_s=np.int64(5), **numbers):
        eventually(lambda: one.record)
