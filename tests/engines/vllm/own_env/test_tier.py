"""KvpoolTier under vLLM's own manager and primary tier, without an engine."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tier_kit import BLOCK_BYTES, Offloading, config, key, keys
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

import kvpool
from kvpool.engines.vllm import TIER, register
from kvpool.engines.vllm.tier import KvpoolTier

PRIMARY = 4  # blocks
ANYONE = ReqContext(req_id="anyone")


@pytest.fixture
def offloading() -> Iterator[Offloading]:
    made = Offloading(PRIMARY)
    yield made
    made.close()


def job(number: int, own: list[Any], chunks: list[int], loads: bool = False) -> TransferJob:
    return TransferJob(number, own, np.array(chunks, np.int32), loads, ANYONE)


def results(tier: KvpoolTier) -> dict[int, Any]:
    tier.drain_jobs()
    return {each.job_id: each for each in tier.get_finished_jobs()}


def test_it_is_a_tier_of_vllm_by_name() -> None:
    register()
    register()  # vLLM calls it in each process, and may call it twice
    assert SecondaryTierFactory.get_tier_class({"type": TIER}) is KvpoolTier
    assert issubclass(KvpoolTier, SecondaryTierManager)
    assert not KvpoolTier.__abstractmethods__
    own = {name for name in vars(KvpoolTier) if not name.startswith("_")}
    assert own <= set(dir(SecondaryTierManager))


def test_what_the_primary_tier_has_dropped_comes_back(offloading: Offloading) -> None:
    offloading.store(keys(0, 3))
    for first in range(10, 19, 3):
        offloading.store(keys(first, 3))
    context = offloading.request()
    assert offloading.manager.primary_tier.lookup(key(0), context) is LookupResult.MISS
    assert offloading.manager.lookup(key(0), context) is LookupResult.HIT_PENDING  # from kvpool's tier
    offloading.step()
    assert offloading.found([*keys(0, 3), key(99)]) == [True, True, True, False]


def test_keys_of_any_hash_are_kept_apart(offloading: Offloading) -> None:
    own = [key(1), key(1, hashlib.md5), key(1, hashlib.sha512)]
    assert len({len(name) for name in own}) == 3
    offloading.store(own)
    offloading.store(keys(10, 4))
    assert offloading.found(own) == [True] * 3
    assert offloading.found([key(2, hashlib.md5)]) == [False]


def test_the_coldest_blocks_make_room_and_of_a_prompt_the_end() -> None:
    offloading = Offloading(PRIMARY, {"dram_blocks": 8})
    for first in (0, 10, 20):
        offloading.store(keys(first, 3))
    assert offloading.found(keys(0, 3)) == [True, True, False]
    assert offloading.found(keys(10, 3)) == [True] * 3
    offloading.tier.touch(keys(0, 2), ANYONE)
    offloading.store(keys(30, 3))
    stored = offloading.tier._store.cache.exists(offloading.tier._keys.of([*keys(0, 2), *keys(20, 3)]))
    assert stored.tolist() == [True, True, False, False, False]
    offloading.close()


def test_a_prompt_above_the_room_keeps_its_beginning() -> None:
    offloading = Offloading(8, {"dram_blocks": 3})
    offloading.store(keys(0, 6))
    offloading.store(keys(10, 1))
    stored = offloading.tier._store.cache.exists(offloading.tier._keys.of(keys(0, 6)))
    assert stored.tolist() == [True, True, False, False, False, False]
    offloading.close()


@pytest.mark.parametrize("error", [kvpool.DeviceLost("the test says so"), ValueError("a bug")])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_load_that_fails_is_told_and_has_no_wrong_content(
    offloading: Offloading, failing: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloading.store(keys(0, 3))
    offloading.store(keys(10, 4))
    store = offloading.tier._store
    load = store.load
    (lost,) = offloading.tier._keys.of([key(failing)])

    def some(own: list[bytes], rows: Any, tried: list[bool]) -> None:
        if lost not in own:
            load(own, rows, tried)
            return
        at = own.index(lost)
        load(own[:at], rows[:at], tried)
        rows[at][:] = 1  # a part was written when it failed
        raise error

    monkeypatch.setattr(store, "load", some)
    assert offloading.found(keys(0, 3)) == [at != failing for at in range(3)]
    monkeypatch.undo()
    stats = store.cache.stats()
    assert stats["blocks"] == stats["evictable"] == 6  # no pin is left; and one is dropped, which would fail again
    offloading.store(keys(0, 3))
    offloading.store(keys(20, 4))
    assert offloading.found(keys(0, 3)) == [True] * 3


def test_what_was_looked_up_is_there_when_it_is_loaded() -> None:
    """Stores that need all of the room come between."""
    offloading = Offloading(8, {"dram_blocks": 4})
    offloading.store(keys(0, 4))
    tier = offloading.tier
    assert [tier.lookup(name, ANYONE) for name in [*keys(0, 2), key(9)]] == [LookupResult.HIT] * 2 + [LookupResult.MISS]
    tier.submit_store(job(100, keys(10, 4), [4, 5, 6, 7]))
    assert results(tier)[100].success
    assert tier._store.cache.exists(tier._keys.of([*keys(0, 4), *keys(10, 4)])).tolist() == [True] * 2 + [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    tier.submit_load(job(101, keys(0, 2), [6, 7], loads=True))
    told = results(tier)[101]
    assert told.success
    assert told.transfer_bytes == 2 * BLOCK_BYTES
    assert np.array_equal(offloading.rows[6], offloading.rows[0])
    tier.submit_store(job(102, keys(20, 4), [4, 5, 6, 7]))
    assert results(tier)[102].success
    assert tier._store.cache.count(tier._keys.of(keys(20, 4))) == 4  # the load's pins have ended
    offloading.close()


def test_a_store_without_room_is_told_and_takes_nothing_away() -> None:
    offloading = Offloading(8, {"dram_blocks": 2})
    offloading.store(keys(0, 2))
    tier = offloading.tier
    assert [tier.lookup(name, ANYONE) for name in keys(0, 2)] == [LookupResult.HIT] * 2
    tier.submit_store(job(100, keys(10, 2), [4, 5]))
    told = results(tier)[100]
    assert (told.success, told.transfer_bytes) == (False, 0)
    tier.submit_load(job(101, keys(0, 2), [6, 7], loads=True))
    assert results(tier)[101].success
    offloading.close()


def test_a_look_up_that_leads_to_no_load_pins_until_the_end_of_the_step(offloading: Offloading) -> None:
    offloading.store(keys(0, 2))
    tier, cache = offloading.tier, offloading.tier._store.cache
    assert tier.lookup(key(0), ANYONE) is tier.lookup(key(0), ANYONE) is LookupResult.HIT
    assert cache.stats()["evictable"] == 1
    tier.on_schedule_end(ScheduleEndContext((), ()))
    assert cache.stats()["evictable"] == 2


def test_what_is_gone_is_told_as_not_loaded(offloading: Offloading) -> None:
    """A load without a look-up, as after a reset of vLLM's."""
    offloading.store(keys(0, 1))
    rest = offloading.rows[3].copy()
    offloading.tier.submit_load(job(100, [key(0), key(5)], [2, 3], loads=True))
    told = results(offloading.tier)[100]
    assert (told.success, told.successful_keys) == (False, (key(0),))
    assert np.array_equal(offloading.rows[3], rest)


