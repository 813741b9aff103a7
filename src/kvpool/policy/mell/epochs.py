"""Epochs (§IV): instances report what they run, the scheduler plans, instances carry it out."""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.errors import ArgumentError
from kvpool.policy.mell.plan import Plan, RequestId
from kvpool.policy.mell.scheduler import Mell

__all__ = ["ClusterMonitor"]


class ClusterMonitor:
    """Collects the states of all instances, and finds out what has changed since the last epoch.

    At the beginning of an epoch each instance reports its requests, each with the tokens that it will have at the end
    of the epoch. `plan` compares with what the scheduler knows: who is no longer reported has departed, who is longer
    has grown, who was submitted arrives. An instance that does not report counts as unchanged; its requests are not
    given up until it is said to be lost.

    The scheduler takes its moves for made. A request whose move waits (`Backlog`) is where the scheduler does not have
    it: so the monitor remembers who has reported it last, and gives it up only when both instances have reported
    without it.

    It plans an epoch and carries nothing out: `Plan.activated` and `Plan.terminated` say which GPUs start and stop, the
    latter once nothing is left there (`Backlog.occupied`).

    Not thread-safe.

    Attributes:
        waiting: Requests that were submitted and are not placed yet.
        refused: Requests that no GPU has room for, with their sizes; `take_refused` empties it.
    """

    def __init__(self, scheduler: Mell) -> None:
        """Makes a monitor in front of a scheduler, which nobody else calls."""
        self._scheduler = scheduler
        self._reports: dict[int, dict[RequestId, int]] = {}
        self._seen: dict[RequestId, int] = {}  # who has reported each request last
        self.waiting: dict[RequestId, int] = {}
        self.refused: dict[RequestId, int] = {}

    def submit(self, request: RequestId, size: int) -> bool:
        """A new request, with its prompt and what it will generate in its first epoch.

        Returns:
            Whether it is admitted: one that is longer than a GPU is refused.

        Raises:
            ArgumentError: It runs or waits already, or its size is not positive.
        """
        if request in self._scheduler.sizes or request in self.waiting or size < 1:
            raise ArgumentError(f"request {request!r} of {size} tokens runs or waits already, or has no tokens")
        if size > self._scheduler.capacity:
            self.refused[request] = size
            return False
        self.waiting[request] = size
        return True

    def report(self, gpu: int, requests: Mapping[RequestId, int]) -> None:
        """What an instance runs; the last report of an epoch counts.

        A request that is under way from one instance to another is reported by either of them.
        """
        self._reports[gpu] = dict(requests)

    def plan(self) -> Plan:
        """The plan of this epoch, in one batch; the reports are used up.

        A request that would grow beyond a GPU is refused, and departs.
        """
        scheduler = self._scheduler
        reported: dict[RequestId, int] = {}
        for gpu, requests in self._reports.items():
            for request, size in requests.items():
                reported[request] = max(size, reported.get(request, 0))
                self._seen[request] = gpu
        departures, growths = [], []
        for request, size in scheduler.sizes.items():
            if request in reported and reported[request] > scheduler.capacity:
                self.refused[request] = reported[request]
                departures.append(request)
            elif request in reported:
                if reported[request] > size:
                    growths.append((request, reported[request]))
            elif {scheduler.where(request), self._last(request)} <= self._reports.keys():
                departures.append(request)
        plan = scheduler.batch(departures, growths, self.waiting.items())
        self._reports.clear()
        self.waiting.clear()
        self._seen = {request: gpu for request, gpu in self._seen.items() if request in scheduler.sizes}
        return plan

    def take_refused(self) -> dict[RequestId, int]:
        """The requests that were refused since the last call."""
        refused, self.refused = self.refused, {}
        return refused

    def lost(self, gpu: int) -> list[RequestId]:
        """An instance is gone with all it had: its requests arrive anew, with the tokens that they had.

        So do those that were to come there, and those that were to leave and had not: where one still runs, it is to be
        stopped.

        Returns:
            Those requests.
        """
        scheduler = self._scheduler
        requests = {
            request: size
            for request, size in scheduler.sizes.items()
            if gpu in (scheduler.where(request), self._last(request))
        }
        self._reports.pop(gpu, None)
        scheduler.batch(departures=requests)
        for request in requests:
            self._seen.pop(request, None)
        self.waiting.update(requests)
        return list(requests)

    def _last(self, request: RequestId) -> int:
        """Who has reported a request last; where the scheduler has it before anybody did."""
        return self._seen.get(request, self._scheduler.where(request))
