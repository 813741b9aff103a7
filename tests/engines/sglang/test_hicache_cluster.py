"""KvpoolHiCache of two engines in one cluster, with SGLang's own host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cluster.kit import LocalPlace
from host_kit import config, fill, host_memory, indices, keys, page_of
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import StorageBackendFactory
from test_hicache import StateHost
from transfer.kit import eventually

import kvpool
from kvpool.engines import keyed_members

MODEL = {"dram_pages": 16, "model": "m, revision 1"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members have time to answer, also on a busy machine."""
    monkeypatch.setattr(keyed_members, "ASK_SECONDS", 2.0)


@pytest.fixture
def url() -> Iterator[str]:
    place = LocalPlace()
    yield place.url
    place.close()


def member(url: str, name: str | None, host: Any, others: dict[Any, Any] | None = None, **more: Any) -> Any:
    """A storage as SGLang makes and registers it. `more`: fields of its configuration, or options."""
    fields = {key: more.pop(key) for key in ("tp_rank", "tp_size", "dp_rank") if key in more}
    options = replace(config(**(MODEL | {"cluster": url, "name": name} | more)), **fields)
    storage = StorageBackendFactory.create_backend("dynamic", options, host)
    storage.register_mem_pool_host(host)
    for kind, pool in (others or {}).items():
        storage.register_mem_host_pool_v2(pool, kind)
    storage.on_host_pools_registered()
    return storage


def others_of(storage: Any) -> list[str]:
    return storage._storages._stores["kv"].members.asked()  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_an_engine_gets_the_pages_of_another_one(url: str, layout: str) -> None:
    host, host_b = host_memory("mha", layout), host_memory("mha", layout)
    a, b = member(url, "a", host), member(url, "b", host_b)
    eventually(lambda: others_of(b) == ["a-kv-tp0of1-pp0of1-cp0of1"])
    before = [page_of(host, page) for page in (3, 7, 1)]
    assert a.batch_set_v1(keys(0, 3), indices([3, 7, 1])) == [True] * 3
    eventually(lambda: b.batch_exists(keys(0, 5)) == 3)
    fill(host_b.kv_buffer, 2)
    assert b.batch_get_v1(keys(0, 4), indices([9, 2, 5, 6])) == [True] * 3 + [False]
    for page, wanted in zip((9, 2, 5), before, strict=True):
        assert torch.equal(page_of(host_b, page), wanted)
    a.close()
    assert b.batch_exists(keys(0, 5)) == 3  # they are here now
    b.close()


def test_a_prefix_may_lie_half_here_and_half_there(url: str) -> None:
    host, host_b = host_memory("mha", "layer_first"), host_memory("mha", "layer_first")
    a, b = member(url, "a", host), member(url, "b", host_b)
    eventually(lambda: others_of(b))
    a.batch_set_v1([*keys(0, 1), *keys(2, 2)], indices([0, 2, 3]))
    b.batch_set_v1(keys(1, 1), indices([1]))
    eventually(lambda: b.batch_exists(keys(0, 5)) == 4)
    assert b.batch_get_v1(keys(0, 4), indices([4, 5, 6, 7])) == [True] * 4
    for from_a, into in ((0, 4), (2, 6), (3, 7)):
        assert torch.equal(page_of(host, from_a), page_of(host_b, into))
    a.close()
    b.close()


def test_states_come_as_well(url: str) -> None:
    hosts = [host_memory("mha", "layer_first") for _ in range(2)]
    states = [StateHost(), StateHost()]
    a, b = (
        member(url, name, host, {PoolName.MAMBA: state}) for name, host, state in zip("ab", hosts, states, strict=True)
    )
    state = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5]), keys=keys(1, 1))
    state.hit_policy = PoolHitPolicy.TRAILING_PAGES
    a.batch_set_v1(keys(0, 2), indices([0, 1]))
    a.batch_set_v2([state])
    eventually(lambda: b.batch_exists_v2(keys(0, 2), [state]).kv_hit_pages == 2)
    states[1].rows.zero_()
    assert b.batch_get_v2([state]) == {PoolName.MAMBA: [True]}
    assert torch.equal(states[1].rows[5], states[0].rows[5])
    a.close()
    b.close()


@pytest.mark.parametrize(
    ("layout", "more"),
    [("layer_first", {"model": "m, revision 2"}), ("page_first_direct", {})],
)
def test_pages_of_another_model_or_layout_are_never_fetched(url: str, layout: str, more: dict[str, Any]) -> None:
    host = host_memory("mha", "layer_first")
    a = member(url, "a", host)
    b = member(url, "b", host_memory("mha", layout), **more)
    c = member(url, "c", host_memory("mha", "layer_first"))
    a.batch_set_v1(keys(0, 2), indices([0, 1]))
    eventually(lambda: c.batch_exists(keys(0, 2)) == 2)  # one with the same model and layout
    c.close()
    eventually(lambda: others_of(b) == ["a-kv-tp0of1-pp0of1-cp0of1"])
    store = b._storages._stores["kv"]
    with pytest.raises(kvpool.LayoutMismatch):  # it was asked, and has refused
        store.pool.peers.match_keys(others_of(b)[0], store.cache, keys(0, 2))
    assert b.batch_exists(keys(0, 2)) == 0
    assert others_of(b) == []  # that it has refused is known
    assert b.batch_get_v1(keys(0, 2), indices([0, 1])) == [False] * 2
    a.close()
    b.close()


