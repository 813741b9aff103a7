"""What the core tells of peers, ranks and transfers: the fields of the dataclasses that are made of it."""

from __future__ import annotations

from typing import Literal, TypedDict

from kvpool.errors import Error

__all__ = [
    "PeerEventFacts",
    "PeerFacts",
    "RankFacts",
    "RecallFacts",
    "RouteCostFacts",
    "RouteReportFacts",
    "TransferStatsFacts",
    "TransferTotalsFacts",
]


class TransferStatsFacts(TypedDict):
    """Of a TransferStats."""

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


class RouteReportFacts(TypedDict):
    """Of a RouteReport."""

    route: str
    failures: int
    able: bool
    why: str


class RouteCostFacts(TypedDict):
    """Of a RouteCost."""

    route: str
    source: int | None
    target: int | None
    latency_us: float
    us_per_piece: float
    us_per_byte: float


class PeerFacts(TypedDict):
    """Of a PeerInfo."""

    name: str
    instance: int
    incarnation: int
    link: str
    routes: tuple[str, ...]
    pid: int
    lent_blocks: int
    borrowed_blocks: int
    reserved_blocks: int
    transfers: int
    failing_routes: list[RouteReportFacts]
    route_costs: list[RouteCostFacts]


class PeerEventFacts(TypedDict):
    """Of a PeerEvent."""

    name: str
    kind: Literal["joined", "lost", "recalled"]
    instance: int
    incarnation: int
    error: Error | None
    addrs: tuple[int, ...]
    deadline: float | None


class RecallFacts(TypedDict):
    """Of a RecallResult."""

    returned: int
    freed: int
    quarantined: int


class TransferTotalsFacts(TypedDict):
    """Of a TransferTotals."""

    succeeded: int
    failed: dict[str, int]
    bytes: int
    seconds: float
    durations: tuple[tuple[float, int], ...]


class RankFacts(TypedDict):
    """Of a RankInfo."""

    rank: int
    joined: bool
    pid: int
    host: str
    link: str
    address: str
