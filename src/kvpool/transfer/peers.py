"""Who the peers are, who comes and goes, and where UCX is."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpool import _core
from kvpool.errors import Error
from kvpool.transfer.dispatcher import Dispatcher
from kvpool.types import Medium

__all__ = [
    "PeerCallback",
    "PeerEvent",
    "PeerInfo",
    "RankInfo",
    "RecallResult",
    "RouteCost",
    "RouteReport",
    "nccl_library",
    "ucx_library",
]

_log = logging.getLogger("kvpool.peers")


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
    def of(
        cls, route: str, source: int, target: int, latency_us: float, us_per_piece: float, us_per_byte: float
    ) -> RouteCost:
        """From what the core tells: media as numbers, 0 for none, and what a byte costs, which is never 0."""
        between = (Medium(source), Medium(target)) if source else (None, None)
        return cls(route, between[0], between[1], latency_us, us_per_piece, 1e-3 / us_per_byte)


@dataclass(frozen=True)
class PeerInfo:
    """A peer of a pool, at one moment.

    Attributes:
        name: What it calls itself.
        instance: The number in the addresses of its blocks.
        epoch: Of this incarnation: a peer that was restarted has another one.
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
    epoch: int
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
    def of(cls, *facts: Any) -> PeerInfo:
        """From what the core tells, in the order of the fields."""
        *plain, failures, costs = facts
        reports = tuple(RouteReport(*one) for one in failures)
        values = [*plain, reports, tuple(RouteCost.of(*one) for one in costs)]
        return cls(*values)


@dataclass(frozen=True)
class PeerEvent:
    """A peer has come or gone, or wants blocks back.

    Attributes:
        name: What it calls itself.
        kind: "joined": it is connected, whoever called. "lost": it is not any more; transfers with it have failed.
            "recalled": it wants blocks back that it has lent to this pool. Free them, after fetching what they hold if
            that is needed; at the deadline they are lost for this pool.
        instance: The number in the addresses of its blocks.
        epoch: Of this incarnation: tells a peer that was restarted from the one that was lost.
        error: Of one that was lost: why, mostly a PeerLost. None for the others.
        addrs: Of a recall: the blocks. Empty for the others.
        deadline: Of a recall: until when they are lent, as `time.monotonic()` tells it. None for the others.
    """

    name: str
    kind: Literal["joined", "lost", "recalled"]
    instance: int
    epoch: int
    error: Error | None = None
    addrs: tuple[int, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True)
class RecallResult:
    """What has become of the blocks that `Pool.recall` has asked for.

    Attributes:
        returned: The peer gave them back, or inserted them here.
        freed: They were taken back at the deadline, and are free: nobody can write them any more.
        quarantined: They were taken back, and are free when the peer says, or is proved, to write them no more.
    """

    returned: int
    freed: int
    quarantined: int


class PeerCallback(Dispatcher[PeerEvent]):
    """A callback of `Pool.on_peer`, until it is closed. It runs in a thread of its own, one event after another.

    Use it in a ``with``, or call ``close()``; closing the pool ends it, too.
    """

    def __init__(self, pool: _core.Pool, callback: Callable[[PeerEvent], object]) -> None:
        """Use `Pool.on_peer`."""
        self._pool = weakref.ref(pool)
        super().__init__(pool, pool._begin_peer_events(), callback, "kvpool-peers")

    def close(self) -> None:
        """Ends it: when this returns the callback is not running any more. Idempotent.

        The callback itself may call this; then it is the last time that it runs.
        """
        pool = self._pool()
        if pool is not None and not self.closed:
            with contextlib.suppress(Error):  # the pool is closed, or a parent process's
                pool._end_peer_events()  # before anybody can begin again
        super().close()

    def _take(self, pool: _core.Pool) -> PeerEvent | None:
        event = pool._next_peer_event()
        if event is None:
            return None
        name, kind, instance, epoch, error, addrs, deadline = event
        fields = {"peer": name, "instance": instance, "epoch": epoch}
        if kind == "joined":
            _log.info("%s has joined", name, extra=fields)
        elif kind == "lost":
            _log.warning("%s is lost: %s", name, error, extra=fields | {"reason": type(error).__name__})
        else:
            _log.info("%s recalls %d blocks", name, len(addrs), extra=fields | {"blocks": len(addrs)})
        return PeerEvent(name, kind, instance, epoch, error, addrs, deadline)  # type: ignore[arg-type]

    def _failed(self, item: PeerEvent) -> None:
        _log.exception("the callback for %s, which %s, has failed", item.name, item.kind, extra={"peer": item.name})


@dataclass(frozen=True)
class RankInfo:
    """A rank of a logical instance, at one moment.

    Attributes:
        rank: Its number.
        joined: Whether it has joined; the rest is empty before.
        pid: Of its process, as it sees itself.
        host: Boot id and PID namespace of its machine: equal for ranks that share one.
        link: How it is connected: "unix", "tcp 10.0.0.2:4000"; "closed" when it is lost.
        address: Where ranks of peers connect to.
    """

    rank: int
    joined: bool
    pid: int
    host: str
    link: str
    address: str


def ucx_library(setting: str) -> str:
    """What the core is told for the setting `ucx`: "wheel" becomes the path of the wheel's library, if it is installed.

    Nothing is imported: the wheel's own module would load the library before anybody knows whether it is wanted.
    """
    if setting != "wheel":
        return setting
    return _wheel_library("libucx", "libucp.so.0") or setting


def nccl_library(setting: str) -> str:
    """The same for the setting `nccl`."""
    if setting != "wheel":
        return setting
    return _wheel_library("nvidia", "libnccl.so.2", "nccl") or setting


def _wheel_library(package: str, name: str, beneath: str = "") -> str:
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        library = Path(folder, beneath, "lib", name)
        if library.is_file():
            return str(library)
    return ""
