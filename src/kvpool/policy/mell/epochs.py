"""Epochs (§IV): instances report what they run, the scheduler plans, instances carry it out."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.errors import ArgumentError
from kvpool.policy.mell.checks import sizes_of, whole
from kvpool.policy.mell.plan import Plan, RequestId
from kvpool.policy.mell.scheduler import Mell

__all__ = ["ClusterMonitor"]


class ClusterMonitor:
    """Collects the states of all instances, and finds out what has changed since the last epoch.

    At the beginning of an epoch each instance reports its requests, each with the tokens that it will have at the end
    of the epoch. `plan` compares the reports with the scheduler's state: a request that is no longer reported has
    departed, a longer one has grown, a submitted one arrives. An instance that does not report counts as unchanged; its
    requests are not given up until it is reported lost.

    The scheduler assumes that its moves are made. A request whose move waits (`Backlog`) is still on another GPU: so
    the monitor remembers which instance reported it last, and gives it up only when both instances have reported
    without it.

    The next plan lets requests that were lost with an instance depart and arrive again, in its one batch. Until then
    the scheduler keeps them where they were, so every change is part of a plan.

    The monitor plans an epoch but does not execute the plan: `Plan.activated` and `Plan.terminated` say which GPUs
    start and stop, the latter once nothing is left there (`Backlog.occupied`).

    Not thread-safe.

    Attributes:
        waiting: Requests that were submitted, or lost, and are not placed yet.
        refused: Requests that no GPU has room for, with their sizes; `take_refused` empties it.
    """

    def __init__(self, scheduler: Mell) -> None:
        """Makes a monitor in front of a scheduler; only the monitor may call the scheduler from then on."""
        self._scheduler = scheduler
        self._reports: dict[int, dict[RequestId, int]] = {}
        self._seen: dict[RequestId, int] = {}  # the instance that reported each request last
        self._ways: dict[RequestId, tuple[int, ...]] = {}  # the GPUs that plans have moved it to since, each once
        self._lost: dict[RequestId, None] = {}  # since the last plan
        self._lost_gpus: dict[int, None] = {}
        self.waiting: dict[RequestId, int] = {}
        self.refused: dict[RequestId, int] = {}

    def submit(self, request: RequestId, size: int) -> bool:
        """Submits a new request; its size is its prompt and what it will generate in its first epoch.

        Returns:
            Whether it is admitted: one that is longer than a GPU is refused.

        Raises:
            ArgumentError: It runs or waits already, or its size is not positive.
            ArgumentTypeError: Its size is no int.
        """
        size = whole(size, f"the tokens of request {request!r}")
        if request in self._scheduler.sizes or request in self.waiting or size < 1:
            raise ArgumentError(f"request {request!r} of {size} tokens runs or waits already, or has no tokens")
        if size > self._scheduler.capacity:
            self.refused[request] = size
            return False
        self.waiting[request] = size
        return True

    def report(self, gpu: int, requests: Mapping[RequestId, int]) -> None:
        """Reports what an instance runs; the last report of an epoch counts.

        Either instance reports a request that is moving between them. What an instance reports after it was reported
        lost is ignored until the next plan.

        Raises:
            ArgumentTypeError: A size, or the number of the GPU, is no int.
        """
        gpu, sizes = whole(gpu, "a GPU"), dict(sizes_of(requests.items()))
        if gpu not in self._lost_gpus:
            self._reports[gpu] = sizes

    def plan(self) -> Plan:
        """Plans this epoch in one batch, and clears the reports.

        A request that would grow beyond a GPU is refused, and departs.
        """
        scheduler = self._scheduler
        reported: dict[RequestId, int] = {}
        for gpu, requests in self._reports.items():
            for request, size in requests.items():
                reported[request] = max(size, reported.get(request, 0))
                self._seen[request] = gpu
                way = self._ways.pop(request, ())
                if gpu in way:
                    self._ways[request] = way[way.index(gpu) :]
        departures, growths = list(self._lost), []
        for request, size in scheduler.sizes.items():
            if request in self._lost:
                continue
            if request in reported and reported[request] > scheduler.capacity:
                self.refused[request] = reported[request]
                departures.append(request)
            elif request in reported:
                if reported[request] > size:
                    growths.append((request, reported[request]))
            elif {scheduler.where(request), self._seen.get(request, scheduler.where(request))} <= self._reports.keys():
                departures.append(request)
        plan = scheduler.batch(departures, growths, self.waiting.items(), self._lost_gpus)
        left = scheduler.sizes.keys() - self._lost.keys()
        self._seen = {request: gpu for request, gpu in self._seen.items() if request in left}
        self._ways = {request: way for request, way in self._ways.items() if request in left}
        for move in plan.moves:
            for request in move.requests:
                way = self._ways.get(request, (move.source,))
                self._ways[request] = way if move.destination in way else (*way, move.destination)
        for each in (self._reports, self.waiting, self._lost, self._lost_gpus):
            each.clear()
        return plan

    def take_refused(self) -> dict[RequestId, int]:
        """The requests that were refused since the last call."""
        refused, self.refused = self.refused, {}
        return refused

    def lost(self, gpu: int) -> list[RequestId]:
        """Reports that an instance is lost: its requests arrive again, with the tokens that they had.

        So do requests that were to move there, and those that were to leave and had not: if one still runs, the caller
        stops it. The next plan places them and terminates the instance. Later plans may use its number for another
        instance.

        Returns:
            Those requests. If one has ended, which the monitor may not know yet, take it out of `waiting`.

        Raises:
            ArgumentTypeError: The number of the GPU is no int.
        """
        scheduler, gpu = self._scheduler, whole(gpu, "a GPU")
        requests = {
            request: size
            for request, size in scheduler.sizes.items()
            if request not in self._lost and gpu in self._places(request)
        }
        self._reports.pop(gpu, None)
        self._lost_gpus[gpu] = None
        self._lost.update(dict.fromkeys(requests))
        self.waiting.update(requests)
        return list(requests)

    def _places(self, request: RequestId) -> set[int]:
        """The GPUs where a request may be, as far as the monitor can tell."""
        where = self._scheduler.where(request)
        return {where, self._seen.get(request, where), *self._ways.get(request, ())}
