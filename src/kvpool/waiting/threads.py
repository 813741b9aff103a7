"""Which thread may wait for the threads of a cluster or of a pool's callbacks: one that none of them can wait for.

`close` may be called anywhere: the garbage collector runs finalizers, and the interpreter runs signal handlers, in any
thread and at any point of its work. Three kinds of callers must not wait, so for them `close` only tells the thread to
end (a cluster's: cluster/membership_loop.py): one of these threads itself; a thread inside a call that holds a lock
which they take; and the garbage collector, which does not know what its thread holds.

    W1  A lock that a thread of a cluster can wait for, and under which objects are created or calls are made, is held
        within `busy`.
    W2  The threads of a cluster and of callbacks run within `busy` for their whole life. None of them waits for
        another, except the membership loop for the thread that reads etcd's watch, which waits for none.
    W3  Waiting for one of these threads goes through `join`.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from types import TracebackType
from typing import Final

from kvpool import _core

__all__ = ["busy", "join", "may_wait", "reset"]

_log = logging.getLogger("kvpool")

# Limits the wait for a callback of the application that does not end, and for foreign locks, such as that of a logging
# handler that was interrupted by a signal.
_JOIN_S: Final = 60.0


class _Here(threading.local):
    """What the current thread is in the middle of."""

    busy = 0


_here = _Here()


class _Busy:
    """See `busy`. Reentrant; may be left by an asynchronous exception such as KeyboardInterrupt."""

    def __enter__(self) -> None:
        """Called before the lock is taken, so that an interruption in between does not wait either."""
        _here.busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Called after the lock was released."""
        _here.busy = max(0, _here.busy - 1)  # a forked child starts at 0


busy: Final = _Busy()
"""`with busy, lock:` marks that the thread holds a lock that those threads take. Any thread."""


def may_wait() -> bool:
    """Whether this thread may wait for those threads."""
    return not _here.busy and not _core._collecting()


def join(thread: threading.Thread) -> None:
    """Waits for one of those threads to end, for at most a minute, if this thread may wait."""
    if not may_wait():
        return
    thread.join(_JOIN_S)
    if thread.is_alive():
        _log.warning("%s has not ended after %g s; the wait for it is over", thread.name, _JOIN_S)


def reset() -> None:
    """Resets the state of this thread.

    For a forked child, where the forking thread becomes the main one; and for the end of the process, because an
    asynchronous exception such as KeyboardInterrupt may have left a count behind.
    """
    _here.busy = 0
    _core._note_collection("stop", {})


gc.callbacks.append(_core._note_collection)  # not Python: Ctrl-C would be lost in it
os.register_at_fork(after_in_child=reset)
