"""When a thread may wait for the threads of a cluster or of a pool's callbacks: when none of them can wait for it.

`close` may be called by anything, anywhere: the garbage collector runs finalizers, and the interpreter handlers of
signals, in any thread, in the middle of whatever that does. So three kinds of callers only say that it is to end, and
the thread that ends (a cluster's: cluster/tender.py) does the rest: those threads themselves; a thread that is in the
middle of a call that has a lock which they want; and the garbage collector, which does not know what its thread holds.

    W1  Every lock that a thread of a cluster can wait for, and under which objects are made or calls are made, is held
        within `busy`.
    W2  The threads of a cluster and those that call an application back run within `busy`, all their lives: none of
        them waits for another one, but the tender for the reader of etcd's watch, which waits for nobody.
    W3  Whoever waits for one of these threads does so by `join`.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from types import TracebackType
from typing import Any, Final

__all__ = ["begin_anew", "busy", "join", "may_wait"]

_log = logging.getLogger("kvpool")

# For a callback of the application that does not end; and for locks that are not ours, such as that of a handler of
# logging that was interrupted by a signal.
_JOIN_S: Final = 60.0


class _Here(threading.local):
    """What the current thread is doing."""

    busy = 0
    collecting = False


_here = _Here()


class _Busy:
    """See `busy`. It can be entered again, and may be left by an exception that comes from nowhere, as Ctrl-C does."""

    def __enter__(self) -> None:
        """Before a lock is taken: what interrupts in between is kept from waiting, too."""
        _here.busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After it was given back."""
        _here.busy = max(0, _here.busy - 1)  # in a forked child it begins anew


busy: Final = _Busy()
"""`with busy, lock:`; any thread."""


def may_wait() -> bool:
    """Whether this thread may wait for those."""
    return not _here.busy and not _here.collecting


def join(thread: threading.Thread) -> None:
    """Waits for the end of one of those threads, if this thread may wait: for a minute at most."""
    if not may_wait():
        return
    thread.join(_JOIN_S)
    if thread.is_alive():
        _log.warning("%s has not ended after %g s; it is not waited for any longer", thread.name, _JOIN_S)


def _on_collection(phase: str, _: dict[str, Any], here: _Here = _here) -> None:
    here.collecting = phase == "start"  # a default: globals are gone when the interpreter ends


def begin_anew() -> None:
    """Whatever this thread was in the middle of, it is not any more.

    For a forked child, where the thread that forked is the main one; and for the end of the process, when an exception
    that came from nowhere, as Ctrl-C does, may have left a count behind.
    """
    _here.busy, _here.collecting = 0, False


gc.callbacks.append(_on_collection)
os.register_at_fork(after_in_child=begin_anew)
