"""The instances, their limits, and what the scheduler knows of them.

An instance is in the scheduler's load table while it is up (healthy or on trial). When it is ejected it leaves the
table, and the scheduler forgets what it had cached, because most instances come back empty. A returning instance is
eased in like a new one. In the table it is open while it is not drained, is below its limit of requests, and has no
trial request.

A request holds a lease on its instance. However the request ends, the lease ends with it, exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final

import anyio

from kvpool.control.router.costs import cost_model
from kvpool.control.router.errors import Refusal
from kvpool.control.router.health import Breaker, State
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.prompts import Asked
from kvpool.control.router.settings import POLICIES, InstanceSpec, RouterSettings
from kvpool.control.router.upstream import Upstream
from kvpool.errors import ArgumentError, StateError
from kvpool.policy.routing import Balance, Decision, GlobalScheduler, Kind, Request

__all__ = ["Fleet", "Instance", "Lease"]

_INSTANCES_MAX: Final = 1 << 14  # ids of kvpool.types


class Instance:
    """One instance and its books. Changed by the fleet alone.

    Attributes:
        number: Its id for the scheduler.
        spec: Name and URL.
        upstream: Sends to it.
        breaker: Whether it is well.
        draining: It gets no new requests.
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
        self.in_flight = 0
        self.epoch = 0
        self.wrong: str | None = None
        self.trying = False  # a trial is under way
        self.in_table = False
        self.waiting: set[anyio.CancelScope] = set()  # of requests that have no byte yet

    @contextmanager
    def awaited(self, timeout_s: float) -> Iterator[anyio.CancelScope]:
        """A scope for waiting for a first byte: it ends by its time, or when the instance is ejected."""
        with anyio.move_on_after(timeout_s) as scope:
            self.waiting.add(scope)
            try:
                yield scope
            finally:
                self.waiting.discard(scope)


class Lease:
    """A request's place at an instance. A context manager; leaving it without `finished` counts as failed.

    Attributes:
        instance: The chosen one.
        decision: What the scheduler said.
    """

    def __init__(self, fleet: Fleet, instance: Instance, decision: Decision) -> None:
        self.instance = instance
        self.decision = decision
        self._fleet = fleet
        self._epoch = instance.epoch
        self._trial = instance.breaker.state is State.TRIAL
        self._open = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._end(self._fleet.scheduler.failed)

    @property
    def instance_fell(self) -> bool:
        """The instance was ejected since."""
        return self.instance.epoch != self._epoch

    def first_byte(self) -> None:
        """The answer has begun: the prompt is computed, the instance works."""
        self._fleet.scheduler.first_token(self.decision.ticket)
        if not self.instance_fell:
            self.instance.breaker.answered()
            self._fleet.refresh(self.instance)

    def broken(self) -> None:
        """The instance gave no answer, or broke off."""
        if not self.instance_fell:
            self.instance.breaker.request_failed()
            self._fleet.refresh(self.instance)

    def finished(self) -> None:
        """The answer has passed."""
        self._end(self._fleet.scheduler.finished)

    def _end(self, tell: Callable[[int], None]) -> None:
        self._open = False
        self.instance.in_flight -= 1
        if self._trial and not self.instance_fell:
            self.instance.trying = False
        try:
            tell(self.decision.ticket)
        finally:
            self._fleet.refresh(self.instance)


