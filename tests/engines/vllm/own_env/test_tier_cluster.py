"""KvpoolTier of two engines in one cluster, under vLLM's own manager, without engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster.kit import LocalPlace
from tier_kit import BLOCK_BYTES, Offloading, key, keys
from transfer.kit import Child, eventually, wait_for
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import TransferJob

import kvpool
from kvpool.engines import keyed_members
from kvpool.engines.vllm.tier_store import Keys, TierOptions, TierStore, close_store, open_store
from kvpool.transfer.key_fetch import FetchControl

PRIMARY = 8
TIER = {"dram_blocks": 16, "model": "tiny, revision 1"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members have time to answer, also on a busy machine."""
    monkeypatch.setattr(keyed_members, "ASK_SECONDS", 2.0)


@pytest.fixture
def url() -> Iterator[str]:
    place = LocalPlace()
    yield place.url
    place.close()


def member(url: str, name: str, **more: Any) -> Offloading:
    return Offloading(PRIMARY, {**TIER, "cluster": url, "name": name, **more})


def known(engine: Offloading, own: list[Any]) -> list[LookupResult]:
    """What the tiers say of the keys once nothing is put off."""

    def settled() -> list[LookupResult] | None:
        told = engine.look_up(own)
        return None if {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(told) else told

    return wait_for(settled)  # type: ignore[no-any-return]


@pytest.fixture
def engines(url: str) -> Iterator[tuple[Offloading, Offloading]]:
    a, b = member(url, "a"), member(url, "b")
    eventually(lambda: a.tier._store.members.asked() == ["b-tier"] and b.tier._store.members.asked() == ["a-tier"])
    yield a, b
    a.close()
    b.close()


def test_an_engine_loads_what_another_one_has_stored(engines: tuple[Offloading, Offloading]) -> None:
    a, b = engines
    a.store(keys(0, 3))
    context = b.request()
    told = [b.manager.lookup(name, context) for name in keys(0, 4)]
    assert told == [LookupResult.RETRY] * 4  # all of one step are asked for at once
    assert known(b, keys(0, 4)) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    assert b.found(keys(0, 3)) == [True] * 3  # with the content that was stored
    assert len(b.tier._store.cache) == 3
    b.tier.shutdown()
    eventually(lambda: a.tier._store.cache.evict(16) == 3)  # nothing is held there


def test_an_engine_of_another_model_is_not_asked_twice(engines: tuple[Offloading, Offloading], url: str) -> None:
    a, _ = engines
    a.store(keys(0, 2))
    other = member(url, "other", model="tiny, revision 2")
    eventually(lambda: len(other.tier._store.members.asked()) == 2)
    assert known(other, keys(0, 2)) == [LookupResult.MISS] * 2
    eventually(lambda: known(other, keys(9, 1)) and other.tier._store.members.asked() == [])
    assert other.tier.lookup(key(3), other.request()) is LookupResult.MISS  # at once
    other.close()


def test_engines_of_one_model_whose_blocks_are_laid_out_otherwise_find_nothing(url: str) -> None:
    a, like = member(url, "a"), member(url, "like")
    b = Offloading(PRIMARY, {**TIER, "cluster": url, "name": "b"}, kv_cache_layout="LHBNC")
    a.store(keys(0, 2))
    eventually(lambda: known(like, keys(0, 2)) == [LookupResult.HIT] * 2)  # it is there for whom it is
    like.close()
    members = b.tier._store.members
    eventually(lambda: members.asked() == ["a-tier"])
    store = b.tier._store
    with store.pool.peers.match_keys("a-tier", store.cache, b.tier._keys.of(keys(0, 2))) as answered:
        assert answered.first == 0
    assert known(b, keys(0, 2)) == [LookupResult.MISS] * 2
    assert members.asked() == ["a-tier"]  # it has answered
    a.close()
    b.close()


def test_a_member_whose_layout_is_not_known_is_refused(url: str) -> None:
    with pytest.raises(kvpool.ArgumentError, match="how its cache is laid out"):
        Offloading(PRIMARY, {**TIER, "cluster": url}, kv_cache_layout=None)


def test_data_parallel_replicas_have_names_that_differ(url: str) -> None:
    options = TierOptions(**TIER, cluster=url, name="a")
    stores = [TierStore(BLOCK_BYTES, options.of_engine(f"engine_dp{rank}")) for rank in range(2)]
    assert [store.members.name for store in stores if store.members] == ["a-dp0-tier", "a-dp1-tier"]
    for store in stores:
        store.close()


def test_a_shared_member_is_opened_with_the_same_options(url: str) -> None:
    options = TierOptions(**TIER, cluster=url, store="shared")
    store = open_store(options, BLOCK_BYTES)
    assert open_store(options, BLOCK_BYTES) is store
    for other in ({"model": "tiny, revision 2"}, {"name": "b"}, {"listen": "tcp:127.0.0.1:0"}, {"cluster": None}):
        with pytest.raises(kvpool.ArgumentError, match=next(iter(other))):
            open_store(replace(options, **other), BLOCK_BYTES)  # type: ignore[arg-type]
    close_store("shared")


def test_a_store_that_was_dropped_finds_nothing_of_before(url: str) -> None:
    """The weights have changed: one process has dropped its store, and the other one not yet."""
    options = TierOptions(**TIER, cluster=url, store="dropped")
    old = TierStore(BLOCK_BYTES, replace(options, name="old"))
    own = [bytes([at]) * Keys.BYTES for at in range(2)]
    old.save(own, [bytes(BLOCK_BYTES)] * 2)
    found = []
    for _ in range(2):
        store = open_store(options, BLOCK_BYTES)
        assert store.members is not None
        eventually(lambda: store.members.asked() == ["old-tier"])  # noqa: B023
        found.append(store.pool.peers.match_keys("old-tier", store.cache, own, wait=False))
        with contextlib.suppress(kvpool.StateError):
            found[-1].wait()
        if len(found) == 1:
            eventually(lambda: store.members.find(own).all())  # noqa: B023
        assert not store.members.find(own).any() or len(found) == 1
        close_store("dropped")
    assert found[0].exception() is None
    assert isinstance(found[1].exception(), kvpool.StateError)
    old.close()


def test_a_block_that_cannot_be_loaded_or_dropped_is_a_miss(
    engines: tuple[Offloading, Offloading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member holds it. Else vLLM would find it and load it for ever."""
    a, b = engines
    a.store(keys(0, 1))
    (own,) = a.tier._keys.of(keys(0, 1))
    a.tier._rows[:] = 0

    def load(*_: Any) -> None:
        raise kvpool.DeviceLost("no")

    monkeypatch.setattr(a.tier._store, "load", load)
    store = b.tier._store
    with store.pool.peers.match_keys("a-tier", store.cache, [own]) as held:
        assert held.first == 1
        assert a.tier.lookup(key(0), a.request()) is LookupResult.HIT
        a.tier.submit_load(TransferJob(7, keys(0, 1), np.array([0], np.int32), True, a.request()))
        a.tier.drain_jobs()
        assert a.tier.lookup(key(0), a.request()) is LookupResult.MISS


def test_a_drain_cancels_fetches_and_does_not_wait_for_them(
    engines: tuple[Offloading, Offloading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's scheduler waits meanwhile. The next load fetches again."""
    a, b = engines
    a.store(keys(0, 2))
    context = b.request()
    eventually(lambda: known_by_tier(b, context) == [LookupResult.HIT] * 2)
    begun, cancelled = threading.Event(), threading.Event()
    cancel = FetchControl.cancel

    def fetch(*_: Any, **__: Any) -> Any:
        begun.set()
        cancelled.wait(60)
        raise kvpool.PeerLost("the test says so")

    def noted(control: FetchControl) -> None:
        cancel(control)
        cancelled.set()

    with monkeypatch.context() as patch:
        patch.setattr(b.tier._store.pool, "fetch", fetch)
        patch.setattr(FetchControl, "cancel", noted)
        b.tier.submit_load(TransferJob(7, keys(0, 2), np.array([0, 1], np.int32), True, context))
        assert begun.wait(20), "no fetch was begun"
        b.tier.drain_jobs()
    assert cancelled.is_set()
    (told,) = b.tier.get_finished_jobs()
    assert (told.job_id, told.success) == (7, False)
    assert b.tier._store.members.asked() == ["a-tier"]  # it was not the member's fault
    with b.tier._store.members.bring(b.tier._keys.of(keys(0, 2))) as here:
        assert here.first == 2


def known_by_tier(engine: Offloading, context: Any) -> list[LookupResult]:
    told = [engine.tier.lookup(name, context) for name in keys(0, 2)]
    engine.tier.on_schedule_end(None)
    return told


def test_alone_it_puts_nothing_off(url: str) -> None:
    alone = member(url, "alone")
    context = alone.request()
    assert alone.manager.lookup(key(0), context) is LookupResult.MISS
    alone.close()


def test_a_member_that_dies_before_the_load_costs_only_its_blocks(url: str) -> None:
    here = member(url, "here")
    own = here.tier._keys.of(keys(0, 2))
    child = Child()
    child(
        "cluster = kvpool.Cluster.join(url, lease=60.0)\n"
        "pool = kvpool.Pool(kvpool.RawLayout(size), dram_blocks=4, model=model)\n"
        "cache = kvpool.KeyedCache(pool, 4, key_bytes, name='vllm-tier')\n"
        "cache.put(own, bytes(2 * size))\npool.attach(cluster, name='victim-tier').name",
        url=url, size=BLOCK_BYTES, model=TIER["model"], key_bytes=Keys.BYTES, own=own,
    )  # fmt: skip
    eventually(lambda: here.tier._store.members.asked() == ["victim-tier"])
    context = here.request()

    def asked() -> bool:
        told = [here.tier.lookup(name, context) for name in keys(0, 2)]
        here.tier.on_schedule_end(None)
        return told == [LookupResult.HIT] * 2

    eventually(asked)
    child.kill()
    assert known(here, keys(0, 2)) == [LookupResult.MISS] * 2
    here.step()
    assert here.tier._store.pool.audit().dram.active == 0
    child.close()
    here.close()


def test_options_of_a_member_are_checked() -> None:
    member_of = {**TIER, "cluster": "local://kv"}
    for tier in (
        {"cluster": "local://kv"},  # no model
        {"name": "a"},
        {"listen": "tcp:0.0.0.0:0"},
        {**member_of, "cluster_options": {"strange": 1}},
        {**member_of, "fetch_timeout_s": 0},
    ):
        with pytest.raises(kvpool.ArgumentError):
            TierOptions.parse(tier)
    for tier in ({**TIER, "cluster": 3}, {**member_of, "cluster_options": []}, {**TIER, "model": 3}):
        with pytest.raises(kvpool.ArgumentTypeError):
            TierOptions.parse(tier)