@pytest.mark.parametrize("named", [True, False])
def test_only_members_of_the_same_rank_are_asked_and_all_replicas(url: str, named: bool) -> None:
    name = "a" if named else None
    hosts = [host_memory("mha", "layer_first") for _ in range(3)]
    a = member(url, name, hosts[0])
    rank = member(url, name, hosts[1], tp_rank=1, tp_size=2)
    replica = member(url, name, hosts[2], dp_rank=1)
    names = [each._storages._stores["kv"].members.name for each in (a, rank, replica)]
    eventually(lambda: others_of(a) == [names[2]] and others_of(replica) == [names[0]])
    store = rank._storages._stores["kv"]
    eventually(lambda: sorted(store.members._membership.others()) == sorted([names[0], names[2]]))
    assert others_of(rank) == []
    a.batch_set_v1(keys(0, 2), indices([0, 1]))
    eventually(lambda: replica.batch_exists(keys(0, 2)) == 2)
    with pytest.raises(kvpool.StateError, match="no keyed cache"):  # of this name, even if it is asked
        store.pool.peers.match_keys(names[0], store.cache, keys(0, 2))
    assert rank.batch_exists(keys(0, 2)) == 0
    for each in (a, rank, replica):
        each.close()


def test_pages_of_before_a_clear_are_found_by_nobody_who_was_cleared(url: str) -> None:
    """The weights have changed: first A is cleared, and a request at A looks for its pages while B has the old ones."""
    hosts = [host_memory("mha", "layer_first") for _ in range(2)]
    a, b = (member(url, name, host) for name, host in zip("ab", hosts, strict=True))
    b.batch_set_v1(keys(0, 2), indices([0, 1]))
    eventually(lambda: a.batch_exists(keys(0, 2)) == 2)
    a.clear()
    assert a.batch_exists(keys(0, 2)) == 0
    assert a.batch_get_v1(keys(0, 2), indices([0, 1])) == [False] * 2
    assert b.batch_exists(keys(0, 2)) == 2
    a.batch_set_v1(keys(2, 1), indices([2]))
    assert b.batch_exists(keys(2, 1)) == 0  # new content is not for old weights, either
    b.clear()
    for storage in (a, b):
        assert storage.batch_exists(keys(0, 2)) == 0
    eventually(lambda: b.batch_exists(keys(2, 1)) == 1)
    assert b.batch_get_v1(keys(2, 1), indices([3])) == [True]
    assert torch.equal(page_of(hosts[0], 2), page_of(hosts[1], 3))
    a.close()
    b.close()


def test_clear_drops_what_another_member_holds(url: str) -> None:
    host = host_memory("mha", "layer_first")
    a, b = member(url, "a", host), member(url, "b", host_memory("mha", "layer_first"))
    a.batch_set_v1(keys(0, 2), indices([0, 1]))
    eventually(lambda: b.batch_exists(keys(0, 2)) == 2)
    store = b._storages._stores["kv"]
    found = store.pool.peers.match_keys(others_of(b)[0], store.cache, keys(0, 2))
    assert found.first == 2
    a.clear()
    assert a.batch_exists(keys(0, 2)) == b.batch_exists(keys(0, 2)) == 0
    found.close()
    eventually(lambda: a._storages._stores["kv"].pool.stats().dram.active == 0)
    a.close()
    b.close()


def test_a_member_that_has_gone_is_one_that_has_nothing(url: str) -> None:
    a, b = (member(url, name, host_memory("mha", "layer_first")) for name in "ab")
    a.batch_set_v1(keys(0, 2), indices([0, 1]))
    eventually(lambda: b.batch_exists(keys(0, 2)) == 2)
    a.close()
    assert b.batch_get_v1(keys(0, 2), indices([0, 1])) == [False] * 2
    assert b.batch_exists(keys(0, 2)) == 0
    assert b._storages._stores["kv"].pool.audit().dram.active == 0
    b.close()


def test_options_of_a_member_are_checked(url: str) -> None:
    for options in ({"cluster": url}, {"name": 3}, {"listen": "tcp:0.0.0.0:0"}, {"fetch_timeout_s": 0}):
        with pytest.raises((kvpool.ArgumentError, kvpool.ArgumentTypeError)):
            StorageBackendFactory.create_backend("dynamic", config(**options), None)
