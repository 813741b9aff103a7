"""kvpool's figures in vLLM's log and in its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.engines.vllm.figures import FIGURES, Figures

__all__ = ["KvpoolPromMetrics", "KvpoolStats"]


class KvpoolStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there for the type checker
    """Counts of an interval: a dict by names of FIGURES, which vLLM sends to the process that logs."""

    data: dict[str, float]

    def reset(self) -> None:
        """Back to nothing."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvpoolStats:
        """Adds another interval."""
        sums = Figures(self.data)
        sums.merge(other.data)
        self.data = dict(sums)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {f"kvpool_{name}": round(value, 6) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())


class KvpoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter ``vllm:kvpool_<name>`` for each of FIGURES."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        families = {
            name: counter(name=f"vllm:kvpool_{name}", documentation=f"{what}.", labelnames=labelnames)
            for name, what in FIGURES.items()
        }
        # Made at once, so that each is there as 0 before anything happens.
        self._counters = {
            (engine, name): family.labels(*labels)
            for engine, labels in per_engine_labelvalues.items()
            for name, family in families.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of an interval."""
        for name, value in transfer_stats_data.items():
            if value and name in FIGURES:
                self._counters[engine_idx, name].inc(value)
