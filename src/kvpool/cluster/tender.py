"""The one thread of a `Cluster`: it sees to the directory and to the member's own lease, and ends what is to end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref

from kvpool.cluster.board import Board
from kvpool.cluster.callback import MemberCallback
from kvpool.cluster.directory import Directory
from kvpool.cluster.registration import Registration
from kvpool.waiting.threads import busy, join, may_wait

__all__ = ["Tender"]

_log = logging.getLogger("kvpool.cluster")


class Tender:
    """A thread that looks when something happens, and at least every heartbeat. It keeps no `Cluster` alive.

    When it ends it leaves, closes the directory, and lets callbacks and waiters end.

    Attributes:
        lock: One registration at a time; when it is let go of after `stop`, nothing is added any more.
        registration: The one that was made last, or None.
        callbacks: Those that run.
    """

    def __init__(self, directory: Directory, board: Board, heartbeat_s: float) -> None:
        """Starts it. The directory is open."""
        self.lock = threading.Lock()
        self.registration: Registration | None = None
        self.callbacks: weakref.WeakSet[MemberCallback] = weakref.WeakSet()  # their threads keep them
        self._directory = directory
        self._board = board
        self._heartbeat_s = heartbeat_s
        self._waking = threading.Lock()  # the wake descriptor is not written to once it is closed
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvpool-cluster", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Looks now. Waits for no lock, because this may be called in the middle of anything.

        While another thread is just waking it this does nothing; then it looks within a heartbeat at the latest.
        """
        if self._waking.acquire(blocking=False):
            try:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)
            finally:
                self._waking.release()

    def stop(self) -> None:
        """Lets it end soon. Waits for nothing, like `wake`."""
        self._stopping = True
        if self.registration is not None:
            self.registration.leave_soon()
        self.wake()

    def close(self) -> None:
        """Ends it, and its callbacks; soon, where this must not wait (waiting/threads.py). Idempotent."""
        self.stop()
        if may_wait():
            join(self._thread)
            for callback in list(self.callbacks):  # it has told them; nobody adds one any more
                callback.close()

    def _run(self) -> None:
        with busy:
            while not self._stopping:
                try:
                    self._wait(self._directory.descriptors())
                    self._directory.tend()
                    if self.registration is not None:
                        self.registration.tend()
                except Exception:
                    _log.exception("looking after the cluster has failed; it is tried again")
                    self._wait(())  # not at once: what has failed may fail again
            self._end()

    def _end(self) -> None:
        with self.lock:  # who is just registering, or adding a callback, was there before
            registration, callbacks = self.registration, list(self.callbacks)
        self._board.wake()  # those who wait for members
        for callback in callbacks:
            callback.stop()
        try:
            if registration is not None:
                registration.leave_now()
            self._directory.close()
        except Exception:
            _log.exception("leaving the cluster has failed")
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def _wait(self, descriptors: tuple[int, ...]) -> None:
        if self._stopping:
            return
        poll = select.poll()
        for descriptor in (self._wake, *descriptors):
            poll.register(descriptor, select.POLLIN)
        poll.poll(self._heartbeat_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
