"""The instances, their limits, and what the scheduler knows of them.

An instance is in the scheduler's load table while it is up (healthy or on trial). When it is ejected it leaves the
table, and the scheduler forgets what it had cached, because most instances come back empty. A returning instance is
eased in like a new one. In the table it is open while it is not drained, is below its limit of requests, and has no
trial request.

A request holds a lease (`lease.py`) on its instance, or on two: one that computes its prompt, and one that decodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.costs import cost_model
from kvpool.control.router.errors import Refusal
from kvpool.control.router.following import Following
from kvpool.control.router.health import Breaker, State
from kvpool.control.router.lease import Instance, Lease
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.prompts import Asked
from kvpool.control.router.settings import POLICIES, InstanceSpec, RouterSettings
from kvpool.control.router.upstream import Upstream
from kvpool.control.routing_members import KINDS
from kvpool.errors import ArgumentError, StateError
from kvpool.policy.routing import Balance, Decision, GlobalScheduler, Kind, PromptTree, Request

__all__ = ["Fleet"]

_INSTANCES_MAX: Final = 1 << 14  # ids of kvpool.types


class Fleet:
    """All instances. Belongs to one event loop.

    Args:
        settings: Of the router.
        metrics: To count in.
        clock: Seconds from any start.
        adapters: Takes the names of adapters that KV events contain.

    Raises:
        ArgumentError: The profile is invalid.
        Unsupported: Events are to be followed, and their packages are missing.
    """

    def __init__(
        self,
        settings: RouterSettings,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterNames | None = None,
    ) -> None:
        adapters = AdapterNames() if adapters is None else adapters
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self.scheduler = GlobalScheduler(
            cost_model(settings.profile, settings.block_tokens),
            clock,
            policy=POLICIES[settings.policy](),
            ttl_s=settings.ttl_s,
            balance=Balance(cap=settings.cap, idle=settings.idle, warmup_s=settings.warmup_s),
            holders_max=0,
            blocks_max=settings.tree_blocks_max,
        )
        self._following = Following(settings.events, settings.events_blocks_max, metrics, adapters)
        self._evicted_counted = 0  # the tree's evictions that the metrics contain
        self._by_name: dict[str, Instance] = {}
        self._by_number: dict[int, Instance] = {}
        self._last_number = -1
        self._apart = 0  # instances that do one half
        for spec in settings.instances:
            self.add(spec)

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._by_name.values()))

    # ---- the instances

    def add(self, spec: InstanceSpec) -> Instance:
        """An instance joins. Raises ArgumentError when its name or URL is there already."""
        if any(spec.name == other.spec.name or spec.place == other.spec.place for other in self):
            raise ArgumentError(f"instance {spec.name} at {spec.place} is there already")
        if len(self._by_number) == _INSTANCES_MAX:
            raise ArgumentError(f"there are {_INSTANCES_MAX} instances, and no more fit")
        number = self._new_number()
        breaker = Breaker(self._settings.health, self._clock)
        instance = Instance(number, spec, Upstream(spec, self._settings), breaker)
        self._by_name[spec.name] = self._by_number[number] = instance
        self._apart += spec.role != "both"
        self.refresh(instance)
        return instance

    def find(self, name: str) -> Instance | None:
        """By name."""
        return self._by_name.get(name)

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
            self._take_out(instance)
        del self._by_name[name], self._by_number[instance.number]
        self._apart -= instance.spec.role != "both"
        self._metrics.forget(name)
        return instance

    def set_draining(self, name: str, draining: bool) -> Instance:
        """Whether an instance gets no new requests. Raises ArgumentError when it is not there."""
        instance = self.get(name)
        instance.draining = draining
        event(logging.INFO, "instance drained" if draining else "instance resumed", instance=name)
        self.refresh(instance)
        return instance

    def set_leaving(self, instance: Instance, leaving: bool) -> None:
        """Whether an instance gets no new requests because its member drains or has gone."""
        if instance.leaving != leaving:
            instance.leaving = leaving
            event(logging.INFO, "member drains" if leaving else "member is back", instance=instance.spec.name)
            self.refresh(instance)

    @property
    def available(self) -> int:
        """Instances that get requests."""
        return sum(instance.in_table and not instance.closed for instance in self)

    def report(self, urls: bool) -> list[dict[str, Any]]:
        """Each instance, for /instances; `urls` for eyes that may see addresses."""
        return [
            {
                "name": instance.spec.name,
                **({"url": instance.spec.url} if urls else {}),
                **({} if instance.spec.rank is None else {"rank": instance.spec.rank}),
                "role": instance.spec.role,
                "state": instance.breaker.state.value,
                "draining": instance.closed,
                "in_flight": instance.in_flight,
                "in_flight_max": self._settings.in_flight_max,
                "backlog_s": self._backlog_s(instance),
                "cached_blocks": self._tree_of(instance).blocks(instance.number) if instance.in_table else 0,
                "events": self._following.report(instance.number),
            }
            for instance in self
        ]

    # ---- requests

    @property
    def divides(self) -> bool:
        """Whether prompts are computed and answers generated by different instances, all or some."""
        return self._apart > 0

    def lease(self, asked: Asked, tried: Collection[int] = (), whole: bool = True) -> Lease:
        """Chooses an instance for a request, or one for each half of it.

        Args:
            asked: The request.
            tried: Numbers of instances that it is not to go to, since it came to nothing there; empty at the first try.
            whole: One instance answers it alone.

        Raises:
            Refusal: 503, with when to come back: there is no instance, or all are full.
        """
        began = time.perf_counter()
        request = Request(asked.tokens, asked.session, asked.namespace)
        kept_out = [self._by_number[number] for number in tried if number in self._by_number]
        again = len(tried) > 0
        decision = self._route(request, whole, kept_out, again)
        if decision is None and not whole:  # of those for the first half none can be used without the second
            kept_out += [instance for instance in self if instance.spec.role == "prefill"]
            decision = self._route(request, whole, kept_out, again)
        if decision is None:
            raise self._nobody(whole)
        decode = None if decision.decode is None else self._by_number[decision.decode]
        lease = Lease(self.scheduler, self.refresh, decision, self._by_number[decision.instance], decode)
        self._metrics.decision.observe(time.perf_counter() - began)
        return lease

    def has_other(self, tried: Collection[int], whole: bool = True) -> bool:
        """Whether instances that were not tried can answer a request now, alone or in halves."""
        roles = {instance.spec.role for instance in self if instance.number not in tried and self._open(instance)}
        return _suffice(roles, whole)

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
            if instance.in_table:
                self._follow(instance)
        self._following.tick()

    def close(self) -> None:
        """Follows nobody's events any more."""
        self._following.close()

    def measure(self) -> None:
        """Sets the gauges."""
        for instance in self:
            name = instance.spec.name
            self._metrics.up.labels(name).set(instance.in_table)
            self._metrics.draining.labels(name).set(instance.closed)
            self._metrics.in_flight.labels(name).set(instance.in_flight)
            if self._following.publishes(instance.spec):
                self._metrics.synced.labels(name).set(self._following.is_synced(instance.number))
        self._metrics.tree_blocks.set(sum(len(self.scheduler.tree(kind)) for kind in Kind))
        evicted = self.scheduler.blocks_evicted
        self._metrics.tree_evicted.inc(evicted - self._evicted_counted)
        self._evicted_counted = evicted

    # ---- inside

    def _new_number(self) -> int:
        """One that was not used for long: requests that have left an instance may still name it to the scheduler."""
        free = (self._last_number + step for step in range(1, _INSTANCES_MAX + 1))
        self._last_number = next(each % _INSTANCES_MAX for each in free if each % _INSTANCES_MAX not in self._by_number)
        return self._last_number

    def _tree_of(self, instance: Instance) -> PromptTree:
        return self.scheduler.tree(KINDS[instance.spec.role])

    def _backlog_s(self, instance: Instance) -> float | None:
        """Of one that computes prompts."""
        if not instance.in_table or instance.spec.role == "decode":
            return None
        return round(self.scheduler.backlog_s(instance.number), 6)

    def _open(self, instance: Instance) -> bool:
        """Whether an instance may get another request now."""
        full = instance.in_flight >= self._settings.in_flight_max
        busy_trial = instance.breaker.state is State.TRIAL and instance.trying
        return instance.in_table and not (instance.closed or full or busy_trial)

    def _join(self, instance: Instance) -> None:
        self.scheduler.add_instance(instance.number, KINDS[instance.spec.role])
        instance.in_table = True
        self._follow(instance)
        event(logging.INFO, "instance up", instance=instance.spec.name, state=instance.breaker.state.value)

    def _follow(self, instance: Instance) -> None:
        """Follows an instance's events if it publishes them. What fails is tried again at the next tick."""
        number = instance.number
        followed = self._following.follow(instance.spec, number, self._tree_of(instance))
        self.scheduler.set_by_events(number, followed)

    def _take_out(self, instance: Instance) -> None:
        self._following.end(instance.number)  # first, so that none of its events comes after
        self.scheduler.remove_instance(instance.number)

    def _eject(self, instance: Instance) -> None:
        self._take_out(instance)
        instance.in_table = instance.trying = False
        instance.epoch += 1
        self._metrics.ejections.labels(instance.spec.name).inc()
        event(logging.WARNING, "instance ejected", instance=instance.spec.name, in_flight=instance.in_flight)
        for scope in instance.waiting:  # these requests go to other instances
            scope.cancel()

    def _route(self, request: Request, whole: bool, kept_out: Collection[Instance], again: bool) -> Decision | None:
        """The scheduler's decision among the others; None: nobody can do it."""
        for instance in kept_out:
            if instance.in_table:
                self.scheduler.drain(instance.number)
        try:
            return self.scheduler.route(request, whole=whole, again=again)
        except StateError:
            return None
        finally:
            for instance in kept_out:
                self.refresh(instance)

    def _nobody(self, whole: bool) -> Refusal:
        there = {instance.spec.role for instance in self if instance.in_table and not instance.closed}
        if _suffice(there, whole):
            return Refusal(503, "all instances are full", "overloaded", retry_after_s=1)
        pause_s = max(1, round(self._settings.health.interval_s))
        return Refusal(503, "no instance is there to answer", "no_instance", retry_after_s=pause_s)


def _suffice(roles: Collection[str], whole: bool) -> bool:
    """Whether instances of these roles can answer a request, alone or in halves."""
    return "both" in roles or ("prefill" in roles if whole else {"prefill", "decode"} <= set(roles))
