"""What vLLM carries between the connector's two sides. Runs where vLLM is."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpool.engines.vllm.plans import StepPlan, WorkerReport
from kvpool.types import KVLayout

__all__ = ["Joined", "StepMetadata", "WorkerMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there for the type checker
    """From the scheduler's connector to the worker's, once a step."""

    plan: StepPlan


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers' connectors to the scheduler's, with the output of a step."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Adds what another worker says."""
        self.report.add(other.report)
        return self


@dataclass
class Joined(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker in another process to the scheduler, once: what its part of a block is, and its blocks of DRAM."""

    layout: KVLayout
    dram_blocks: int
    packing: str
