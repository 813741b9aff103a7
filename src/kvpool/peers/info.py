"""Information about a peer at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool.types import Medium

__all__ = ["PeerInfo", "RouteCost", "RouteReport"]


@dataclass(frozen=True)
class RouteReport:
    """A route to a peer that does not work now. Transfers use other routes if possible.

    Attributes:
        route: Its name. The CPU's and the GPU's route of one name share it.
        failures: How many of its transfers the route itself has failed: not the peer's death, a deadline or a
            cancellation.
        able: True: it is tried again, with exponential backoff. False: it has reported that it cannot reach this peer;
            it is used only if no other route works, or by name.
        why: The text of the last failure.
    """

    route: str
    failures: int
    able: bool
    why: str


@dataclass(frozen=True)
class RouteCost:
    """The expected cost of writes by one route to a peer, before the times of recent transfers correct it.

    A write of this many pieces and bytes is expected to take
    ``latency_us + us_per_piece * pieces + bytes / (gigabytes_per_s * 1000)`` microseconds. By ``sock`` and ``cma`` this
    is for pieces that are gathered: each piece of ``by_request`` and ``by_layer`` costs about 2 and 1 more.

    Attributes:
        route: Its name. The CPU's and the GPU's route of one name share it.
        source: The medium here for which it was measured. None: not measured; the numbers are a guess for all media.
        target: The medium at the peer for which it was measured, or None.
        latency_us: Of any write, in microseconds.
        us_per_piece: For each range of memory, in microseconds.
        gigabytes_per_s: The rate of long writes, in 10^9 bytes a second; 1000 if the measurement saw no cost of bytes.
    """

    route: str
    source: Medium | None
    target: Medium | None
    latency_us: float
    us_per_piece: float
    gigabytes_per_s: float

    @property
    def measured(self) -> bool:
        """Whether it was measured with this peer."""
        return self.source is not None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> RouteCost:
        """From the core's facts, in which the cost of a byte is never 0."""
        source, target = facts["source"], facts["target"]
        return cls(
            route=facts["route"],
            source=None if source is None else Medium(source),
            target=None if target is None else Medium(target),
            latency_us=facts["latency_us"],
            us_per_piece=facts["us_per_piece"],
            gigabytes_per_s=1e-3 / facts["us_per_byte"],
        )


@dataclass(frozen=True)
class PeerInfo:
    """A peer of a pool, at one moment.

    Attributes:
        name: Its name.
        instance: The number in the addresses of its blocks.
        incarnation: The number of its incarnation; a restarted peer has another.
        link: How it is connected: "unix", "tcp 10.0.0.2:4000".
        routes: The routes by which blocks can travel to it, the cheapest first.
        pid: Its process id, in its own PID namespace.
        lent_blocks: Our blocks that it has borrowed.
        borrowed_blocks: Its blocks that we have borrowed.
        reserved_blocks: Our blocks that are reserved for its transfers.
        transfers: Transfers to it in progress, including those that it has requested.
        failing_routes: Those of `routes` by which the last transfer has failed.
        route_costs: The expected costs of its routes: for each measured pair of media, or else a guess. Routes between
            ranks are not listed.
        sent_bytes: Bytes of blocks that were written to it since it has connected, by the name of the route: of
            transfers, and of fetches that it has asked for.
        received_bytes: Bytes of blocks that it has written here since, or that fetches have read there. What it writes
            to blocks that it has borrowed counts when a message names them.
    """

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
    failing_routes: tuple[RouteReport, ...] = ()
    route_costs: tuple[RouteCost, ...] = ()
    sent_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    received_bytes: int = 0

    @classmethod
    def of(cls, facts: dict[str, Any]) -> PeerInfo:
        """From the core's facts, which have these fields."""
        failing = tuple(RouteReport(**one) for one in facts["failing_routes"])
        costs = tuple(RouteCost.of(one) for one in facts["route_costs"])
        return cls(**{**facts, "failing_routes": failing, "route_costs": costs})
