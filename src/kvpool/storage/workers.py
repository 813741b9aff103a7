"""The threads of `Storage`: workers that call the store, and an alarm that calls back at a time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

__all__ = ["Alarm", "ReadsFirst", "Workers"]

_log = logging.getLogger("kvpool.storage")

Call: TypeAlias = Callable[[], None]


def _guarded(call: Call) -> None:
    try:
        call()
    except Exception:
        _log.exception("a job of the storage has failed by a bug")


class Workers:
    """A bounded number of threads over a bounded queue. Thread-safe.

    The threads start on demand and are daemons: one that hangs in a file system holds up neither `close` nor the end of
    the process.

    Args:
        name: Of the threads.
        threads: The most at a time.
        waiting_max: The most that the jobs which wait weigh together; one may weigh more, if it waits alone.
    """

    def __init__(self, name: str, threads: int, waiting_max: int) -> None:
        self.threads_max: Final = threads
        self._name = name
        self._waiting_max = waiting_max
        self._jobs: deque[tuple[Call, Call, int]] = deque()
        self._waiting = 0
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, run: Call, drop: Call, weight: int = 1) -> bool:
        """Runs a job soon, or drops it when this is closed before.

        Returns:
            False if too much waits, this is closed, or the process can have no thread for it: the job is refused.
        """
        with self._changed:
            if self._closed or (self._jobs and self._waiting + weight > self._waiting_max):
                return False
            if self._idle <= len(self._jobs) and len(self._threads) < self.threads_max:
                self._begin_one()
            if not self._threads:
                return False
            self._jobs.append((run, drop, weight))
            self._waiting += weight
            self._changed.notify_all()
        return True

    def _begin_one(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of the process; those that are there do the work
            _log.warning("%s: no thread can be started; %d are there", self._name, len(self._threads))
            return
        self._threads.append(thread)
        self._idle += 1

    def wait_idle(self, until: float) -> bool:
        """Returns when no job waits or runs, or at this time (time.monotonic): False."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and self._idle == len(self._threads), max(0.0, until - time.monotonic())
            )

    def close(self, until: float) -> bool:
        """Drops what waits, and waits for what runs until this time (time.monotonic); whether all has ended."""
        with self._changed:
            self._closed = True
            jobs, self._jobs = self._jobs, deque()
            self._changed.notify_all()
        for _, drop, _ in jobs:
            _guarded(drop)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:  # a thread counts as idle from its start
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                run, _, weight = self._jobs.popleft()
                self._waiting -= weight
                self._idle -= 1
            _guarded(run)
            with self._changed:
                self._idle += 1
                self._changed.notify_all()


class Alarm:
    """One thread that calls back at given times (time.monotonic). The calls must be short. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: list[tuple[float, int, Call]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, when: float, call: Call) -> None:
        """Calls this at that time; at once, in the caller's thread, if this is closed or can have no thread."""
        with self._changed:
            waits = not self._closed and self._has_begun()
            if waits:
                heapq.heappush(self._due, (when, next(self._numbers), call))
                self._changed.notify()
        if not waits:
            _guarded(call)

    def _has_begun(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # a limit of the process
                return False
            self._thread = thread
        return True

    def close(self) -> None:
        """Ends the thread, after all calls that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if not self._due:
                    return
                _, _, call = heapq.heappop(self._due)
            _guarded(call)


class ReadsFirst:
    """Writers wait while somebody waits for a read. Thread-safe."""

    def __init__(self) -> None:
        self._reads = 0
        self._changed = threading.Condition()

    def begin(self) -> None:
        """A read begins for which somebody waits."""
        with self._changed:
            self._reads += 1

    def end(self) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._reads -= 1
            if self._reads == 0:
                self._changed.notify_all()

    def wait(self, until: float) -> bool:
        """Returns when no read is under way, or at this time (time.monotonic): False."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reads == 0, max(0.0, until - time.monotonic()))
