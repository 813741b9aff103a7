"""KvpoolHiCache against SGLang's base class, factory and host memory; a whole engine with it needs a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_kit import LAYERS, PAGE, SLOTS, config, fill, host_memory, indices, key, keys, mha_device, page_of
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

import kvpool
from kvpool.engines.sglang.hicache import KvpoolHiCache

LAYOUTS = [
    ("mha", "layer_first"), ("mha", "page_first"), ("mha", "page_first_direct"), ("mha", "page_head"),
    ("mla", "layer_first"), ("mla", "page_first"), ("mla", "page_first_direct"),
]  # fmt: skip


class StateHost:
    """A host pool of another kind, such as Mamba's states: all that is known of it is SGLang's interface."""

    page_size = 1
    dtype = torch.float32

    def __init__(self) -> None:
        self.rows = torch.arange(40 * 6, dtype=torch.float32).view(40, 6)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(6)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.rows[index]

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.rows[index] = page


def made(host: Any, others: dict[Any, Any] | None = None, **extra: Any) -> Any:
    """A storage as SGLang makes and registers it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(**({"dram_pages": 16} | extra)), host)
    storage.register_mem_pool_host(host)
    for name, pool in (others or {}).items():
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    return storage


@pytest.fixture
def host() -> Any:
    return host_memory("mha", "layer_first")


@pytest.fixture
def storage(host: Any) -> Any:
    storage = made(host)
    yield storage
    storage.close()


def test_it_is_a_storage_of_sglang() -> None:
    assert issubclass(KvpoolHiCache, HiCacheStorage)
    assert not KvpoolHiCache.__abstractmethods__


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_come_back_into_any_layout_of_the_host_memory(kind: str, layout: str) -> None:
    host = host_memory(kind, layout)
    storage = made(host)
    before = [page_of(host, page) for page in (3, 7, 1)]
    assert storage.batch_set_v1(keys(0, 3), indices([3, 7, 1])) == [True] * 3
    assert storage.batch_exists([*keys(0, 3), key("other")]) == 3
    fill(host.kv_buffer, 2)
    rest = page_of(host, 4)
    assert storage.batch_get_v1(keys(0, 3), indices([9, 2, 5])) == [True] * 3
    for page, content in zip((9, 2, 5), before, strict=True):
        assert torch.equal(page_of(host, page), content)
    assert torch.equal(page_of(host, 4), rest)
    storage.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_the_older_interface_has_the_same_pages(layout: str) -> None:
    host = host_memory("mha", layout)
    storage = made(host)
    content = [page_of(host, page) for page in (3, 7)]
    assert storage.batch_set(keys(0, 2), content)
    targets = [host.get_dummy_flat_data_page() for _ in range(3)]
    got = storage.batch_get([*keys(0, 2), key("other")], targets)
    assert torch.equal(got[0], content[0])
    assert torch.equal(got[1], content[1])
    assert got[2] is None
    assert storage.exists(key(0))
    assert not storage.exists(key("other"))
    assert storage.set(key(5), content[1])
    assert torch.equal(storage.get(key(5), host.get_dummy_flat_data_page()), content[1])
    assert storage.get(key("other"), host.get_dummy_flat_data_page()) is None
    fill(host.kv_buffer, 2)
    assert storage.batch_get_v1(keys(0, 2), indices([1, 2])) == [True, True]
    assert torch.equal(page_of(host, 2), content[1])
    storage.close()


def test_what_is_missing_ends_the_prefix(host: Any, storage: Any) -> None:
    storage.batch_set_v1([key(0), key(1), key(3)], indices([0, 1, 3]))
    assert storage.batch_exists(keys(0, 4)) == 2
    rest = page_of(host, 7)
    assert storage.batch_get_v1(keys(0, 4), indices([4, 5, 6, 7])) == [True, True, False, False]
    assert torch.equal(page_of(host, 7), rest)


def test_the_coldest_pages_make_room(storage: Any) -> None:
    storage.batch_set_v1(keys(0, 16), indices(list(range(16))))
    assert storage.batch_set_v1(keys(16, 4), indices([0, 1, 2, 3])) == [True] * 4
    assert storage.batch_exists(keys(16, 4)) == 4
    assert storage.batch_exists(keys(0, 16)) == 12
    assert storage.batch_set_v1(keys(100, 17), indices(list(range(17)))) == [False] * 17
    assert storage.batch_exists(keys(16, 4)) == 4


def test_indices_that_do_not_fit_are_refused(storage: Any) -> None:
    assert storage.batch_set_v1(keys(0, 2), indices([0])) == [False, False]
    assert storage.batch_set_v1(keys(0, 2), None) == [False, False]
    assert storage.batch_exists(keys(0, 2)) == 0


