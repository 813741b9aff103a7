"""How much of a scheduler's moves the links of the paper carry, and how much the token path takes over (§V)."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.mell.cells import EPOCH_S, Hardware
from kvpool.policy import mell
from kvpool.sim.packing import Epoch

NETWORK_GB_S = 10 / 8
PCIE_GB_S = 25.0  # of 4.0 x16, as measured on most machines
SHARE = 0.5  # of links and of idle computation, for migration


@dataclass
class Carrier:
    """Lets a backlog divide the moves of each epoch, and counts.

    Room is not counted: all requests grow at one speed here, whatever is made of their moves.

    Attributes:
        hardware: Its machines, links and computation.
        computing: Whether there is a token path.
        planned: Moves of the scheduler.
        made: Of them, as KV cache within a machine and between machines, and as tokens.
        waited: Epochs that moves waited, all together.
        ended: Moves whose request ended before they were made.
    """

    hardware: Hardware
    computing: bool
    planned: int = 0
    made: dict[str, int] = field(default_factory=lambda: {"pcie": 0, "network": 0, "tokens": 0})
    waited: int = 0
    ended: int = 0
    _deferred: list[mell.Move] = field(default_factory=list)
    _sizes: dict[mell.RequestId, int] = field(default_factory=dict)
    _where: dict[mell.RequestId, int] = field(default_factory=dict)
    _backlog: mell.Backlog = field(default_factory=mell.Backlog)

    def watch(self, epoch: Epoch, plan: mell.Plan) -> None:
        """One epoch of a run."""
        for request in epoch.departures:
            del self._sizes[request], self._where[request]
        self.planned += len(plan.moves)
        self.ended += sum(self._sizes.keys().isdisjoint(move.requests) for move in self._deferred)
        moves = [*self._deferred, *plan.moves]
        batches: dict[int, int] = {}
        for gpu in self._where.values():
            batches[gpu] = batches.get(gpu, 0) + 1
        room = dict.fromkeys((move.destination for move in moves), 1 << 50)
        division = self._backlog.divide(plan.moves, self._boundaries(moves), batches, self._sizes, room)
        for move in division.as_kv:
            self.made["pcie" if self._links(move.source, move.destination)[0][0] == "pcie" else "network"] += 1
        self.made["tokens"] += len(division.as_tokens)
        self.waited += len(division.deferred)
        self._deferred = division.deferred
        for move in division.made:
            self._where.update(dict.fromkeys(move.requests, move.destination))
        self._where.update({place.request: place.gpu for place in plan.placed})
        self._sizes.update([*epoch.growths, *epoch.arrivals])

    def summary(self) -> dict[str, float]:
        """Parts of all moves, in percent, and how long one waited on average."""
        total = max(1, self.planned)
        found = {name: 100 * count / total for name, count in self.made.items()}
        found["ended first"] = 100 * self.ended / total
        found["waits at the end"] = 100 * len(self._deferred) / total
        found["made needless by a later move"] = 100 - sum(found.values())
        found["mean wait, s"] = self.waited * EPOCH_S / total
        return found

    def _links(self, source: int, destination: int) -> list[tuple[str, int]]:
        """Each GPU's own bus; between machines the network of either."""
        first, second = source // self.hardware.per_machine, destination // self.hardware.per_machine
        buses = [("pcie", source), ("pcie", destination)]
        return buses if first == second else [("network", first), ("network", second), *buses]

    def _boundaries(self, moves: list[mell.Move]) -> mell.Boundaries:
        """What each link carries in an epoch; what a step has idle beside its batch, over the steps of an epoch."""
        rates = {"pcie": PCIE_GB_S, "network": NETWORK_GB_S}
        links = {link for move in moves for link in self._links(move.source, move.destination)}
        link_tokens: dict[mell.Link, int] = {
            link: int(SHARE * rates[link[0]] * 1e9 * EPOCH_S / self.hardware.kv_bytes) for link in links
        }
        steps = SHARE * EPOCH_S / self.hardware.step_s
        idle = {batch: int(steps * (self.hardware.knee - batch)) for batch in range(0, self.hardware.knee, 8)}
        profile = mell.ComputeProfile(idle)
        compute = {move.destination: profile for move in moves} if self.computing else {}
        return mell.Boundaries(self._links, link_tokens, compute)