class Fleet:
    """All instances. Belongs to one event loop.

    Args:
        settings: Of the router.
        metrics: To count in.
        clock: Seconds from any start.

    Raises:
        ArgumentError: The profile is invalid.
    """

    def __init__(self, settings: RouterSettings, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self.scheduler = GlobalScheduler(
            cost_model(settings.profile),
            clock,
            policy=POLICIES[settings.policy](),
            ttl_s=settings.ttl_s,
            balance=Balance(cap=settings.cap, idle=settings.idle, warmup_s=settings.warmup_s),
            learn_at="dispatch",  # the same prompt a moment later follows into the same queue
            holders_max=0,
            blocks_max=settings.tree_blocks_max,
        )
        self._tree = self.scheduler.tree(Kind.COLOCATED)
        self._evicted_counted = 0  # the tree's evictions that the metrics contain
        self._by_name: dict[str, Instance] = {}
        self._by_number: dict[int, Instance] = {}
        for spec in settings.instances:
            self.add(spec)

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._by_name.values()))

    # ---- the instances

    def add(self, spec: InstanceSpec) -> Instance:
        """An instance joins. Raises ArgumentError when its name or URL is there already."""
        if any(spec.name == other.spec.name or spec.url == other.spec.url for other in self):
            raise ArgumentError(f"instance {spec.name} at {spec.url} is there already")
        number = next(number for number in range(_INSTANCES_MAX + 1) if number not in self._by_number)
        if number == _INSTANCES_MAX:
            raise ArgumentError(f"there are {_INSTANCES_MAX} instances, and no more fit")
        breaker = Breaker(self._settings.health, self._clock)
        instance = Instance(number, spec, Upstream(spec, self._settings), breaker)
        self._by_name[spec.name] = self._by_number[number] = instance
        self.refresh(instance)
        return instance

    def get(self, name: str) -> Instance:
        """By name. Raises ArgumentError for one that is not there."""
        if name not in self._by_name:
            raise ArgumentError(f"no instance {name!r}; there are {', '.join(self._by_name) or 'none'}")
        return self._by_name[name]

    def remove(self, name: str) -> Instance:
        """An instance leaves. Raises StateError while it has requests, ArgumentError when it is not there."""
        instance = self.get(name)
        if instance.in_flight:
            raise StateError(f"instance {name} has {instance.in_flight} requests; drain it first")
        if instance.in_table:
            self.scheduler.remove_instance(instance.number)
        del self._by_name[name], self._by_number[instance.number]
        self._metrics.forget(name)
        return instance

    def set_draining(self, name: str, draining: bool) -> Instance:
        """Whether an instance gets no new requests. Raises ArgumentError when it is not there."""
        instance = self.get(name)
        instance.draining = draining
        event(logging.INFO, "instance drained" if draining else "instance resumed", instance=name)
        self.refresh(instance)
        return instance

    @property
    def available(self) -> int:
        """Instances that get requests."""
        return sum(instance.in_table and not instance.draining for instance in self)

    def report(self, urls: bool) -> list[dict[str, Any]]:
        """Each instance, for /instances; `urls` for eyes that may see addresses."""
        return [
            {
                "name": instance.spec.name,
                **({"url": instance.spec.url} if urls else {}),
                "state": instance.breaker.state.value,
                "draining": instance.draining,
                "in_flight": instance.in_flight,
                "in_flight_max": self._settings.in_flight_max,
                "backlog_s": round(self.scheduler.backlog_s(instance.number), 6) if instance.in_table else None,
                "cached_blocks": self._tree.blocks(instance.number) if instance.in_table else 0,
            }
            for instance in self
        ]

    # ---- requests

    def lease(self, asked: Asked, tried: Collection[int] = ()) -> Lease:
        """Chooses an instance for a request.

        Args:
            asked: The request.
            tried: Numbers of instances that it is not to go to.

        Raises:
            Refusal: 503, with when to come back: there is no instance, or all are full.
        """
        began = time.perf_counter()
        kept_out = [self._by_number[number] for number in tried if number in self._by_number]
        for instance in kept_out:
            if instance.in_table:
                self.scheduler.drain(instance.number)
        try:
            decision = self.scheduler.route(Request(asked.tokens, asked.session, asked.namespace))
        except StateError as error:
            raise self._nobody() from error
        finally:
            for instance in kept_out:
                self.refresh(instance)
        instance = self._by_number[decision.instance]
        lease = Lease(self, instance, decision)
        instance.in_flight += 1
        instance.trying = instance.trying or instance.breaker.state is State.TRIAL
        self.refresh(instance)
        self._metrics.decision.observe(time.perf_counter() - began)
        return lease

    def has_other(self, tried: Collection[int]) -> bool:
        """Whether an instance that was not tried may get a request now."""
        return any(instance.number not in tried and self._open(instance) for instance in self)

    def probed(self, instance: Instance, wrong: str | None) -> None:
        """An instance was asked how it is.

        One that has never been well is not ejected, so nothing else would say why it gets nothing: the first failed
        probe is logged, and each with another reason.

        Args:
            instance: Which.
            wrong: Its fault; None for none.
        """
        breaker, spec = instance.breaker, instance.spec
        if wrong is not None and wrong != instance.wrong and breaker.state is State.STARTING:
            path = self._settings.health.path
            event(logging.WARNING, "instance not up", instance=spec.name, url=spec.url, path=path, cause=wrong)
        instance.wrong = wrong
        (breaker.probe_passed if wrong is None else breaker.probe_failed)()
        self.refresh(instance)

    def refresh(self, instance: Instance) -> None:
        """Brings the scheduler to what the books say. To be called after every change of them."""
        if self._by_number.get(instance.number) is not instance:
            return  # it was removed meanwhile
        state = instance.breaker.state
        up = state in (State.HEALTHY, State.TRIAL)
        if up and not instance.in_table:
            self._join(instance)
        elif not up and instance.in_table:
            self._eject(instance)
        if up:
            (self.scheduler.resume if self._open(instance) else self.scheduler.drain)(instance.number)

    def tick(self) -> None:
        """What time alone changes: exclusions end. Every second or so."""
        for instance in self:
            self.refresh(instance)

    def measure(self) -> None:
        """Sets the gauges."""
        for instance in self:
            name = instance.spec.name
            self._metrics.up.labels(name).set(instance.in_table)
            self._metrics.draining.labels(name).set(instance.draining)
            self._metrics.in_flight.labels(name).set(instance.in_flight)
        self._metrics.tree_blocks.set(len(self._tree))
        evicted = self._tree.evicted
        self._metrics.tree_evicted.inc(evicted - self._evicted_counted)
        self._evicted_counted = evicted

    # ---- inside

    def _open(self, instance: Instance) -> bool:
        """Whether an instance may get another request now."""
        full = instance.in_flight >= self._settings.in_flight_max
        busy_trial = instance.breaker.state is State.TRIAL and instance.trying
        return instance.in_table and not (instance.draining or full or busy_trial)

    def _join(self, instance: Instance) -> None:
        self.scheduler.add_instance(instance.number)
        instance.in_table = True
        event(logging.INFO, "instance up", instance=instance.spec.name, state=instance.breaker.state.value)

    def _eject(self, instance: Instance) -> None:
        self.scheduler.remove_instance(instance.number)
        instance.in_table = instance.trying = False
        instance.epoch += 1
        self._metrics.ejections.labels(instance.spec.name).inc()
        event(logging.WARNING, "instance ejected", instance=instance.spec.name, in_flight=instance.in_flight)
        for scope in instance.waiting:  # these requests go to other instances
            scope.cancel()

    def _nobody(self) -> Refusal:
        full = any(instance.in_table and not instance.draining for instance in self)
        if full:
            return Refusal(503, "all instances are full", "overloaded", retry_after_s=1)
        pause_s = max(1, round(self._settings.health.interval_s))
        return Refusal(503, "no instance is there to answer", "no_instance", retry_after_s=pause_s)