def test_a_lost_store_has_nothing_and_harms_nobody(host: Any, storage: Any) -> None:
    storage.batch_set_v1(keys(0, 2), indices([0, 1]))
    storage._storages._stores["kv"].pool.close()  # as if its memory were lost
    content = page_of(host, 5)
    assert storage.batch_exists(keys(0, 2)) == 0
    assert storage.batch_get_v1(keys(0, 2), indices([5, 6])) == [False, False]
    assert torch.equal(page_of(host, 5), content)
    assert storage.batch_set_v1(keys(2, 1), indices([2])) == [False]
    assert storage.batch_get(keys(0, 1), [host.get_dummy_flat_data_page()]) == [None]
    assert not storage.batch_set(keys(0, 1), [page_of(host, 0)])


def test_clear_drops_all_pages_and_close_may_be_called_twice(storage: Any) -> None:
    storage.batch_set_v1(keys(0, 4), indices([0, 1, 2, 3]))
    storage.clear()
    assert storage.batch_exists(keys(0, 4)) == 0
    assert storage.batch_set_v1(keys(0, 1), indices([0])) == [True]
    storage.close()
    storage.close()
    assert storage.batch_exists(keys(0, 1)) == 0


@pytest.mark.parametrize("verb", ["save", "load"])
def test_clear_waits_for_copies_and_drops_what_they_hold(
    storage: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.batch_set_v1(keys(0, 2), indices([0, 1]))
    store = storage._storages._stores["kv"]
    copy, copying, go_on = getattr(store, verb), threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        with store.cache.match(keys(0, 2)):  # as the copy pins them
            copying.set()
            go_on.wait(30)
            return copy(*given)

    monkeypatch.setattr(store, verb, slow)
    move = storage.batch_set_v1 if verb == "save" else storage.batch_get_v1
    mover = threading.Thread(target=move, args=(keys(0, 4), indices([4, 5, 6, 7])))
    mover.start()
    assert copying.wait(30)
    cleared = threading.Thread(target=storage.clear)
    cleared.start()
    cleared.join(0.2)  # long enough for one that does not wait
    go_on.set()
    mover.join(30)
    cleared.join(30)
    assert len(store.cache) == 0
    monkeypatch.undo()
    assert storage.batch_set_v1(keys(0, 2), indices([0, 1])) == [True, True]  # it is open again


def test_memory_that_runs_out_is_told_as_a_miss(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise MemoryError

    storage.batch_set_v1(keys(0, 2), indices([0, 1]))
    monkeypatch.setattr(storage._storages._stores["kv"], "load", full)
    monkeypatch.setattr(storage._storages._stores["kv"], "save", full)
    assert storage.batch_get_v1(keys(0, 2), indices([4, 5])) == [False, False]
    assert storage.batch_set_v1(keys(2, 1), indices([2])) == [False]


def test_host_memory_that_cannot_be_had_page_by_page_is_refused(host: Any) -> None:
    class Refusing(StateHost):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            raise NotImplementedError("no flat pages")

    class Empty(StateHost):
        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.zeros(0)

    with pytest.raises(kvpool.Unsupported, match="of a Refusing one by one: no flat pages"):
        made(host, {PoolName.MAMBA: Refusing()})
    with pytest.raises(kvpool.Unsupported, match="mamba have no bytes"):
        made(host, {PoolName.MAMBA: Empty()})


def test_keys_and_values_of_different_sizes_are_refused() -> None:
    sizes = mha_device(v_head_dim=8)._mha_buffer_info()
    more = {"pin_memory": False, "device_capacity_tokens": SLOTS, "start_layer": 0, "end_layer": LAYERS}
    with pytest.raises(kvpool.Unsupported, match="AsymmetricMHATokenToKVPoolHost one by one"):
        made(AsymmetricMHATokenToKVPoolHost(sizes, 2.0, 0, PAGE, "page_first", **more))


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_host_memory_whose_pages_are_unified_is_refused(kind: str) -> None:
    with pytest.raises(kvpool.Unsupported, match="page_unified"):
        made(host_memory(kind, "page_unified"))


def test_figures_are_those_since_the_last_call(storage: Any) -> None:
    storage.batch_set_v1(keys(0, 4), indices([0, 1, 2, 3]))
    storage.batch_get_v1(keys(0, 3), indices([4, 5, 6]))
    figures = storage.get_stats()
    assert (figures.backup_pgs, figures.prefetch_pgs) == ([4], [3])
    assert figures.backup_bandwidth[0] > 0
    assert figures.prefetch_bandwidth[0] > 0
    assert storage.get_stats().backup_pgs == []


def test_keys_of_another_form_are_hashed(storage: Any) -> None:
    odd = ["short", key(1), "x" * 65]
    assert storage.batch_set_v1(odd, indices([0, 1, 2])) == [True] * 3
    assert storage.batch_exists(odd) == 3
    assert storage.batch_exists([key(1)]) == 1
    assert storage.batch_exists(["shorter"]) == 0


@pytest.fixture
def hybrid(host: Any) -> Any:
    storage = made(host, {PoolName.MAMBA: StateHost(), PoolName.KV: host})
    yield storage
    storage.close()


def test_pools_of_another_kind_are_kept_beside_the_pages(host: Any, hybrid: Any) -> None:
    states = hybrid.registered_pools[PoolName.MAMBA]
    states_of = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([5, 9]), keys=keys(1, 2))
    pages_of = PoolTransfer(PoolName.KV, host_indices=indices([0, 1, 2]), keys=keys(0, 3))
    done = hybrid.batch_set_v2([states_of, pages_of])
    assert done == {PoolName.MAMBA: [True, True], PoolName.KV: [True] * 3}
    content, state = page_of(host, 1), states.rows[9].clone()
    fill(host.kv_buffer, 3)
    states.rows.zero_()
    states_into = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([0, 1]), keys=keys(1, 2))
    pages_into = PoolTransfer(PoolName.KV, host_indices=indices([4, 5, 6]), keys=keys(0, 3))
    got = hybrid.batch_get_v2([states_into, pages_into])
    assert got == {PoolName.MAMBA: [True, True], PoolName.KV: [True] * 3}
    assert torch.equal(page_of(host, 5), content)
    assert torch.equal(states.rows[1], state)


