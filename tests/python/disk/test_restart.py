"""What is on disk is found by the next pool on the same directory, and by no other."""

from __future__ import annotations

import numpy as np
import pytest
from disk_kit import damage, disk_pool, media_of, store_stamped, to_disk, use
from kit import BLOCK, Stamps, cached_tokens, prompt, small_layout, store

import kvpool
from kvpool import DISK, DRAM


def test_a_new_pool_finds_what_was_written(tmp_path):
    longer = np.concatenate([prompt(3)[: 2 * BLOCK], prompt(2, 5)])
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(3), 10)
        with pool.match(longer, into=DRAM) as hit:
            more = pool.alloc(2, medium=DRAM)
            Stamps(pool).write(more, [50, 51])
            with pool.insert(longer, [*hit.addrs, *more]):
                pass
        store(pool, prompt(2, 1), medium=DRAM, namespace="lora", evict=True)
        pool.flush(everything=True)
    with disk_pool(tmp_path / "kv") as pool:
        assert pool.stats().disk.recovered_blocks == 7
        assert media_of(pool, prompt(3)) == [DISK] * 3
        assert cached_tokens(pool, prompt(2, 1)) == 0
        assert cached_tokens(pool, prompt(2, 1), namespace="lora") == 2 * BLOCK
        with pool.match(longer, into=DRAM) as hit:
            assert Stamps(pool).read(hit.addrs) == [10, 11, 50, 51]
        pool.audit()


def test_addresses_of_the_pool_before_are_stale(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 0)
        with pool.match(prompt(2)) as hit:
            old = hit.addrs.copy()
    with disk_pool(tmp_path / "kv") as pool:
        assert cached_tokens(pool, prompt(2)) == 2 * BLOCK
        with pytest.raises(kvpool.StaleAddress):
            pool.swap_in(old, medium=DRAM)


def test_what_was_deleted_or_forgotten_stays_away(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 0)
        to_disk(pool, prompt(2, 1), 0)
        to_disk(pool, prompt(2, 2), 0)
        pool.delete(prompt(2))
        with pool.match(prompt(2, 1), into=DRAM) as hit:
            pool.forget(hit.addrs[1:])
    with disk_pool(tmp_path / "kv") as pool:
        found = [cached_tokens(pool, prompt(2, name)) // BLOCK for name in range(3)]
        assert found == [0, 1, 2]
        pool.audit()


def test_slots_are_used_again_after_a_restart(tmp_path):
    for first in (0, 100, 200):
        with disk_pool(tmp_path / "kv", disk_blocks=4) as pool:
            to_disk(pool, prompt(3, first), first)
        with disk_pool(tmp_path / "kv", disk_blocks=4) as pool, pool.match(prompt(3, first), into=DRAM) as hit:
            assert Stamps(pool).read(hit.addrs) == [first, first + 1, first + 2]


def test_a_damaged_first_block_takes_what_continues_it_with_it(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(3), 0)
        to_disk(pool, prompt(2, 1), 10)
        with pool.match(prompt(3)) as hit:
            slot = kvpool.decode_address(hit.addrs[0]).block
    damage(tmp_path / "kv", slot)
    with disk_pool(tmp_path / "kv") as pool:
        with pool.match(prompt(3), into=DRAM) as hit:
            assert hit.tokens == 0
        assert pool.audit().disk.used == 2


def test_a_damaged_block_is_a_miss_and_the_rest_before_it_is_served(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(4), 10)
        with pool.match(prompt(4)) as hit:
            slot = kvpool.decode_address(hit.addrs[2]).block
            addrs = hit.addrs.copy()
    damage(tmp_path / "kv", slot)
    with disk_pool(tmp_path / "kv") as pool:
        with pool.match(prompt(4)) as hit:
            assert hit.tokens == 4 * BLOCK
            with pytest.raises(kvpool.StaleAddress) as caught:
                pool.swap_in(hit.addrs, medium=DRAM)
            assert caught.value.position == 2
        assert addrs.tolist() != hit.addrs.tolist()
        with pool.match(prompt(4), into=DRAM) as hit:
            assert Stamps(pool).read(hit.addrs) == [10, 11]
        stats = pool.audit()
        assert (stats.disk.lost_blocks, stats.disk.corrupt_blocks) == (1, 1)
        assert (stats.dram.pinned, stats.dram.reserved) == (0, 0)
    with disk_pool(tmp_path / "kv") as pool:
        assert cached_tokens(pool, prompt(4)) == 2 * BLOCK


def test_a_match_that_brings_blocks_ends_before_a_damaged_one(tmp_path):
    with disk_pool(tmp_path / "kv", hbm_blocks=4) as pool:
        to_disk(pool, prompt(4), 10)
        with pool.match(prompt(4)) as hit:
            damage(tmp_path / "kv", kvpool.decode_address(hit.addrs[1]).block)
        with pool.match(prompt(4), into=kvpool.HBM) as hit:
            assert Stamps(pool).read(hit.addrs) == [10]
        assert pool.audit().disk.lost_blocks == 1


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"layout": small_layout(head_dim=8)}, kvpool.LayoutMismatch, "head_dim"),
        ({"layout": small_layout(dtype="int8", head_dim=16)}, kvpool.LayoutMismatch, "head_dim"),
        ({"model": "another"}, kvpool.LayoutMismatch, "model"),
        ({"disk_blocks": 16}, kvpool.LayoutMismatch, "16"),
    ],
)
def test_another_layout_model_or_size_is_refused_and_nothing_is_overwritten(tmp_path, change, error, text):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 10)
    with pytest.raises(error, match=text):
        disk_pool(tmp_path / "kv", **change)
    with disk_pool(tmp_path / "kv") as pool, pool.match(prompt(2), into=DRAM) as hit:
        assert Stamps(pool).read(hit.addrs) == [10, 11]


def test_two_pools_do_not_share_a_directory(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        store_stamped(pool, prompt(2), 0)
        with pytest.raises(kvpool.StateError):
            disk_pool(tmp_path / "kv")
        use(pool, prompt(2))
        pool.flush()
    with disk_pool(tmp_path / "kv") as pool:
        assert cached_tokens(pool, prompt(2)) == 2 * BLOCK


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(kvpool.StateError):
        disk_pool(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
