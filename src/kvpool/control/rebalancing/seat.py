"""The seat of a member in the epochs: of its rebalancers only the latest speaks, and no plan is carried out twice."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvpool.control.rebalancing.members import PublishesState
from kvpool.errors import Error
from kvpool.policy.rebalancing import EpochPlan, InstanceState, PlanBook

__all__ = ["Seat"]


class _Shared:
    """What the seats of one member have in common.

    Attributes:
        lock: Held while a seat publishes or accepts, so that an earlier one does neither after it was replaced.
        book: The plans that the member has made and accepted, whichever of its rebalancers it was.
        published: What the latest of them to publish has said.
        latest: The seat that counts.
    """

    def __init__(self, instance: int) -> None:
        self.lock = threading.Lock()
        self.book = PlanBook(instance)
        self.published: Mapping[str, object] = {}
        self.latest: weakref.ref[Seat] | None = None


_SHARED: Final[weakref.WeakKeyDictionary[PublishesState, _Shared]] = weakref.WeakKeyDictionary()
_making: Final = threading.Lock()


class Seat:
    """What one rebalancer says for its member, until it leaves or a later one takes its place. Thread-safe.

    It does not keep the registration: who drops a rebalancer without `close` may have dropped its cluster, too.

    Args:
        registration: Of the member. An earlier seat of it says nothing any more.
    """

    def __init__(self, registration: PublishesState) -> None:
        self._registration = weakref.ref(registration)
        self._left = False
        with _making:
            self._shared = _SHARED.setdefault(registration, _Shared(registration.instance))
        with self._shared.lock:
            self._shared.latest = weakref.ref(self)

    @property
    def book(self) -> PlanBook:
        """The plans that the member has made and accepted. For the thread that steps; `accept` is for any."""
        return self._shared.book

    @property
    def left(self) -> bool:
        """Whether it has left, or a later one has its place."""
        latest = self._shared.latest
        return self._left or latest is None or latest() is not self

    def accept(self, plan: EpochPlan, planner: int, others: Iterable[InstanceState] = ()) -> bool:
        """Whether a plan is to be carried out here: as `PlanBook.accept`, and never after this seat has left."""
        with self._shared.lock:
            return not self.left and self.book.accept(plan, planner, others)

    def say(self, fields: Mapping[str, Any]) -> None:
        """Publishes this, if it is news and this seat has not left. Raises what `Registration.publish` does."""
        with self._shared.lock:
            if fields != self._shared.published and not self.left:
                self._publish(fields)

    def leave(self) -> None:
        """Takes back what it has said, for good. Idempotent.

        Nothing is taken back that a later one has said. Raises what `Registration.publish` does.
        """
        with self._shared.lock:
            was_left, self._left = self.left, True
            if not was_left:
                self._publish({})

    def abandon(self) -> None:
        """The same where nobody is to hear of errors: its rebalancer was dropped."""
        with contextlib.suppress(Error):
            self.leave()

    def _publish(self, fields: Mapping[str, Any]) -> None:
        registration = self._registration()
        if registration is not None:
            registration.publish(rebalancing=fields)
            self._shared.published = fields