def test_a_prefix_ends_where_all_pools_have_it(hybrid: Any) -> None:
    hybrid.batch_set_v1(keys(0, 6), indices(list(range(6))))
    at = PoolTransfer(PoolName.MAMBA, host_indices=torch.tensor([1, 2]), keys=[key(1), key(3)])
    hybrid.batch_set_v2([at])
    ask = PoolTransfer(PoolName.MAMBA, keys=[key(0)], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = hybrid.batch_exists_v2(keys(0, 8), [ask])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {"kv": 6, PoolName.MAMBA: 4}
    every = replace(ask, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert hybrid.batch_exists_v2(keys(0, 8), [every]).kv_hit_pages == 0
    assert hybrid.batch_exists_v2(keys(1, 8), [every]).restorable_prefix_pages == [1]
    assert hybrid.batch_exists_v2(keys(0, 8)).restorable_prefix_pages == [1, 2, 3, 4, 5, 6]


def test_a_pool_that_comes_later_is_not_kept(hybrid: Any) -> None:
    hybrid.register_mem_host_pool_v2(StateHost(), "draft")
    at = PoolTransfer("draft", host_indices=torch.tensor([1]), keys=[key(1)])
    assert hybrid.batch_set_v2([at]) == {"draft": [False]}


def test_two_threads_of_sglang_may_call_at_once(host: Any, storage: Any) -> None:
    content = {page: page_of(host, page) for page in range(8)}

    def back_up() -> None:
        for _ in range(50):
            storage.batch_set_v1(keys(0, 8), indices(list(range(8))))

    assert all(storage.batch_set_v1(keys(0, 8), indices(list(range(8)))))  # eight of sixteen are never evicted
    thread = threading.Thread(target=back_up)
    thread.start()
    for _ in range(50):
        for at, good in enumerate(storage.batch_get_v1(keys(0, 8), indices(list(range(16, 24))))):
            assert good
            assert torch.equal(page_of(host, 16 + at), content[at])
    thread.join()


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"dram_gb": 1}, kvpool.ArgumentError),
        ({"dram_gib": 1, "dram_pages": 1}, kvpool.ArgumentError),
        ({"dram_gib": "1", "dram_pages": None}, kvpool.ArgumentTypeError),
        ({"dram_pages": 0}, kvpool.ArgumentError),
        ({"dram_pages": True}, kvpool.ArgumentTypeError),
    ],
)
def test_wrong_options_are_typed_errors(host: Any, extra: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        StorageBackendFactory.create_backend("dynamic", config(**extra), host)


def test_memory_that_is_too_small_is_refused(host: Any) -> None:
    with pytest.raises(kvpool.ArgumentError, match="a page of this model has"):
        made(host, dram_pages=None, dram_gib=1e-7)


def test_ranks_that_share_a_writer_are_refused() -> None:
    with pytest.raises(kvpool.Unsupported, match="latent attention"):
        KvpoolHiCache(replace(config(), is_mla_model=True, tp_size=2))
    KvpoolHiCache(replace(config(), is_mla_model=True))
