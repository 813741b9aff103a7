"""The metrics of storage, for Prometheus; a scrape reads what `Storage` counts anyway.

Raises:
    ImportError: prometheus-client is missing: ``pip install 'kvpool[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics of storage need prometheus-client: pip install 'kvpool[metrics]'") from error

__all__ = ["CountsStorage", "StorageCollector"]

# Of `StorageStats`.
_COUNTERS: Final = (
    ("kvpool_storage_loads", "Prompts that were looked for in the pool and the store.", "loads"),
    ("kvpool_storage_late_loads", "Loads that their budget ended.", "loads_late"),
    ("kvpool_storage_skipped_loads", "Loads that left the store alone, because it kept failing.", "skipped_loads"),
    ("kvpool_storage_asked_blocks", "Blocks that loads have looked for in the store.", "asked_blocks"),
    ("kvpool_storage_loaded_blocks", "Blocks that loads have brought into the pool.", "loaded_blocks"),
    ("kvpool_storage_loaded_bytes", "Content of the loaded blocks.", "loaded_bytes"),
    ("kvpool_storage_late_blocks", "Blocks that came too late for their load.", "late_blocks"),
    ("kvpool_storage_saved_blocks", "Blocks newly written to the store.", "saved_blocks"),
    ("kvpool_storage_saved_bytes", "Content of the saved blocks.", "saved_bytes"),
    ("kvpool_storage_present_blocks", "Blocks to be saved that the store had already.", "present_blocks"),
    ("kvpool_storage_gone_blocks", "Blocks to be saved that had left the pool.", "gone_blocks"),
    ("kvpool_storage_dropped_blocks", "Blocks not saved, for want of time, room or a store.", "dropped_blocks"),
)  # fmt: skip
_FAULTS: Final = ("torn", "rotten", "foreign")


class CountsStorage(Protocol):
    """A `kvpool.storage.Storage`."""

    def stats(self) -> Any:
        """Its `StorageStats`."""


class StorageCollector(Collector):
    """The metrics of storage: ``registry.register(StorageCollector({"a": storage}))``. Thread-safe.

    Args:
        storages: By the label `pool`, as in `PoolCollector`. They are kept alive until the collector is dropped.
    """

    def __init__(self, storages: Mapping[str, CountsStorage]) -> None:
        self._storages = dict(storages)

    def collect(self) -> Iterable[Metric]:
        """Asks them. Called by the registry at every scrape."""
        stats = {pool: one.stats() for pool, one in self._storages.items()}
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["pool"])
            for pool, counts in stats.items():
                counter.add_metric([pool], getattr(counts, field))
            yield counter
        errors = CounterMetricFamily(
            "kvpool_storage_errors", "Calls of the store, or of the policy, that failed.", labels=["pool", "what"]
        )
        bad = CounterMetricFamily(
            "kvpool_storage_bad_blocks",
            "Stored blocks that were not used, by what was wrong.",
            labels=["pool", "fault"],
        )
        deleted = CounterMetricFamily(
            "kvpool_storage_deleted_blocks", "Blocks that this process has deleted by age or size.", labels=["pool"]
        )
        off = _off()
        for pool, counts in stats.items():
            errors.add_metric([pool, "loading"], counts.read_errors)
            errors.add_metric([pool, "saving"], counts.write_errors)
            errors.add_metric([pool, "policy"], counts.policy_errors)
            off.add_metric([pool, "loading"], float(counts.reading_off))
            off.add_metric([pool, "saving"], float(counts.writing_off or counts.store.read_only))
            deleted.add_metric([pool], counts.store.deleted)
            for fault in _FAULTS:
                bad.add_metric([pool, fault], getattr(counts.store, fault))
        yield from (errors, bad, deleted, off)

    def describe(self) -> Iterable[Metric]:
        """A name, for a registry that refuses two collectors of the same ones. Asks nobody."""
        return [_off()]


def _off() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "kvpool_storage_off", "1 while the store is left alone, because it kept failing.", labels=["pool", "what"]
    )
