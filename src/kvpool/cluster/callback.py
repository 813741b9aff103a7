"""Callbacks of the application for changes of the membership."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from types import TracebackType

from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.record import MemberEvent
from kvpool.waiting.threads import busy, join, may_wait

__all__ = ["MemberCallback"]

_log = logging.getLogger("kvpool.cluster")


class MemberCallback:
    """A callback of `Cluster.on_change`, until it is closed. A separate thread calls it, one event after another.

    Use it in a ``with``, or call ``close()``; closing the cluster closes it, too.
    """

    def __init__(self, view: MembershipView, callback: Callable[[MemberEvent], object]) -> None:
        """Use `Cluster.on_change`."""
        self._process = os.getpid()
        self._view = view
        self._callback = callback
        self._events: queue.SimpleQueue[MemberEvent | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvpool-members", daemon=True)
        self._thread.start()
        view.subscribe(self._events.put)

    def close(self) -> None:
        """Ends the callback: when this returns it is not running. Idempotent.

        This waits for at most a minute. Called from any callback of a pool or a cluster, or from a finalizer that the
        garbage collector runs, it does not wait, and the callback ends soon.
        """
        if os.getpid() != self._process:
            return  # a forked child has no such thread, and its copies of the locks may be held forever
        self.stop()
        if may_wait():
            self._view.unsubscribe(self._events.put)
            join(self._thread)

    def stop(self) -> None:
        """Tells it to end soon. Does not wait."""
        self._stopping = True
        self._events.put(None)

    @property
    def closed(self) -> bool:
        """Whether the callback or its cluster was closed."""
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
                self._view.unsubscribe(self._events.put)

    def _call_until_stopped(self) -> None:
        while not self._stopping:
            event = self._events.get()
            if event is None or self._stopping:
                return
            try:
                self._callback(event)
            except Exception:
                _log.exception("the callback for %s, which %s, has failed", event.member.name, event.kind)
