"""The metrics of rebalancing, for Prometheus; a scrape reads what `Rebalancer` counts anyway.

Raises:
    ImportError: prometheus-client is missing: ``pip install 'kvpool[metrics]'``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics of rebalancing need prometheus-client: pip install 'kvpool[metrics]'") from error

__all__ = ["CountsPlans", "PlanCounts", "RebalancingCollector"]


class PlanCounts(Protocol):
    """A `kvpool.control.rebalancing.RebalancingTotals`."""

    @property
    def plans_made(self) -> int:
        """As the planner."""

    @property
    def plans_accepted(self) -> int:
        """Made here, or by others."""

    @property
    def moves(self) -> Mapping[str, int]:
        """By result."""

    @property
    def placed(self) -> int:
        """New requests sent to their place."""

    @property
    def takeovers(self) -> int:
        """How often it has become the planner."""


class CountsPlans(Protocol):
    """A `kvpool.control.rebalancing.Rebalancer`."""

    @property
    def plans(self) -> bool:
        """Whether it is the planner."""

    def totals(self) -> PlanCounts:
        """What became of plans."""


class RebalancingCollector(Collector):
    """The metrics of rebalancing: ``registry.register(RebalancingCollector({"a": rebalancer}))``.

    Args:
        rebalancers: By the label `pool`, as in `PoolCollector`. They are kept alive until the collector is dropped.
    """

    def __init__(self, rebalancers: Mapping[str, CountsPlans]) -> None:
        self._rebalancers = dict(rebalancers)

    def collect(self) -> Iterable[Metric]:
        """Asks them. Called by the registry at every scrape."""
        planner = _planner()
        takeovers = CounterMetricFamily(
            "kvpool_rebalancing_takeovers", "How often the instance became the planner.", labels=["pool"]
        )
        plans = CounterMetricFamily(
            "kvpool_rebalancing_plans", "Plans that were made or accepted here.", labels=["pool", "what"]
        )
        moves = CounterMetricFamily(
            "kvpool_rebalancing_moves", "Moves of plans whose source is here.", labels=["pool", "result"]
        )
        placed = CounterMetricFamily(
            "kvpool_rebalancing_placed", "New requests that were sent to their place.", labels=["pool"]
        )
        for pool, one in self._rebalancers.items():
            totals = one.totals()
            planner.add_metric([pool], float(one.plans))
            takeovers.add_metric([pool], totals.takeovers)
            plans.add_metric([pool, "made"], totals.plans_made)
            plans.add_metric([pool, "accepted"], totals.plans_accepted)
            for result, count in totals.moves.items():
                moves.add_metric([pool, result], count)
            placed.add_metric([pool], totals.placed)
        return planner, takeovers, plans, moves, placed

    def describe(self) -> Iterable[Metric]:
        """A name, for a registry that refuses two collectors of the same ones. Asks nobody."""
        return [_planner()]


def _planner() -> GaugeMetricFamily:
    return GaugeMetricFamily("kvpool_rebalancing_planner", "1 if the instance plans for all.", labels=["pool"])
