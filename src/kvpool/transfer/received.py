"""Telling the application what peers have sent."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from kvpool import _core
from kvpool._core import Received
from kvpool.errors import ClosedError, Error

__all__ = ["Received", "ReceivedCallback"]

_log = logging.getLogger("kvpool.received")


class ReceivedCallback:
    """A callback of `Pool.on_received`, until it is closed. It runs in a thread of its own, one item after another.

    Use it in a ``with``, or call ``close()``; closing the pool ends it, too.
    """

    def __init__(self, pool: _core.Pool, callback: Callable[[Received], object]) -> None:
        """Use `Pool.on_received`."""
        self._process = os.getpid()
        self._lock = threading.Lock()  # the wake descriptor is not written to once it is closed
        self._stopping = False
        self._items = os.dup(pool._received_fd())
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=self._run, args=(pool, callback), name="kvpool-received", daemon=True
        )  # which holds both, and lets go of them when it ends
        self._thread.start()

    def close(self) -> None:
        """Ends it: when this returns the callback is not running any more. Items wait in the queue again. Idempotent.

        The callback itself may call this; then it is the last time that it runs.
        """
        if os.getpid() != self._process:
            return  # in a forked child there is no thread, and the descriptor would wake the parent's
        with self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._stopping

    def __enter__(self) -> ReceivedCallback:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def _run(self, pool: _core.Pool, callback: Callable[[Received], object]) -> None:
        poll = select.poll()
        poll.register(self._items, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                poll.poll()
                if not self._stopping:
                    self._deliver_all(pool, callback)
        except ClosedError:
            pass
        finally:
            with self._lock:
                self._stopping = True
                os.close(self._items)
                os.close(self._wake)

    def _deliver_all(self, pool: _core.Pool, callback: Callable[[Received], object]) -> None:
        while not self._stopping:
            item = pool.received(0)
            if item is None:
                return
            try:
                callback(item)
            except Exception:
                _log.exception("the callback for what %s sent has failed", item.peer)
                _close_quietly(item)


def _close_quietly(item: Received) -> None:
    try:
        item.close()
    except Error:
        _log.exception("what %s sent could not be let go of", item.peer)
