"""What the linker and the storage for SGLang are made of, without SGLang."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvpool
from kvpool.engines.given import GIB
from kvpool.engines.sglang import TESTED
from kvpool.engines.sglang.options import HiCacheOptions, LinkerOptions, Options
from kvpool.engines.sglang.store import AdoptedStore, hex_keys_of

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
KEYS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(8)]


def pieces(pages: int = 6, count: int = 4, size: int = 16) -> list:
    return [torch.full((pages, size), 10 * at, dtype=torch.uint8) for at in range(count)]


def test_options_have_defaults_and_are_checked():
    assert Options.parse({}).pages(GIB) == 4
    assert Options.parse({"dram_pages": 7, "module_path": "x"}, ("module_path",)).pages(1) == 7
    assert LinkerOptions.parse({"keep_on_flush": True}).keep_on_flush
    with pytest.raises(kvpool.ArgumentError, match="module_path"):
        LinkerOptions.parse({"module_path": "x"})
    for wrong in ({"dram_gib": 0}, {"dram_gib": float("nan")}, {"dram_gib": -1}, {"dram_pages": 1 << 50}):
        with pytest.raises(kvpool.ArgumentError, match="must be above 0"):
            Options.parse(wrong)
    with pytest.raises(kvpool.ArgumentError, match="page of this model has"):
        Options.parse({"dram_gib": 1}).pages(2 * GIB)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"name": "a"}, "name is for a member of a cluster"),
        ({"model": "m"}, "model is for a member of a cluster"),
        ({"fetch_timeout_s": 1.0, "listen": "unix:@a"}, "listen, fetch_timeout_s are for a member"),
        ({"cluster": "local://a"}, "needs model"),
        ({"cluster": "local://a", "model": "m", "listen": "unix:a"}, "no address"),
        ({"cluster": "local://a", "model": "m", "listen": "tcp:[::]:0"}, "wildcard"),
    ],
)
def test_options_of_members_are_checked_when_they_are_read(extra, words):
    with pytest.raises(kvpool.ArgumentError, match=words):
        HiCacheOptions.parse(extra)
    member = {"cluster": "local://a", "model": "m", "listen": ["unix:@a", "tcp:[::1]:0"]}
    assert HiCacheOptions.parse(member).listen == member["listen"]


def test_keys_of_another_form_are_hashed_and_stay_apart():
    assert hex_keys_of(KEYS) == KEYS
    mixed = hex_keys_of([KEYS[0], "other"])
    assert mixed == [KEYS[0], hashlib.sha256(b"other").hexdigest()]
    with pytest.raises(kvpool.ArgumentError, match="hex"):
        kvpool.KeyedIndex(32).exists(hex_keys_of(["x" * 64, "short"]))


def test_pages_of_adopted_memory_come_back():
    from kvpool.engines.sglang.store import AdoptedStore

    memory = pieces()
    store = AdoptedStore(memory, 8)
    for at, piece in enumerate(memory):
        piece[2] = 100 + at
    store.save(KEYS[:2], np.array([2, 3]))
    for piece in memory:
        piece[:] = 0
    assert store.load([KEYS[0], KEYS[5]], np.array([5, 4])) == 1
    assert [int(piece[5, 0]) for piece in memory] == [100, 101, 102, 103]
    assert not any(piece[4].any() for piece in memory)
    store.cache.close()
    store.pool.close()


def test_pieces_of_different_sizes_or_an_odd_one_are_refused():
    from kvpool.engines.sglang.pages import layout_of

    assert layout_of(pieces()).block_bytes == 64
    for wrong in ([*pieces(), *pieces(count=1, size=8)], pieces(size=7)):
        with pytest.raises(kvpool.Unsupported, match="of one even size"):
            layout_of(wrong)


def test_tensors_that_hold_no_whole_pages_in_a_row_are_refused():
    from kvpool.engines.sglang.pages import device_pieces

    class MHATokenToKVPool(SimpleNamespace):
        page_size = 8

    good = torch.zeros(24, 2, 8)
    device = MHATokenToKVPool(k_buffer=[good], v_buffer=[good], k_scale_buffer=None)
    assert [tuple(piece.shape) for piece in device_pieces(device, 8)] == [(3, 512), (3, 512)]
    with pytest.raises(kvpool.LayoutMismatch):
        device_pieces(MHATokenToKVPool(k_buffer=[good.transpose(1, 2)], v_buffer=[]), 8)
    with pytest.raises(kvpool.LayoutMismatch):
        device_pieces(MHATokenToKVPool(k_buffer=[good], v_buffer=[], page_size=64), 64)
    with pytest.raises(kvpool.Unsupported, match="dcp-size"):
        device_pieces(MHATokenToKVPool(k_buffer=[good], v_buffer=[]), 16)
    with pytest.raises(kvpool.Unsupported, match="hnd"):
        device_pieces(MHATokenToKVPool(kv_cache_layout="hnd", k_buffer=[good], v_buffer=[]), 8)
    with pytest.raises(kvpool.Unsupported, match="SimpleNamespace"):
        device_pieces(SimpleNamespace(k_buffer=[good], v_buffer=[]), 8)


def test_the_release_that_is_tested_is_stated_alike():
    pinned = (ROOT / "tests" / "engines" / "sglang" / "requirements.txt").read_text()
    assert re.search(rf"^sglang=={re.escape(TESTED)}$", pinned, re.MULTILINE)
    assert f"SGLang {TESTED}," in (ROOT / "docs" / "how-to" / "sglang.md").read_text()


def test_a_store_that_cannot_be_suspended_goes_on_as_before():
    store = AdoptedStore(pieces(), 4, routes=("ucx", "sock"))
    with pytest.raises(kvpool.Unsupported, match="ucx"):
        store.suspend()
    assert not store.pool.suspended
    assert store.save(KEYS[:2], np.array([1, 2])) == 2
    store.pool.close()


def test_a_store_says_whether_it_was_awake():
    store = AdoptedStore(pieces(), 4)
    assert [store.suspend(), store.suspend()] == [True, False]
    store.resume()
    assert store.save(KEYS[:2], np.array([1, 2])) == 2
    store.pool.close()
    assert not store.suspend()