def test_a_drain_waits_for_all_jobs_and_each_is_told_once(
    offloading: Offloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, copying, go_on = offloading.tier._store, threading.Event(), threading.Event()
    save = store.save

    def slow(*given: Any) -> bool:
        copying.set()
        assert go_on.wait(30)
        return save(*given)

    monkeypatch.setattr(store, "save", slow)
    tier = offloading.tier
    tier.submit_store(job(100, keys(0, 2), [0, 1]))
    tier.submit_store(job(101, keys(2, 2), [2, 3]))
    assert copying.wait(30)
    assert list(tier.get_finished_jobs()) == []
    tier.submit_load(job(102, keys(5, 1), [0], loads=True))
    drained = threading.Thread(target=tier.drain_jobs)
    drained.start()
    drained.join(0.2)  # long enough for one that does not wait
    assert drained.is_alive()
    go_on.set()
    drained.join(30)
    assert {each.job_id: each.success for each in tier.get_finished_jobs()} == {100: True, 101: True, 102: False}
    assert list(tier.get_finished_jobs()) == []


def test_each_job_is_told_beside_one_that_fails_in_any_way(
    offloading: Offloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = offloading.tier
    tier.submit_store(job(100, keys(0, 1), [PRIMARY]))  # there is no such chunk
    tier.submit_store(job(101, keys(1, 1), [1]))
    tier.submit_load(job(102, keys(0, 1), [PRIMARY], loads=True))
    assert {number: each.success for number, each in results(tier).items()} == {100: False, 101: True, 102: False}


def test_the_bytes_of_a_store_are_those_that_were_written(offloading: Offloading) -> None:
    tier = offloading.tier
    for number, own, written in ((100, keys(0, 2), 2), (101, keys(0, 3), 1), (102, keys(0, 3), 0)):
        tier.submit_store(job(number, own, list(range(len(own)))))
        told = results(tier)[number]
        assert (told.success, told.transfer_bytes) == (True, written * BLOCK_BYTES)


def test_a_tier_whose_threads_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is started later: a job that was told as failed would then run, on memory that vLLM has given away."""
    offloading = Offloading(PRIMARY)
    offloading.store(keys(0, 1))
    start = threading.Thread.start
    refused: list[str] = []

    def only_loads(thread: threading.Thread) -> None:
        if "store" not in thread.name and not refused:
            start(thread)
            return
        refused.append(thread.name)
        raise RuntimeError("can't start new thread")

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", only_loads)
    with pytest.raises(kvpool.Unsupported, match="kvpool-tier-store cannot be started: can't start new thread"):
        Offloading(PRIMARY)
    offloading.tier.submit_load(job(100, keys(0, 1), [3], loads=True))
    offloading.tier.submit_store(job(101, keys(5, 1), [3]))
    assert [each.success for each in results(offloading.tier).values()] == [True, True]
    assert not set(threading.enumerate()) - before
    monkeypatch.undo()
    offloading.close()


def test_a_reset_ends_what_is_under_way_and_keeps_what_is_stored(offloading: Offloading) -> None:
    """As of vLLM's other tiers: a reset is of the primary tier."""
    offloading.store(keys(0, 3))
    context = offloading.request()
    assert offloading.manager.lookup(key(0), context) is LookupResult.HIT
    offloading.store(keys(10, 4))
    offloading.look_up(keys(0, 1))
    offloading.manager.reset_cache()
    assert not offloading.manager.has_pending_work()
    assert offloading.manager.primary_tier.lookup(key(0), context) is LookupResult.MISS
    assert offloading.found(keys(0, 3)) == [True] * 3


def test_a_shut_down_tier_has_nothing_and_harms_nobody() -> None:
    offloading = Offloading(PRIMARY)
    offloading.store(keys(0, 2))
    tier, pool = offloading.tier, offloading.tier._store.pool
    tier.submit_store(job(100, keys(5, 1), [0]))
    tier.lookup(key(0), ANYONE)
    offloading.close()
    tier.shutdown()
    assert pool.closed
    assert [each.success for each in tier.get_finished_jobs()] == [True]
    assert tier.lookup(key(0), ANYONE) is LookupResult.MISS
    tier.touch(keys(0, 2), ANYONE)
    tier.submit_load(job(101, keys(0, 1), [0], loads=True))
    tier.submit_store(job(102, keys(0, 1), [0]))
    assert {each.job_id: each.success for each in tier.get_finished_jobs()} == {101: False, 102: False}
    assert tier.get_stats() is None


def test_a_primary_tier_that_is_not_rows_of_bytes_is_refused(offloading: Offloading) -> None:
    flat = memoryview(bytearray(64))
    for view in (flat, flat.cast("I").cast("B").cast("H", [4, 8]), flat.cast("B", [4, 16])[::2]):
        with pytest.raises(kvpool.LayoutMismatch, match="a row of bytes"):
            KvpoolTier(offloading.spec, view, TIER, dram_blocks=4)


def test_figures_are_among_vllms(offloading: Offloading) -> None:
    for first in range(0, 20, 4):
        offloading.store(keys(first, 4))
    figures = offloading.manager.get_stats().reduce()
    named = {name.split(":(")[0]: value for name, value in figures.items() if "kvpool_tier" in name}
    assert named == {
        "vllm:kvpool_tier_blocks": 16,
        "vllm:kvpool_tier_capacity_blocks": 16,
        "vllm:kvpool_tier_evicted_blocks": 4,
    }
    assert named.keys() <= TieringOffloadingSpec.build_metric_definitions(config(4, {}).extra_config).keys()
    again = offloading.manager.get_stats().reduce()
    assert [value for name, value in again.items() if "kvpool_tier_evicted" in name] == [0]


@pytest.mark.parametrize("drained", [1.0, 0.3])
def test_many_steps_at_random_never_give_wrong_content(drained: float) -> None:
    """`drained`: the share of the steps after which all jobs have ended. Those of others overlap with the next ones."""
    chance = np.random.default_rng(5)
    offloading = Offloading(8, {"dram_blocks": 12})
    finish = offloading.tier.drain_jobs
    offloading.tier.drain_jobs = lambda: finish() if chance.random() < drained else None
    hits = 0
    for _ in range(600):
        first, count = int(chance.integers(0, 40)), int(chance.integers(1, 5))
        if chance.random() < 0.5:
            offloading.store(keys(first, count))
        else:
            hits += sum(offloading.found(keys(first, count)))
    for _ in range(3):  # the end of a job may begin another
        finish()
        offloading.manager.on_schedule_end(ScheduleEndContext((), ()))
    stats = offloading.tier._store.cache.stats()
    assert stats["blocks"] == stats["evictable"]
    offloading.tier._store.cache.audit()
    assert hits > 100
    assert offloading.manager._jobs == {}
    offloading.close()
