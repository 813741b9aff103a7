"""Pool.tensor: zero-copy views by the buffer protocol and DLPack; and the memory that a pool takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit import prompt, refused, run_script, small_layout, small_pool

import kvpool
from kvpool import DRAM, HBM, types

MEDIA = [HBM, DRAM]
ORDERS = ["aggregated", "discrete"]
HUGE_PAGE = 2 << 20


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


# ---- NumPy


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dims", ["HND", "NHD"])
@pytest.mark.parametrize("pages", ["split", "fused"])
@pytest.mark.parametrize("dtype", types.DTYPES)
def test_a_view_has_the_shape_and_type_of_the_layout(dtype, dims, pages, order, medium):
    layout = kvpool.KVLayout(3, 2, 5, dtype, block_tokens=4, order=order, dims=dims, pages=pages)
    with small_pool(6, 7, layout) as pool:
        view = pool.tensor(medium)
        blocks = 6 if medium == HBM else 7
        assert view.shape == (blocks, *layout.shape)
        assert view.dtype == dtype
        assert view.nbytes == blocks * layout.block_bytes
        assert len(view) == blocks
        array = view.numpy()
        assert array.shape == view.shape
        assert array.strides == view.strides
        piece = array[0, 0, 0] if pages == "split" else array[0, 0]
        assert piece.flags.c_contiguous  # whichever of heads and tokens comes first
        assert array.dtype == layout.numpy_dtype
        assert dtype in repr(view)


def test_all_views_of_a_medium_are_the_same_memory(pool):
    first, second = pool.tensor(HBM).numpy(), np.asarray(pool.tensor(HBM))
    first[3] = 7
    assert (second[3] == 7).all()
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, pool.tensor(DRAM).numpy())
    assert first.flags.writeable
    assert not first.flags.owndata


def test_an_aggregated_block_is_one_run_of_bytes():
    with small_pool(layout=small_layout(order="aggregated")) as pool:
        kv = pool.tensor(HBM).numpy()
        assert kv.flags.c_contiguous
        assert kv.strides[0] == pool.kv_layout.block_bytes


def test_a_discrete_layer_is_one_run_of_bytes_for_all_blocks():
    with small_pool(layout=small_layout(order="discrete")) as pool:
        kv = pool.tensor(HBM).numpy()
        layers = [kv[:, layer, half] for layer in range(2) for half in range(2)]
        assert all(layer.flags.c_contiguous for layer in layers)
        starts = [layer.__array_interface__["data"][0] for layer in layers]
        assert np.diff(starts).tolist() == [layers[0].nbytes] * 3


@pytest.mark.parametrize("order", ORDERS)
def test_no_two_elements_share_bytes(order):
    layout = small_layout(dtype="int8", order=order)
    with small_pool(5, 0, layout) as pool:
        kv = pool.tensor(HBM).numpy()
        kv[:] = 0
        where = np.nonzero(np.ones(kv.shape))
        offsets = sum(index * stride for index, stride in zip(where, kv.strides, strict=True))
        assert sorted(offsets) == list(range(pool.arena(HBM).payload_bytes))


@pytest.mark.parametrize("order", ORDERS)
def test_elements_stay_where_they_were_written_through_both_tiers(order):
    layout = small_layout(order=order)
    with small_pool(layout=layout) as pool:
        addrs = pool.alloc(3)
        hbm, dram = pool.tensor(HBM).numpy(), pool.tensor(DRAM).numpy()
        content = np.arange(3 * layout.block_bytes // 4, dtype=np.float32).reshape(3, *layout.shape)
        hbm[kvpool.block_ids(addrs)] = content
        pool.insert(prompt(3), addrs).close()
        pool.swap_out(3)
        with pool.match(prompt(3)) as hit:
            ids = kvpool.block_ids(hit.addrs)
            for layer in range(layout.layers):
                for half in range(2):
                    assert (dram[ids, layer, half] == content[:, layer, half]).all()


def test_raw_blocks_are_rows_of_bytes():
    with small_pool(layout=kvpool.RawLayout(block_bytes=24, block_tokens=4)) as pool:
        view = pool.tensor(HBM)
        assert (view.shape, view.strides, view.dtype) == ((8, 24), (24, 1), "uint8")


def test_a_medium_without_blocks_is_an_empty_view():
    with small_pool(dram_blocks=0) as pool:
        assert pool.tensor(DRAM).numpy().shape == (0, *pool.kv_layout.shape)
        assert pool.tensor(DRAM).nbytes == 0


def test_a_view_shows_one_medium(pool):
    for medium, error in ((kvpool.MIXED, kvpool.ArgumentError), (0, kvpool.ArgumentError), (4, kvpool.ArgumentError)):
        with refused(pool, error, "medium" if medium != kvpool.MIXED else "HBM"):
            pool.tensor(medium)
    with refused(pool, kvpool.ArgumentTypeError):
        pool.tensor("HBM")


# ---- DLPack


def test_dlpack_gives_numpy_the_same_memory(pool):
    view = pool.tensor(HBM)
    array = np.from_dlpack(view)
    view.numpy()[2] = 5
    assert (array[2] == 5).all()
    assert np.shares_memory(array, view.numpy())
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":  # before, NumPy's imports were read-only
        assert array.flags.writeable
    assert view.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ({}, "dltensor"),
        ({"max_version": None}, "dltensor"),
        ({"max_version": (0, 8)}, "dltensor"),
        ({"max_version": (1, 0)}, "dltensor_versioned"),
        ({"max_version": (2, 7)}, "dltensor_versioned"),
    ],
)
def test_a_consumer_gets_the_version_that_it_understands(pool, version, name):
    capsule = pool.tensor(HBM).__dlpack__(**version, dl_device=(1, 0), copy=False)
    assert f'"{name}"' in repr(capsule)


def test_an_unused_capsule_keeps_nothing_alive(pool):
    for _ in range(100):
        pool.tensor(HBM).__dlpack__()
        pool.tensor(HBM).__dlpack__(max_version=(1, 0))


def test_layouts_that_dlpack_cannot_describe_are_refused(pool):
    view = pool.tensor(HBM)
    with pytest.raises(kvpool.Unsupported, match="copy"):
        view.__dlpack__(copy=True)
    with pytest.raises(kvpool.Unsupported, match="CPU"):
        view.__dlpack__(dl_device=(2, 0))
    with pytest.raises(kvpool.ArgumentError, match="stream"):
        view.__dlpack__(stream=1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", types.DTYPES)
def test_torch_sees_the_true_type(dtype, order):
    torch = pytest.importorskip("torch")
    with small_pool(layout=small_layout(dtype=dtype, order=order)) as pool:
        view = pool.tensor(HBM)
        tensor = torch.from_dlpack(view)
        assert tensor.dtype == getattr(torch, dtype)
        assert tuple(tensor.shape) == view.shape
        assert tensor.data_ptr() == view.numpy().__array_interface__["data"][0]
        tensor[3] = torch.ones(tensor.shape[1:]).to(tensor.dtype)
        again = view.numpy()[3].view(np.uint8).tobytes()
        assert again == torch.ones(tensor.shape[1:]).to(tensor.dtype).view(torch.uint8).numpy().tobytes()
        assert (view.numpy()[2] == 0).all()


def test_torch_takes_both_versions_of_dlpack(pool):
    torch = pytest.importorskip("torch")
    for version in (None, (1, 0)):
        tensor = torch.utils.dlpack.from_dlpack(pool.tensor(HBM).__dlpack__(max_version=version))
        tensor[1] = 4
        assert (pool.tensor(HBM).numpy()[1] == 4).all()


# ---- lifetime


@pytest.mark.parametrize("how", ["close", "drop"])
def test_views_outlive_their_pool(how):
    pool = small_pool()
    array, exported = pool.tensor(HBM).numpy(), np.from_dlpack(pool.tensor(DRAM))
    array[:] = 3
    pool.tensor(DRAM).numpy()[:] = 4
    if how == "close":
        pool.close()
    del pool
    with small_pool():
        pass  # would reuse the address space
    assert (array == 3).all()
    assert (exported == 4).all()


def test_memory_is_freed_with_the_last_view():
    run_script("""
