"""What a request holds while it runs: a seat at its instance, or at two of them, and its ticket at the scheduler.

Where prefill and decode are apart, one instance computes the prompt and another generates the answer. The first seat
ends with the prompt, the second with the answer. However the request ends, seats and ticket end with it, exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import anyio

from kvpool.control.router.health import Breaker, State
from kvpool.control.router.settings import InstanceSpec
from kvpool.control.router.upstream import Upstream
from kvpool.policy.routing import Decision, GlobalScheduler

__all__ = ["Instance", "Lease", "Seat"]


class Instance:
    """One instance and its books. Changed by the fleet and by seats alone.

    Attributes:
        number: Its id for the scheduler.
        spec: Name and URL.
        upstream: Sends to it.
        breaker: Whether it is well.
        draining: It gets no new requests, because the operator said so.
        leaving: Nor does it, because its member of the cluster drains or has gone.
        in_flight: Requests that it has.
        epoch: Raised when it is ejected: what was sent before says nothing of what came back.
        wrong: The fault that the last probe found; None for none, and before the first probe.
    """

    def __init__(self, number: int, spec: InstanceSpec, upstream: Upstream, breaker: Breaker) -> None:
        self.number = number
        self.spec = spec
        self.upstream = upstream
        self.breaker = breaker
        self.draining = False
        self.leaving = False
        self.in_flight = 0
        self.epoch = 0
        self.wrong: str | None = None
        self.trying = False  # a trial is under way
        self.in_table = False
        self.waiting: set[anyio.CancelScope] = set()  # of requests that have no byte yet

    @property
    def closed(self) -> bool:
        """It gets no new requests, however well it is."""
        return self.draining or self.leaving

    @contextmanager
    def awaited(self, timeout_s: float) -> Iterator[anyio.CancelScope]:
        """A scope for waiting for a first byte: it ends by its time, or when the instance is ejected."""
        with anyio.move_on_after(timeout_s) as scope:
            self.waiting.add(scope)
            try:
                yield scope
            finally:
                self.waiting.discard(scope)


class Seat:
    """A request's place at one instance.

    Attributes:
        instance: Which.
    """

    def __init__(self, instance: Instance, refresh: Callable[[Instance], None]) -> None:
        """Takes it. `refresh` is told of every change of the instance's books."""
        self.instance = instance
        self._refresh = refresh
        self._epoch = instance.epoch
        self._trial = instance.breaker.state is State.TRIAL
        self._taken = True
        instance.in_flight += 1
        instance.trying = instance.trying or self._trial
        refresh(instance)

    @property
    def fell(self) -> bool:
        """The instance was ejected since."""
        return self.instance.epoch != self._epoch

    def answered(self) -> None:
        """The instance works: its answer has begun."""
        if not self.fell:
            self.instance.breaker.answered()
            self._refresh(self.instance)

    def broken(self) -> None:
        """The instance gave no answer, or broke off."""
        if not self.fell:
            self.instance.breaker.request_failed()
            self._refresh(self.instance)

    def leave(self) -> None:
        """The instance is no longer busy with the request. Idempotent."""
        if not self._taken:
            return
        self._taken = False
        self.instance.in_flight -= 1
        if self._trial and not self.fell:
            self.instance.trying = False
        self._refresh(self.instance)


class Lease:
    """What a request holds. A context manager; leaving it without `finished` counts as failed.

    Attributes:
        decision: What the scheduler said.
        seat: At the instance that computes the prompt.
        decode: At the one that generates the answer, if that is another one.
    """

    def __init__(
        self,
        scheduler: GlobalScheduler,
        refresh: Callable[[Instance], None],
        decision: Decision,
        instance: Instance,
        decode: Instance | None,
    ) -> None:
        self.decision = decision
        self.seat = Seat(instance, refresh)
        self.decode = None if decode is None else Seat(decode, refresh)
        self._scheduler = scheduler
        self._open = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._end(self._scheduler.failed)

    def computed(self) -> None:
        """The prompt is computed: the instance that did it has answered."""
        self._scheduler.first_token(self.decision.ticket)
        self.seat.answered()

    def finished(self) -> None:
        """The answer has passed."""
        self._end(self._scheduler.finished)

    def _end(self, tell: Callable[[int], None]) -> None:
        self._open = False
        try:
            tell(self.decision.ticket)
        finally:
            for seat in (self.seat, self.decode):
                if seat is not None:
                    seat.leave()
