"""What is written to disk stays within its budget; and a drive that fails takes the disk with it, not the pool."""

from __future__ import annotations

import os
import warnings

import pytest
from disk_kit import data_file, disk_pool, media_of, store_stamped, to_disk, use
from kit import BLOCK, Stamps, cached_tokens, prompt, refused

import kvpool
from kvpool import DISK, DRAM

_BYTES = 4096  # that a block takes on disk, with padding
_READ_ERRORS = 8  # that switch the disk off


def test_the_budget_counts_what_is_flushed(tmp_path):
    with disk_pool(tmp_path / "kv", disk_bytes_s=_BYTES) as pool:
        to_disk(pool, prompt(3), 0)  # as much at once as is asked for: two blocks are owed
        store_stamped(pool, prompt(2, 1), 10)
        with pytest.raises(kvpool.DeadlineExceeded):
            pool.flush(everything=True, timeout=0.05)
        assert pool.stats().disk.written_bytes_today == 3 * _BYTES
        assert pool.audit().disk.written_blocks == 3


def test_the_budget_counts_what_is_written_in_the_background(tmp_path):
    with disk_pool(tmp_path / "kv", disk_bytes_day=2 * _BYTES) as pool:
        store_stamped(pool, prompt(2), 0)
        use(pool, prompt(2))
        pool.flush()
        store_stamped(pool, prompt(2, 1), 10)
        use(pool, prompt(2, 1))
        with pytest.raises(kvpool.DeadlineExceeded):
            pool.flush(everything=True, timeout=0.05)
        pool.free(pool.alloc(8, medium=DRAM))
        assert media_of(pool, prompt(2)) == [DISK] * 2
        assert cached_tokens(pool, prompt(2, 1)) == 0
        assert pool.audit().disk.written_bytes_today == 2 * _BYTES


def test_a_failed_drive_is_switched_off_and_the_pool_goes_on(tmp_path):
    with disk_pool(tmp_path / "kv", hbm_blocks=4) as pool:
        to_disk(pool, prompt(3), 10)
        for name in range(2, 1 + _READ_ERRORS):
            to_disk(pool, prompt(1, name), name)
        store_stamped(pool, prompt(2, 1), 20)
        pool.flush(everything=True)
        os.truncate(data_file(tmp_path / "kv"), 0)
        for name in range(2, 1 + _READ_ERRORS):
            with pool.match(prompt(1, name)) as hit, pytest.raises(kvpool.StaleAddress):
                pool.swap_in(hit.addrs, medium=DRAM)
        assert pool.stats().disk.state == "on"
        with pool.match(prompt(3)) as hit:
            with pytest.raises(kvpool.StoreFailed):
                pool.swap_in(hit.addrs, medium=DRAM)
            assert cached_tokens(pool, prompt(3)) == 0
        with pytest.warns(kvpool.DiskWarning, match="switched off"):
            stats = pool.stats()
        assert (stats.disk.state, stats.disk.used, stats.disk.copies) == ("off", 0, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pool.audit()
            with pool.match(prompt(2, 1), into=kvpool.HBM) as hit:
                assert Stamps(pool).read(hit.addrs) == [20, 21]
            store_stamped(pool, prompt(3), 30)
            with refused(pool, kvpool.StoreFailed, "switched off"):
                pool.flush()
            pool.free(pool.alloc(8, medium=DRAM))
            assert cached_tokens(pool, prompt(3)) == 0


def test_a_block_that_cannot_be_read_is_lost_and_the_rest_stays(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(2), 10)
        to_disk(pool, prompt(3, 1), 20)
        with pool.match(prompt(3, 1)) as hit:
            last = kvpool.decode_address(hit.addrs[2]).block
        slots = data_file(tmp_path / "kv").stat().st_size
        os.truncate(data_file(tmp_path / "kv"), (1 + last) * _BYTES)  # behind the head
        with pool.match(prompt(3, 1), into=DRAM) as hit:
            assert hit.tokens == 0  # its blocks are read together
        stats = pool.audit().disk
        assert (stats.state, stats.read_errors) == ("on", 1)
        with pool.match(prompt(2), into=DRAM) as hit:
            assert Stamps(pool).read(hit.addrs) == [10, 11]
        pool.flush()
        os.truncate(data_file(tmp_path / "kv"), slots)
    with disk_pool(tmp_path / "kv") as pool:
        assert cached_tokens(pool, prompt(3, 1)) == 0
        assert cached_tokens(pool, prompt(2)) == 2 * BLOCK


def test_a_match_that_brings_blocks_serves_what_is_in_memory_when_a_read_fails(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(4), 10)
        stamps = Stamps(pool)
        with pool.match(prompt(4)[: 2 * BLOCK], into=DRAM):
            os.truncate(data_file(tmp_path / "kv"), 0)
            with pool.match(prompt(4), into=DRAM) as hit:
                assert stamps.read(hit.addrs) == [10, 11]
        assert pool.audit().disk.state == "on"
