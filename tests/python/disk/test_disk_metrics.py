"""What Prometheus sees of blocks on disk."""

from __future__ import annotations

import os

import pytest
from disk_kit import data_file, disk_pool, to_disk
from kit import prompt
from prometheus_client import CollectorRegistry

import kvpool
from kvpool import DRAM
from kvpool.observe.metrics import PoolCollector

_BYTES = 4096  # that a block takes on disk, with padding
_READ_ERRORS = 8  # that switch the disk off


def _of_disk(pool: kvpool.Pool) -> dict[str, float]:
    """The samples of the disk, by name without `kvpool_disk_`."""
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool))
    samples = [sample for family in registry.collect() for sample in family.samples]
    begin = "kvpool_disk_"
    return {sample.name.removeprefix(begin): sample.value for sample in samples if sample.name.startswith(begin)}


def test_metrics_count_what_is_written_brought_and_found(tmp_path):
    with disk_pool(tmp_path / "kv", disk_blocks=16) as pool:
        to_disk(pool, prompt(3), 10)
        with pool.match(prompt(3), into=DRAM):
            seen = _of_disk(pool)
    assert seen == {
        "off": 0, "capacity_blocks": 16, "used_blocks": 3, "copies": 3, "recovered_blocks": 0,
        "written_blocks_total": 3, "moved_blocks_total": 3, "brought_blocks_total": 3, "lost_blocks_total": 0,
        "corrupt_blocks_total": 0, "read_errors_total": 0, "write_errors_total": 0, "read_bytes_total": 3 * _BYTES,
        "written_bytes_total": 3 * _BYTES,
    }  # fmt: skip
    with disk_pool(tmp_path / "kv", disk_blocks=16) as pool:
        assert _of_disk(pool)["recovered_blocks"] == 3


def test_metrics_say_that_the_disk_is_off(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        for name in range(_READ_ERRORS):
            to_disk(pool, prompt(1, name), name)
        os.truncate(data_file(tmp_path / "kv"), 0)
        for name in range(_READ_ERRORS):
            with pool.match(prompt(1, name)) as hit, pytest.raises((kvpool.StaleAddress, kvpool.StoreFailed)):
                pool.swap_in(hit.addrs, medium=DRAM)
        with pytest.warns(kvpool.DiskWarning):
            seen = _of_disk(pool)
    assert (seen["off"], seen["read_errors_total"], seen["used_blocks"]) == (1, _READ_ERRORS, 0)


def test_a_pool_without_a_disk_has_no_metrics_of_one():
    with kvpool.Pool(kvpool.RawLayout(64), dram_blocks=2) as pool:
        assert _of_disk(pool) == {}