import os
from pathlib import Path
def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:kvpool")
def opened():
    return len(os.listdir("/proc/self/fd"))
before = opened()
assert mapped() == 0
pool = kit.small_pool()
assert mapped() == 2
array, capsule = pool.tensor(kvpool.HBM).numpy(), pool.tensor(kvpool.DRAM).__dlpack__()
pool.close()
assert mapped() == 2
del capsule
assert mapped() == 1
del array
assert (mapped(), opened()) == (0, before)
for _ in range(300):
    with kit.small_pool() as pool:
        pool.tensor(kvpool.HBM).numpy()
assert (mapped(), opened()) == (0, before)
""")


# ---- memory


def resident_bytes(pool, medium):
    """(resident, proportional) bytes of the mapping of a medium."""
    start = pool.tensor(medium).numpy().__array_interface__["data"][0]
    smaps = Path("/proc/self/smaps").read_text()
    entry = re.search(rf"^{start:x}-.*?(?=^[0-9a-f]+-|\Z)", smaps, re.MULTILINE | re.DOTALL)
    assert entry, "the arena is not a separate mapping"
    return tuple(int(re.search(rf"^{name}: +(\d+) kB", entry[0], re.MULTILINE)[1]) << 10 for name in ("Rss", "Pss"))


@pytest.mark.parametrize("huge_pages", ["auto", "never"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_memory_of_a_pool_is_committed_when_it_is_made(order, huge_pages):
    layout = kvpool.KVLayout(layers=3, kv_heads=2, head_dim=40, dtype="float16", block_tokens=16, order=order)
    with small_pool(701, 333, layout, huge_pages=huge_pages) as pool:
        for medium, blocks in ((HBM, 701), (DRAM, 333)):
            arena = pool.arena(medium)
            wanted = blocks * layout.block_bytes
            assert arena.payload_bytes == wanted
            assert wanted <= arena.mapped_bytes < wanted + 4096
            assert arena.huge_page_bytes <= arena.mapped_bytes
            assert (arena.huge_page_bytes == 0) or huge_pages == "auto"
            assert arena.owned
            assert not arena.pinned
            # Committed when made: no block has been used yet.
            for resident in resident_bytes(pool, medium):
                assert wanted <= resident < wanted + HUGE_PAGE


def test_a_pool_takes_no_more_memory_than_it_reports():
    """All that the process has, not what the pool knows of: 128 MiB of blocks, what is kept of each, and an index."""
    program = """
