"""The facts that the core reports of peers, ranks and transfers, from which dataclasses are made."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvpool.errors import Error

__all__ = [
    "PeerEventFacts",
    "RankFacts",
    "RecallFacts",
    "RouteCostFacts",
    "TransferStatsFacts",
    "TransferTotalsFacts",
]


class TransferStatsFacts(TypedDict):
    """The fields of a TransferStats."""

    route: str
    strategy: str
    blocks: int
    skipped_blocks: int
    calls: int
    runs: int
    bytes: int
    reserve_us: float
    write_us: float
    complete_us: float
    total_us: float


class RouteCostFacts(TypedDict):
    """The fields of a RouteCost."""

    route: str
    source: int | None
    target: int | None
    latency_us: float
    us_per_piece: float
    us_per_byte: float


class PeerEventFacts(TypedDict):
    """The fields of a PeerEvent."""

    name: str
    kind: Literal["joined", "lost", "recalled"]
    instance: int
    incarnation: int
    error: Error | None
    addrs: tuple[int, ...]
    deadline: float | None


class RecallFacts(TypedDict):
    """The fields of a RecallResult."""

    returned: int
    freed: int
    quarantined: int


class TransferTotalsFacts(TypedDict):
    """The fields of a TransferTotals."""

    succeeded: int
    failed: dict[str, int]
    bytes: int
    seconds: float
    durations: tuple[tuple[float, int], ...]


class RankFacts(TypedDict):
    """The fields of a RankInfo."""

    rank: int
    joined: bool
    pid: int
    host: str
    link: str
    address: str
