"""The threads of migrations: one for each request that moves, and one for all that is left to be done afterwards."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvpool.pool import Pool

__all__ = ["Chores", "Threads"]

_log = logging.getLogger("kvpool.migration")


class Threads:
    """Threads that can be waited for. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()

    def start(self, work: Callable[[], None]) -> None:
        """Does some work in a thread. Returns at once. Raises RuntimeError if this process can have no more."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._running.discard(thread)

        thread = threading.Thread(target=run, name="kvpool-migration", daemon=True)
        with self._lock:
            self._running.add(thread)
        try:
            thread.start()
        except BaseException:
            with self._lock:
                self._running.discard(thread)
            raise

    def join(self, seconds: float) -> None:
        """Waits for those that run now, for so long in all; not for the one that calls this, as an engine may."""
        with self._lock:
            running = list(self._running)
        until = time.monotonic() + seconds
        for thread in running:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


class Chores:
    """What is tried again until it is done: in one thread for all, while there is any. Ends with the pool. Thread-safe.

    Args:
        pool: Its end is that of all chores.
        every_s: Each is tried so often.
    """

    def __init__(self, pool: Pool, every_s: float) -> None:
        self._pool = pool
        self._every_s = every_s
        self._lock = threading.Lock()
        self._chores: list[Callable[[], bool]] = []
        self._is_running = False

    def add(self, chore: Callable[[], bool]) -> None:
        """Calls this until it returns True. What it raises is logged, and it is tried again."""
        with self._lock:
            self._chores.append(chore)
            if self._is_running:
                return
            self._is_running = True
        try:
            threading.Thread(target=self._run, name="kvpool-migration-chores", daemon=True).start()
        except RuntimeError:  # this process can have no more now: the next chore tries again
            _log.exception("what a migration has left waits for a thread")
            with self._lock:
                self._is_running = False

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            with self._lock:
                chores = list(self._chores)
            done = [chore for chore in chores if self._is_done(chore)]
            with self._lock:
                self._chores = [chore for chore in self._chores if chore not in done]
                if not self._chores:
                    self._is_running = False
                    return

    def _is_done(self, chore: Callable[[], bool]) -> bool:
        if self._pool.closed:
            return True
        try:
            return chore()
        except Exception:
            _log.exception("what a migration has left could not be done, and is tried again")
            return False
