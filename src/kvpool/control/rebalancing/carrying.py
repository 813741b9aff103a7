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

    def check(self) -> None:
        """Raises PeerLost if the instance has lost its memory."""


class Carrier:
    """Moves requests away from here, as plans ask. Thread-safe.

    A plan's moves that have not begun are dropped when the next one comes: it was made of what is by now. So what waits
    here are moves of one plan, never more than fit into a record. A request whose move has failed stays for a while.

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
            # One of the last plan may have begun since this one was accepted: it is on its way, and not to go twice.
            free = [move for move in moves if move.request not in self._begun]
            self._tally.moved("void", len(moves) - len(free))
            self._queue = deque((move, names[move.destination], lease) for move in free)
            for _ in range(min(self._at_once - len(self._threads), len(self._queue))):
                thread = threading.Thread(target=self._run, name="kvpool-move", daemon=True)
                try:
                    thread.start()  # it waits for the lock; `close` joins only what has started
                except RuntimeError:  # this process can have no more now: those that run go on, or the next plan's
                    _log.exception("moves wait for a thread")
                    break
                self._threads.add(thread)

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
        here = set(running)
        with self._lock:
            self._stays_until = {name: until for name, until in self._stays_until.items() if name in here}

    def close(self, timeout: float) -> None:
        """Begins no more moves, and waits for those that have begun, but for one that calls this. Idempotent."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            threads = list(self._threads)
        until = time.monotonic() + timeout
        for each in threads:
            if each is not threading.current_thread():  # its engine closes it in a call of it
                each.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        try:
            while (found := self._next()) is not None:
                self._carry_one(*found)
        except BaseException:  # another one is started for the next plan
            with self._lock:
                self._threads.discard(threading.current_thread())
            raise

    def _next(self) -> tuple[PlannedMove, str, int] | None:
        """The next move, which begins. None when no move is left: the thread does not count any more then."""
        with self._lock:
            while self._queue:
                move, to, lease = self._queue.popleft()
                if move.request not in self._begun:
                    self._begun[move.request] = to
                    return move, to, lease
                self._tally.moved("void")
            self._threads.discard(threading.current_thread())
            return None

    def _carry_one(self, move: PlannedMove, to: str, lease: int) -> None:
        result = self._move(move, to, lease)
        self._tally.moved(result)
        with self._lock:
            self._begun.pop(move.request, None)
            if result != "ok":
                self._stays_until[move.request] = self._clock() + self._back_off_s
        self._changed()

    def _move(self, move: PlannedMove, to: str, lease: int) -> str:
        """Moves one request. What became of it."""
        try:
            if self._lease() != lease:
                return "Fenced"
            self._migrations.migrate(move.request, to, by=move.way, timeout=self._move_s).wait()
        except Error as error:  # it stays here, or `under_way` goes on saying that it leaves
            _log.info("request %r was not moved: %s", move.request, error, extra={"peer": to})
            return type(error).__name__
        except Exception as error:
            _log.exception("request %r was not moved", move.request, extra={"peer": to})
            return type(error).__name__
        return "ok"