import re, sys
from pathlib import Path
import numpy as np
import kvpool

def resident():
    return int(re.search(r"Rss:\\s+(\\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) << 10

layout = kvpool.RawLayout(block_bytes=1 << 16, block_tokens=4)
kvpool.Pool(layout, 16, 16).close()
before = resident()
with kvpool.Pool(layout, 1024, 1024) as pool:
    for number in range(4):  # and while it is used, too
        pool.insert(np.arange(number, number + 4096, dtype=np.int32), pool.alloc(1024), free_duplicates=True).close()
    print(resident() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    asked = 2048 << 16
    assert asked <= int(run.stdout) < 1.1 * asked


def test_memory_is_committed_once_and_stays_so():
    layout = kvpool.RawLayout(block_bytes=1 << 16, block_tokens=4)
    with small_pool(64, 64, layout, audit=False) as pool:
        for round_ in range(50):
            addrs = pool.alloc(64)
            pool.insert(prompt(64, round_), addrs, free_duplicates=True).close()
        assert pool.stats().evicted_blocks > 0
        for medium in MEDIA:
            assert resident_bytes(pool, medium)[0] < 64 * layout.block_bytes + HUGE_PAGE


def test_huge_pages_can_be_required_where_the_machine_gives_them():
    layout = kvpool.RawLayout(block_bytes=HUGE_PAGE, block_tokens=4)
    try:
        pool = kvpool.Pool(layout, 2, huge_pages="require")
    except kvpool.Unsupported as error:
        assert error.huge_page_bytes < error.needed_bytes  # noqa: PT017
        pytest.skip(f"this machine gives no huge pages: {error}")
    with pool:
        assert pool.arena(HBM).huge_page_bytes == 2 * HUGE_PAGE
