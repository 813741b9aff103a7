"""Calling the application back when the membership changes."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType

from kvpool.cluster.board import Board
from kvpool.cluster.record import MemberEvent
from kvpool.waiting.threads import busy, join, may_wait

__all__ = ["MemberCallback"]

_log = logging.getLogger("kvpool.cluster")


class MemberCallback:
    """A callback of `Cluster.on_change`, until it is closed. It runs in a thread of its own, one event after another.

    Use it in a ``with``, or call ``close()``; closing the cluster ends it, too.
    """

    def __init__(self, board: Board, callback: Callable[[MemberEvent], object]) -> None:
        """Use `Cluster.on_change`."""
        self._process = os.getpid()
        self._board = board
        self._callback = callback
        self._events: queue.SimpleQueue[MemberEvent | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvpool-members", daemon=True)
        self._thread.start()
        board.subscribe(self._events.put)

    def close(self) -> None:
        """Ends it: when this returns the callback is not running any more. Idempotent.

        One that runs for longer than a minute is not waited for; and from a callback, of a pool or a cluster, this one
        or another, or a finalizer that the garbage collector runs, nothing is: then it ends soon.
        """
        if os.getpid() != self._process:
            return  # in a forked child there is no thread, and the locks may be held for ever
        self.stop()
        if may_wait():
            self._board.unsubscribe(self._events.put)
            join(self._thread)

    def stop(self) -> None:
        """Lets it end soon. Waits for nothing."""
        self._stopping = True
        self._events.put(None)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its cluster was."""
        return self._stopping

    def __enter__(self) -> MemberCallback:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _run(self) -> None:
        with busy:
            try:
                self._call_until_stopped()
            finally:
                self._board.unsubscribe(self._events.put)

    def _call_until_stopped(self) -> None:
        while not self._stopping:
            event = self._events.get()
            if event is None or self._stopping:
                return
            try:
                self._callback(event)
            except Exception:
                _log.exception("the callback for %s, which %s, has failed", event.member.name, event.kind)
