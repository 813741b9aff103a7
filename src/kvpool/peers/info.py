"""What is known of a peer at one moment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvpool.facts import PeerFacts, RouteCostFacts
from kvpool.types import Medium

__all__ = ["PeerInfo", "RouteCost", "RouteReport"]


@dataclass(frozen=True)
class RouteReport:
    """A way to a peer that does not work now: other routes serve, if there are any.

    Attributes:
        route: Its name; of two of the same name, by the CPU and by the GPU, either.
        failures: How often transfers have failed by it, and not for the peer's death, a deadline or a cancellation.
        able: Whether it is tried again, ever more rarely. False: it cannot reach this peer, by its own word, and serves
            when there is no other, or for who asks for it by name.
        why: Of the last failure.
    """

    route: str
    failures: int
    able: bool
    why: str


@dataclass(frozen=True)
class RouteCost:
    """What a write to a peer is taken to cost by one way, before what transfers took in the last seconds corrects it.

    A write of so many pieces and bytes is expected to take
    ``latency_us + us_per_piece * pieces + bytes / (gigabytes_per_s * 1000)`` microseconds.

    Attributes:
        route: Its name; of two of the same name, by the CPU and by the GPU, either.
        source: The medium here that it was measured from. None: it was not, and the numbers are a guess for all media.
        target: The medium there that it was measured to, or None.
        latency_us: Of any write, in microseconds.
        us_per_piece: Of each range of memory, in microseconds.
        gigabytes_per_s: Of long writes, 10^9 bytes a second; 1000 where no time for bytes was seen.
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
    def of(cls, facts: RouteCostFacts) -> RouteCost:
        """From what the core tells: what a byte costs, which is never 0."""
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
        name: What it calls itself.
        instance: The number in the addresses of its blocks.
        incarnation: Number of the run of its process: a restarted peer has another one.
        link: How it is connected: "unix", "tcp 10.0.0.2:4000".
        routes: By which blocks can travel to it, the cheapest first.
        pid: Of its process, as it sees itself.
        lent_blocks: Of ours, that it has borrowed.
        borrowed_blocks: Of its, that we have.
        reserved_blocks: Of ours, for its transfers that are under way.
        transfers: Ours to it, and what it has asked to be sent, that are under way.
        failing_routes: Those of `routes` by which the last transfer to it has failed.
        route_costs: What its routes are taken to cost: for each pair of media between which one was measured, or else a
            guess. None of those that go by ranks.
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

    @classmethod
    def of(cls, facts: PeerFacts) -> PeerInfo:
        """From what the core tells."""
        return cls(
            **{name: facts[name] for name in _PLAIN},  # type: ignore[literal-required]
            failing_routes=tuple(RouteReport(**one) for one in facts["failing_routes"]),
            route_costs=tuple(RouteCost.of(one) for one in facts["route_costs"]),
        )


_PLAIN: Final = tuple(one.name for one in fields(PeerInfo) if one.name not in ("failing_routes", "route_costs"))
