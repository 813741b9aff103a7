"""The metrics of storage."""

from __future__ import annotations

import re
from pathlib import Path

import kit
import pytest
from kit import prompt, small_pool
from storage_kit import MemoryStore, files_of

import kvpool
from kvpool.storage import DirectoryStore, Storage

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry

from kvpool.observe import storage_metrics
from kvpool.observe.storage_metrics import StorageCollector


def test_what_a_storage_counts_is_exposed(tmp_path):
    registry = CollectorRegistry()
    with small_pool(0, 4, device="cpu") as pool, DirectoryStore(tmp_path / "s") as where:
        with Storage(pool, where, model="m", write="never") as storage:
            registry.register(StorageCollector({"a": storage}))
            kit.store(pool, prompt(3), medium=kvpool.DRAM)
            storage.save(prompt(3)).wait()
            pool.delete(prompt(3))
            for file in files_of(where):
                file.write_bytes(file.read_bytes()[:-1])
            storage.load(prompt(3), budget_s=60).wait()
            found = {
                (sample.name.removeprefix("kvpool_storage_"), *sorted(sample.labels.items())): sample.value
                for family in registry.collect()
                for sample in family.samples
                if sample.value and not sample.name.endswith("_created")
            }
    a = ("pool", "a")
    assert found == {
        ("loads_total", a): 1, ("asked_blocks_total", a): 3, ("saved_blocks_total", a): 3,
        ("saved_bytes_total", a): 3 * 512, ("bad_blocks_total", ("fault", "torn"), a): 3,
    }  # fmt: skip


def test_failures_are_exposed():
    memory = MemoryStore()
    memory.failure = kvpool.StoreFailed("gone", errno=116)
    registry = CollectorRegistry()
    with small_pool(0, 4, device="cpu") as pool, Storage(pool, memory, model="m", write="never") as storage:
        registry.register(StorageCollector({"a": storage}))
        for _ in range(4):
            storage.load(prompt(1), budget_s=60).wait()
        labels = {"pool": "a", "what": "loading"}
        assert registry.get_sample_value("kvpool_storage_errors_total", labels) == 3
        assert registry.get_sample_value("kvpool_storage_off", labels) == 1
        assert registry.get_sample_value("kvpool_storage_skipped_loads_total", {"pool": "a"}) == 1


def test_every_metric_is_described():
    root = Path(__file__).resolve().parents[3]
    text = (root / "docs" / "how-to" / "metrics.md").read_text()
    names = set(re.findall(r'"(kvpool_storage\w+)"', Path(storage_metrics.__file__).read_text()))
    described = {name.removesuffix("_total") for name in re.findall(r"`(kvpool_storage_\w+)`", text)}
    assert names == described
    assert len(names) > 12
