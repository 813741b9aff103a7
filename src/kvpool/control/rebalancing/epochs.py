"""One instance's part in the epochs, step by step."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from kvpool.control.rebalancing.carrying import Carrier, Migrates
from kvpool.control.rebalancing.engine import RebalancedEngine
from kvpool.control.rebalancing.members import KnowsMembers, MemberStates, PublishesState, Said, published
from kvpool.control.rebalancing.seat import Seat
from kvpool.control.rebalancing.totals import Tally
from kvpool.errors import Error, StateError
from kvpool.policy.rebalancing import (
    NAME_BYTES_MAX,
    NO_PLAN,
    Beats,
    EpochPlan,
    InstanceState,
    Planner,
    RunningRequest,
    WaitingRequest,
    duties_of,
)

__all__ = ["Epochs"]

_log = logging.getLogger("kvpool.rebalancing")

_PATIENCE_EPOCHS: Final = 2  # so long the planner waits for members that have not answered the last plan


class Epochs:
    """One instance's part in the epochs, step by step, without a thread: `Rebalancer` calls `step` again and again.

    One thread at a time may call `step`; any may call the rest.

    Args:
        migrations: Of the instance's pool.
        engine: Its requests.
        cluster: Of which it is a member.
        capacity: Tokens that its requests have room for.
        growth: Tokens by which a request grows in an epoch, at most.
        planner: How it plans when that falls to it.
        epoch_s: Seconds between two plans.
        move_s: Deadline of one move.
        moves_at_once: So many requests leave here at a time.
        activate: Called at the planner with a number: so many more instances are needed than are members now. Again in
            every epoch until they have joined: an instance that is starting counts.
        terminate: Called when this instance has nothing more to do, and is to end: once, and again if it has raised.
        changed: Called when `step` has something to do.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        migrations: Migrates,
        engine: RebalancedEngine,
        cluster: KnowsMembers,
        *,
        capacity: int,
        growth: int,
        planner: Planner,
        epoch_s: float,
        move_s: float,
        moves_at_once: int,
        activate: Callable[[int], object] | None = None,
        terminate: Callable[[], object] | None = None,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        registration = cluster.registration
        if registration is None:
            raise StateError("rebalancing: attach the pool to the cluster first")
        self._registration = registration
        self.seat = Seat(registration)
        # Not a method: the carrier has it, and one that is dropped without `close` ends at once, before any search for
        # cycles.
        self._lease = partial(_lease_of, registration, self.seat)
        self._instance = registration.instance
        self._migrations = migrations
        self._engine = engine
        self._cluster = cluster
        self._capacity = capacity
        self._growth = growth
        self._planner = planner
        self._epoch_s = epoch_s
        self._activate = activate
        self._terminate = terminate
        self._clock = clock
        self.tally = Tally()
        self.carrier = Carrier(
            migrations,
            self.tally,
            move_s,
            moves_at_once,
            planner.behind_max * epoch_s,
            changed,
            self._lease,
            clock,
        )
        self._members = MemberStates()
        self._plan: EpochPlan | None = None  # the latest that this instance has made, while it is the planner
        self._planned_at = clock()  # so that the others are seen before the first plan
        self._idle_since = clock()
        self._silent_s = planner.behind_max * epoch_s  # one whose steps fail for so long takes no part
        # A planner that does not act is given up as one that is silent; it knows that well before the others do.
        quiet_max_s = max(self._silent_s, cluster.lease_s)
        self._beats = Beats(self._instance, epoch_s, quiet_max_s + epoch_s)
        self._step_max_s = quiet_max_s / 2
        self._beat = 0
        self._beat_at = clock() - epoch_s
        self._late = False  # whether the last plan was dropped
        self._failing_since: float | None = None
        self._logged: set[int] = set()  # whose numbers cannot be
        self._draining = False
        self._terminated = False

    @property
    def left(self) -> bool:
        """Whether this has left the epochs or the cluster: also if a later one of the same member has its place."""
        return self.seat.left or self._registration.closed

    @property
    def draining(self) -> bool:
        """Whether this instance takes nothing more."""
        return self._draining

    @property
    def plans(self) -> bool:
        """Whether this instance is the planner."""
        return self._plan is not None and not self.left

    def drain(self) -> None:
        """From now on this instance takes nothing more; plans move its requests away, and then it ends."""
        self._draining = True

    def step(self) -> None:
        """Does what is to be done now. Waits for nothing but the engine.

        Raises:
            ClosedError: The instance has left the cluster.
            StateError: Another incarnation has its name.
            PeerLost: The instance has lost a rank, and its memory with it: others are to give it up.
        """
        self._migrations.check()
        began, lease = self._clock(), self._lease()  # before what the others say: it may be stopped in between
        said = self._members.read(self._cluster.members())
        said.pop(self._instance, None)  # what this instance says is here, and newer
        for instance in self._strange(said):
            del said[instance]
        planner = self._beats.planner({instance: each.beat for instance, each in said.items()}, began)
        if lease is not None and self._is_new(began, lease):
            plan = said[planner].plan if planner in said else None
            if plan is not None and self.seat.accept(plan, planner, [each.state for each in said.values()]):
                self._carry_out(plan, said, lease)
            if planner == self._instance:
                self._plan_if_due(said, began, lease)
                self._count_epoch(began)
        if planner != self._instance:
            self._plan = None
        self._publish(self._state(said))
        self._failing_since = None

    def failed(self) -> None:
        """A step has failed. When none succeeds for `behind_max` epochs, this instance takes no part until one does."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        elif now - self._failing_since >= self._silent_s:
            self._plan = None
            with contextlib.suppress(Error):
                self.seat.say({})

    def leave(self) -> None:
        """Publishes that this instance takes no part any more, whatever a step that goes on still does."""
        self.seat.leave()

    # ---- what this instance says

    def _state(self, said: dict[int, Said]) -> InstanceState:
        rows, rest = _named(self._engine.running())
        waiting, unnamed = _named(self._engine.waiting())
        if rest + unnamed:
            _log.warning("requests of %d tokens have names that cannot be published: they stay", rest + unnamed)
        ids = {each.name: instance for instance, each in said.items()}
        leaving, arriving = self.carrier.leaving(), set(self._migrations.arriving())
        running = []
        for name, tokens in rows.items():
            if name in leaving:
                running.append(RunningRequest(name, tokens, False, ids.get(leaving[name], 0)))
            else:
                running.append(RunningRequest(name, tokens, name not in arriving and not self.carrier.stays(name)))
        self.carrier.forget(list(rows))
        now = self._clock()
        if rows or waiting or arriving or rest:
            self._idle_since = now
        return InstanceState(
            self._instance,
            self._capacity,
            tuple(running),
            tuple(WaitingRequest(name, tokens) for name, tokens in waiting.items()),
            self._growth,
            rest,
            self.seat.book.accepted,
            min(int((now - self._idle_since) / self._epoch_s), self._planner.idle_epochs),
            self._draining,
            len(arriving),
        )

    def _publish(self, state: InstanceState) -> None:
        self.seat.say(published(state, self._plan, self._beat, self._migrations.totals()))

    # ---- what it does

    def _strange(self, said: dict[int, Said]) -> set[int]:
        """Instances that take no part, whatever they say: their numbers would end all plans. Logged once."""
        numbers = {each: max(one.state.last, one.plan.number if one.plan else NO_PLAN) for each, one in said.items()}
        found = self.seat.book.strange(numbers)
        for instance in found - self._logged:
            why = "its plans have numbers that cannot be"
            _log.warning("instance %d is left out: %s", instance, why, extra={"member": said[instance].name})
        self._logged = found
        return found

    def _is_new(self, began: float, lease: int) -> bool:
        """Whether what was read in a step counts: the others have not given this instance up since the step began."""
        return self._lease() == lease and self._clock() - began < self._step_max_s and not self.seat.left

    def _count_epoch(self, now: float) -> None:
        """Goes on with its beat, once an epoch. One whose plans come too late lets the next member plan."""
        if now - self._beat_at >= self._epoch_s and not self._late:
            self._beat += 1
            self._beat_at = now

    def _carry_out(self, plan: EpochPlan, said: dict[int, Said], lease: int) -> None:
        """Carries out this instance's part of a plan that it has accepted."""
        self.tally.count("plans_accepted")
        state = self._state(said)
        busy = bool(state.running or state.waiting or state.rest or state.arriving)
        duties = duties_of(
            plan,
            self._instance,
            {each.name for each in state.running if each.free},
            {each.name for each in state.waiting},
            {self._instance, *said},
            busy,
        )
        names = {self._instance: self._registration.name} | {instance: one.name for instance, one in said.items()}
        self.tally.moved("void", duties.void)
        self.carrier.carry(duties.moves, names, lease)
        for place in duties.placed:
            self._call("place", partial(self._engine.place, place.request, names[place.destination]))
            self.tally.count("placed")
        if duties.ends:
            self._draining = True
            if not self._terminated:  # one that raises is called again: the planner asks until this has gone
                self._terminated = self._call("terminate", self._terminate)

    def _plan_if_due(self, said: dict[int, Said], began: float, lease: int) -> None:
        """Makes a plan for all, once an epoch, and carries out its own part."""
        now = self._clock()
        since = now - self._planned_at
        if since < self._epoch_s or (since < _PATIENCE_EPOCHS * self._epoch_s and self._waits(said)):
            return
        self._planned_at = now
        self._late = True  # until there is a plan: if none can be made, the next member is to plan
        states = [self._state(said), *(each.state for each in said.values())]
        number = self.seat.book.next_number(states)
        plan = self._planner.plan(states, number, self._instance)
        self._late = not self._is_new(began, lease)
        if self._late:  # it was stopped meanwhile: another one plans, or has planned
            _log.warning("a plan was dropped: it was %.1f s in the making", self._clock() - began)
            return
        if self._plan is None:
            self.tally.count("takeovers")
        # Where another one has planned since, nobody accepts what this one has asked for before: it asks anew.
        if self._plan is None or number.term > self._plan.number.term or not plan.asks_the_same(self._plan):
            self._plan = plan
            self.seat.book.made(number)
            self.tally.count("plans_made")
            if self.seat.accept(plan, self._instance):
                self._carry_out(plan, said, lease)
        if plan.starts and self._activate is not None and not self.seat.left:
            self._call("activate", partial(self._activate, plan.starts))

    def _waits(self, said: dict[int, Said]) -> bool:
        """Whether members have still to answer the last plan, but for those that have not followed for long."""
        if self._plan is None:
            return False
        number = self._plan.number
        follow = [each.state.last for each in said.values()]
        return any(last < number and number.epoch - last.epoch <= self._planner.behind_max for last in follow)

    def _call(self, what: str, call: Callable[[], object] | None) -> bool:
        """Calls the application, if it wants that. Whether it has not raised."""
        try:
            if call is not None:
                call()
        except Exception:
            _log.exception("the application failed to %s", what)
            return False
        return True


def _lease_of(registration: PublishesState, seat: Seat) -> int | None:
    """Which of its leases an instance has: one that it has regained is another. None: it has none, or has left."""
    return registration.leases_lost if registration.lease_valid() and not seat.left else None


def _named(requests: Iterable[tuple[str, int]]) -> tuple[dict[str, int], int]:
    """Requests whose names can be published, each once, with their tokens, 1 or more; and the tokens of the others."""
    found: dict[str, int] = {}
    rest = 0
    for name, tokens in requests:
        if 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
            found[name] = max(1, int(tokens))
        else:
            rest += int(tokens)
    return found, rest
