"""The metrics of live migration, for Prometheus; a scrape reads what `Migrations` counts anyway.

Raises:
    ImportError: prometheus-client is missing: ``pip install 'kvpool[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Protocol

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics of migrations need prometheus-client: pip install 'kvpool[metrics]'") from error

__all__ = ["CountsMigrations", "MigrationCollector", "MigrationCounts"]


class MigrationCounts(Protocol):
    """A `kvpool.control.migration.MigrationTotals`."""

    @property
    def left(self) -> Mapping[tuple[str, str], int]:
        """By way and result."""

    @property
    def arrived(self) -> Mapping[tuple[str, str], int]:
        """By way and result."""

    @property
    def bytes(self) -> int:
        """Of the blocks of requests that have left."""

    @property
    def stop_seconds(self) -> float:
        """For which they were stopped, in all."""

    @property
    def stops(self) -> Iterable[tuple[float, int]]:
        """A histogram of that."""


class CountsMigrations(Protocol):
    """A `kvpool.control.migration.Migrations`."""

    def totals(self) -> MigrationCounts:
        """What became of its migrations."""

    def under_way(self) -> Sized:
        """Those that leave."""

    def arriving(self) -> Sized:
        """Those that come."""


class MigrationCollector(Collector):
    """The metrics of migrations: ``registry.register(MigrationCollector({"a": migrations}))`` with prometheus_client.

    Args:
        migrations: By the label `pool`, as in `PoolCollector`. They are kept alive until the collector is dropped.
    """

    def __init__(self, migrations: Mapping[str, CountsMigrations]) -> None:
        self._migrations = dict(migrations)

    def collect(self) -> Iterable[Metric]:
        """Asks them. Called by the registry at every scrape."""
        ended = CounterMetricFamily(
            "kvpool_migrations", "Migrations that ended.", labels=["pool", "direction", "way", "result"]
        )
        moving = GaugeMetricFamily(
            "kvpool_migrations_under_way", "Requests on their way.", labels=["pool", "direction"]
        )
        sent = CounterMetricFamily(
            "kvpool_migration_bytes", "Bytes of blocks of requests that have left.", labels=["pool"]
        )
        stops = HistogramMetricFamily(
            "kvpool_migration_stop_seconds", "How long requests that have left were stopped.", labels=["pool"]
        )
        for pool, one in self._migrations.items():
            totals = one.totals()
            for direction, counts in (("out", totals.left), ("in", totals.arrived)):
                for (way, result), count in counts.items():
                    ended.add_metric([pool, direction, way, result], count)
            for direction, requests in (("out", one.under_way()), ("in", one.arriving())):
                moving.add_metric([pool, direction], len(requests))
            sent.add_metric([pool], totals.bytes)
            buckets, below = [], 0
            for bound, count in totals.stops:
                below += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), float(below)))
            stops.add_metric([pool], buckets, totals.stop_seconds)
        return ended, moving, sent, stops

    def describe(self) -> Iterable[Metric]:
        """A name, for a registry that refuses two collectors of the same ones. Asks nobody."""
        return [GaugeMetricFamily("kvpool_migrations_under_way", "Requests on their way.", labels=["pool"])]
