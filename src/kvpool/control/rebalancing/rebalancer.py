"""The loop of one instance: says what it runs, carries out its part of plans, and plans if that falls to it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import get_args

from kvpool.cluster import Cluster
from kvpool.control.amounts import above_zero, count_from
from kvpool.control.migration import Migrations
from kvpool.control.rebalancing.engine import RebalancedEngine
from kvpool.control.rebalancing.epochs import Epochs
from kvpool.control.rebalancing.seat import Seat
from kvpool.control.rebalancing.totals import RebalancingTotals
from kvpool.errors import ArgumentError, Error, PeerLost, StateError
from kvpool.policy.rebalancing import SCHEDULERS, Planner, PolicyName

__all__ = ["Rebalancer"]

_log = logging.getLogger("kvpool.rebalancing")

_Made = tuple[weakref.ref[Epochs], Seat]


class Rebalancer:
    """Takes part in the epochs of a cluster: its requests move, begin and end where one plan of all instances says.

    The live member with the lowest id plans; another takes over when it dies, or does not plan any more. Each instance
    has one of these, with equal settings; a later one of the same member takes the place of an earlier one, which then
    plans, publishes and begins nothing more. A context manager; thread-safe.

    Args:
        migrations: Of the pool: they carry out the moves.
        engine: Says what runs and waits, and places new requests.
        cluster: The pool's; attach the pool first.
        capacity: Tokens that requests have room for here; equal at all instances.
        growth: Tokens by which a request grows until the next plan is carried out: about two epochs of decoding.
        policy: "mell", "bf", "wf" or "lb", or a `Planner` with its limits; equal at all instances.
        epoch_s: Seconds between two plans: two heartbeats of the cluster or more, since what members say and plan
            travels with these.
        move_s: Deadline of one move; None: ten epochs.
        moves_at_once: So many requests leave here at a time.
        activate: See `Epochs`; called from the planner's thread.
        terminate: See `Epochs`.

    Raises:
        StateError: The pool is no member of the cluster.
        ArgumentError: A value out of range.
    """

    def __init__(
        self,
        migrations: Migrations,
        engine: RebalancedEngine,
        cluster: Cluster,
        *,
        capacity: int,
        growth: int = 0,
        policy: PolicyName | Planner = "mell",
        epoch_s: float = 1.0,
        move_s: float | None = None,
        moves_at_once: int = 4,
        activate: Callable[[int], object] | None = None,
        terminate: Callable[[], object] | None = None,
    ) -> None:
        epoch_s = above_zero(epoch_s, "epoch_s")
        move_s = above_zero(10 * epoch_s if move_s is None else move_s, "move_s")
        capacity = count_from(capacity, "capacity", 1)
        moves_at_once = count_from(moves_at_once, "moves_at_once", 1)
        growth = count_from(growth, "growth", 0)
        planner = _planner(policy)
        self._wake = wake = threading.Event()
        self._stop = threading.Event()
        self._closing = threading.Lock()
        self._watch = cluster.on_change(lambda event: wake.set())
        made: SimpleQueue[_Made | None] = SimpleQueue()
        args = made, wake, self._stop, epoch_s
        self._thread = threading.Thread(target=_run, args=args, name="kvpool-rebalancing", daemon=True)
        try:
            self._thread.start()
            # Last, since it takes the seat: if this one cannot be made, an earlier one goes on.
            self._epochs = Epochs(
                migrations,
                engine,
                cluster,
                capacity=capacity,
                growth=growth,
                planner=planner,
                epoch_s=epoch_s,
                move_s=move_s,
                moves_at_once=moves_at_once,
                activate=activate,
                terminate=terminate,
                changed=wake.set,
            )
        except BaseException:  # no member, or this process can have no more threads
            made.put(None)
            self._watch.close()
            raise
        made.put((weakref.ref(self._epochs), self._epochs.seat))

    def totals(self) -> RebalancingTotals:
        """What became of plans so far."""
        return self._epochs.tally.totals()

    @property
    def plans(self) -> bool:
        """Whether this instance is the planner."""
        return self._epochs.plans

    @property
    def draining(self) -> bool:
        """Whether this instance takes nothing more: its engine is to refuse what comes."""
        return self._epochs.draining

    def drain(self) -> None:
        """From now on this instance takes nothing more; plans move its requests away, and then it is to end."""
        self._epochs.drain()
        self._wake.set()

    def close(self, timeout: float = 5.0) -> None:
        """Takes no part any more. Moves that have begun are waited for, at most so long. Idempotent."""
        with self._closing:
            if self._stop.is_set():
                return
            self._stop.set()
        self._wake.set()
        self._watch.close()
        if self._thread is not threading.current_thread():  # the engine closes it in a call of it
            self._thread.join(timeout)
        self._epochs.carrier.close(timeout)
        try:
            self._epochs.leave()
        except Error as error:  # it has left the cluster
            _log.debug("nothing to take back: %s", error)

    def __enter__(self) -> Rebalancer:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()


def _planner(policy: PolicyName | Planner) -> Planner:
    if isinstance(policy, Planner):
        return policy
    if policy not in get_args(PolicyName):
        raise ArgumentError(f"policy is {policy!r}; it must be one of {', '.join(SCHEDULERS)}, or a Planner")
    return Planner(SCHEDULERS[policy])


def _run(
    made: SimpleQueue[_Made | None],
    wake: threading.Event,
    stop: threading.Event,
    epoch_s: float,
) -> None:
    """Steps a few times an epoch, and when something has changed; until it is to stop, or has left, or is dropped."""
    if (found := made.get()) is None:
        return
    epochs, seat = found
    while not stop.is_set() and not seat.left:
        strong = epochs()
        if strong is None:  # its owner has dropped it without `close`: nobody is to wait for its plans
            seat.abandon()
            return
        try:
            strong.step()
        except Exception as error:  # the engine's, too
            if strong.left:
                return
            if isinstance(error, (StateError, PeerLost)):  # another incarnation has the name; or its memory is lost
                _log.info("this instance takes no part: %s", error)
            else:
                _log.exception("a step of rebalancing has failed; it is tried again")
            strong.failed()
        del strong
        if not stop.wait(epoch_s / 16):  # so that many changes at once cost one step
            wake.wait(epoch_s / 4)
        wake.clear()
