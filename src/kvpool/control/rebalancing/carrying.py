"""Carries out the moves of a plan at their source: a few at a time, each with its deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvpool.control.migration import Migration, MigrationTotals
from kvpool.control.rebalancing.totals import Tally
from kvpool.errors import Error
from kvpool.policy.migration import Way
from kvpool.policy.rebalancing import PlannedMove

__all__ = ["Carrier", "Migrates"]

_log = logging.getLogger("kvpool.rebalancing")


class Migrates(Protocol):
    """A `Migrations`."""

    def migrate(self, request: str, to: str, *, by: Way = "auto", timeout: float | None = None) -> Migration:
        """Begins to move a request."""

    def under_way(self) -> Sequence[Migration]:
        """The handles of the requests that leave."""

    def arriving(self) -> Sequence[str]:
        """The names of the requests that come."""

    def totals(self) -> MigrationTotals:
        """What became of migrations so far."""


class Carrier:
    """Moves requests away from here, as plans ask. Thread-safe.

    A plan's moves that have not begun are dropped when the next one comes: it was made of what is by now. A request
    whose move has failed stays for a while.

    Args:
        migrations: Of the pool.
        tally: Counts results.
        move_s: Deadline of one move.
        at_once: So many are under way at a time.
        back_off_s: A request whose move has failed is not free to move for so long.
        changed: Called when a move has ended.
        lease: Which of its leases this instance has, as a number; None: none. What waits does not begin under another.
        clock: Seconds, of any origin.
    """

    def __init__(
        self,
        migrations: Migrates,
        tally: Tally,
        move_s: float,
        at_once: int,
        back_off_s: float,
        changed: Callable[[], None],
        lease: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._migrations = migrations
        self._tally = tally
        self._move_s = move_s
        self._at_once = at_once
        self._back_off_s = back_off_s
        self._changed = changed
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()  # of what follows; held briefly
        self._queue: deque[tuple[PlannedMove, str, int]] = deque()
        self._begun: dict[str, str] = {}  # requests and the names of their destinations
        self._stays_until: dict[str, float] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def carry(self, moves: Sequence[PlannedMove], names: Mapping[int, str], lease: int) -> None:
        """Carries out the moves of a plan, in this order, instead of those of the last one that have not begun.

        Args:
            moves: Whose source is here.
            names: Of their destinations, by instance.
            lease: Under which the plan was accepted.
        """
        with self._lock:
            if self._closed:
                return
            self._tally.moved("superseded", len(self._queue))
            self._queue = deque((move, names[move.destination], lease) for move in moves)
            missing = min(self._at_once - len(self._threads), len(self._queue))
            started = [threading.Thread(target=self._run, name="kvpool-move", daemon=True) for _ in range(missing)]
            self._threads.update(started)
        for each in started:
            each.start()

    def leaving(self) -> dict[str, str]:
        """Requests that leave, with the names of their destinations; not those whose move has not begun."""
        found = {each.request: each.to for each in self._migrations.under_way()}
        with self._lock:
            return found | self._begun

    def stays(self, request: str) -> bool:
        """Whether a request is not to move yet, because its last move has failed."""
        with self._lock:
            return self._clock() < self._stays_until.get(request, float("-inf"))

    def forget(self, running: Sequence[str]) -> None:
        """Forgets what it knows of requests that do not run here any more."""
        with self._lock:
            self._stays_until = {name: until for name, until in self._stays_until.items() if name in set(running)}

    def close(self, timeout: float) -> None:
        """Begins no more moves, and waits for those that have begun. Idempotent."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            threads = list(self._threads)
        until = time.monotonic() + timeout
        for each in threads:
            each.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                move, to, lease = self._queue.popleft()
                self._begun[move.request] = to
            result = self._move(move, to) if self._lease() == lease else "Fenced"
            self._tally.moved(result)
            with self._lock:
                del self._begun[move.request]
                if result != "ok":
                    self._stays_until[move.request] = self._clock() + self._back_off_s
            self._changed()

    def _move(self, move: PlannedMove, to: str) -> str:
        """Moves one request. What became of it."""
        try:
            self._migrations.migrate(move.request, to, by=move.way, timeout=self._move_s).wait()
        except Error as error:  # it stays here, or `under_way` goes on saying that it leaves
            _log.info("request %r was not moved: %s", move.request, error, extra={"peer": to})
            return type(error).__name__
        except Exception as error:
            _log.exception("request %r was not moved", move.request, extra={"peer": to})
            return type(error).__name__
        return "ok"
