"""Pools of a process follow an engine's sleep all together, or not at all."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from sleeper_kit import Sleeper

import kvpool
from kvpool.engines.sleep import Sleepers, check_routes, suspend_adopted


@pytest.fixture
def pools() -> list[Sleeper]:
    return [Sleeper() for _ in range(3)]


@pytest.fixture
def sleepers(pools: list[Sleeper]) -> Sleepers:
    made = Sleepers()
    for pool in pools:
        made.add(pool)
    return made


def asleep(pools: list[Sleeper]) -> list[bool]:
    return [pool.asleep for pool in pools]


def test_all_sleep_from_before_the_memory_is_unmapped_until_they_are_resumed(pools, sleepers):
    with sleepers.asleep():
        assert asleep(pools) == [True, True, True]
    assert asleep(pools) == [True, True, True]
    sleepers.resume()
    assert asleep(pools) == [False, False, False]


def test_if_the_memory_is_not_unmapped_those_sleep_that_slept_before(pools, sleepers):
    pools[1].suspend()
    with pytest.raises(KeyboardInterrupt), sleepers.asleep():
        raise KeyboardInterrupt
    assert asleep(pools) == [False, True, False]
    assert [pool.resumed for pool in pools] == [1, 0, 1]


def test_nothing_is_unmapped_if_one_cannot_be_suspended(pools, sleepers):
    pools[2].fails = True
    with pytest.raises(kvpool.Busy), sleepers.asleep():
        pytest.fail("unmapped")
    assert asleep(pools) == [False, False, False]


def test_a_pool_that_is_gone_is_not_told(pools, sleepers):
    pools[0].fails = True
    del pools[0]
    gc.collect()
    with sleepers.asleep():
        assert asleep(pools) == [True, True]


def test_the_error_about_routes_names_the_mode_and_the_engine():
    check_routes(("cma", "sock"), "sleep mode", "vLLM")
    with pytest.raises(kvpool.Unsupported, match=r"^sleep mode does not work with the route ucx.* that vLLM has"):
        check_routes(("ucx", "sock"), "sleep mode", "vLLM")


@pytest.mark.parametrize("error", [kvpool.ClosedError("closed"), kvpool.Suspended("asleep"), kvpool.Fenced("alone")])
def test_what_stays_refused_is_not_asked_for_again(error):
    """Only readers of blocks come to an end: a pool that another thread closes stays closed."""
    asked = []

    class Pool:
        closed = suspended = False

        def free(self, addrs):
            asked.append(addrs)
            raise error

    with pytest.raises(type(error)):
        suspend_adopted(Pool(), np.zeros(2, np.uint64), timeout=60)
    assert len(asked) == 1


def test_readers_are_waited_for_until_they_let_go():
    refusals = [kvpool.StateError("a peer reads block 0")] * 3
    done = []

    class Pool:
        closed = suspended = False

        def free(self, addrs):
            if refusals:
                raise refusals.pop()
            done.append("free")

        def suspend(self, *, keep, timeout):
            done.append("suspend")

    assert suspend_adopted(Pool(), np.zeros(2, np.uint64), timeout=60)
    assert done == ["free", "suspend"]
