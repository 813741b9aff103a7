"""The handle of one migration, and its result."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal

from kvpool.waiting.coroutines import until_done

__all__ = ["Migrated", "Migration", "MigrationState"]

MigrationState = Literal["here", "handed over", "there"]


@dataclass(frozen=True)
class Migrated:
    """A request that another engine decodes.

    Attributes:
        way: How it went.
        tokens: So many it had when it was stopped.
        blocks_sent: Blocks that the destination fetched.
        blocks_cached: Blocks that it had cached.
        bytes: Of the blocks that it fetched.
        rounds: In how many rounds blocks or tokens went ahead, the first one included.
        stop_s: From the end of its last step here, when the engine's `stop` returned, until the destination's word that
            it decodes.
        total_s: In all.
    """

    way: Literal["kv", "tokens"]
    tokens: int
    blocks_sent: int
    blocks_cached: int
    bytes: int
    rounds: int
    stop_s: float
    total_s: float


class Migration:
    """The handle of a migration. `Migrations.migrate` makes it. Thread-safe.

    Attributes:
        request: Its name.
        to: The destination's name.
    """

    def __init__(self, request: str, to: str) -> None:
        self.request = request
        self.to = to
        self._lock = threading.Condition()
        self._state: MigrationState = "here"
        self._result: Migrated | None = None
        self._error: Exception | None = None
        self._cancelled = False
        self._waker: Callable[[], None] | None = None  # of the thread that carries it out
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def state(self) -> MigrationState:
        """Who has the request now, the truth at any time, also when the handle is done.

        "here": this engine. "there": the destination. "handed over": the destination may have it, and this engine keeps
        its blocks until that is known.
        """
        with self._lock:
            return self._state

    def wait(self, timeout: float | None = None) -> Migrated:
        """Waits for the end.

        Args:
            timeout: Seconds for this wait; None: until the migration's own timeout.

        Raises:
            OutOfBlocks: The destination is full; nothing was moved, or no more than was fetched is lost.
            Cancelled: By `cancel`; the request has stayed, if `state` says "here".
            PeerLost: The destination is gone. Or a rank of this instance is, and the instance with it: what `state`
                calls "here" then has ended, and of what was handed over only the destination knows more.
            DeadlineExceeded: It was not done in time. If `state` says "handed over" it goes on.
            StateError: The destination gave up, or the request has ended here.
            TimeoutError: This wait is over; the migration goes on.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Waits for the end: why the request has not moved, or None. Raises TimeoutError when this wait is over."""
        with self._lock:
            if not self._lock.wait_for(self._is_done, timeout):
                raise TimeoutError(f"request {self.request!r} is under way to {self.to}")
            return self._error

    def done(self) -> bool:
        """Whether it has ended, with or without success."""
        with self._lock:
            return self._is_done()

    def cancel(self) -> bool:
        """Asks for the request to stay here. False: the migration has ended.

        Before the hand-over it stays. After it the destination is asked, and gives it back if it does not decode yet:
        `wait` and `state` say which.
        """
        with self._lock:
            if self._is_done():
                return False
            self._cancelled = True
        if self._waker is not None:
            self._waker()
        return True

    def fileno(self) -> int:
        """A descriptor that becomes readable at the end."""
        return self._descriptor

    def __await__(self) -> Generator[Any, None, Migrated]:
        """Waits in a coroutine. Cancelling the task ends the waiting, not the migration."""
        return self._ended().__await__()

    async def _ended(self) -> Migrated:
        await until_done(self)
        return self.wait()

    def _is_done(self) -> bool:
        return self._result is not None or self._error is not None

    def _note(self, state: MigrationState) -> None:
        with self._lock:
            self._state = state

    def _end(self, outcome: Migrated | Exception) -> None:
        """Ends it once; `state` may still change after a DeadlineExceeded."""
        with self._lock:
            if self._is_done():
                return
            if isinstance(outcome, Migrated):
                self._result = outcome
            else:
                self._error = outcome
            self._lock.notify_all()
        os.eventfd_write(self._descriptor, 1)

    def __repr__(self) -> str:
        """Where it is."""
        with self._lock:
            ended = "" if not self._is_done() else f", {type(self._error).__name__ if self._error else 'done'}"
            return f"<Migration of {self.request!r} to {self.to}: {self._state}{ended}>"
