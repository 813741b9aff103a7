"""The thread of a `Cluster`: it updates the view from the directory, maintains the lease, and leaves at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref

from kvpool.cluster.callback import MemberCallback
from kvpool.cluster.directory import Directory
from kvpool.cluster.membership_view import MembershipView
from kvpool.cluster.registration import Registration
from kvpool.waiting.threads import busy, join, may_wait

__all__ = ["MembershipLoop"]

_log = logging.getLogger("kvpool.cluster")


class MembershipLoop:
    """A thread that wakes when something happens, and at least once a heartbeat. It keeps no `Cluster` alive.

    When it ends it leaves the cluster, closes the directory, and ends callbacks and waiters.

    Attributes:
        lock: Held while a registration or a callback is added. Nothing is added after `stop`.
        registration: The latest one, or None.
        callbacks: The running callbacks.
    """

    def __init__(self, directory: Directory, view: MembershipView, heartbeat_s: float) -> None:
        """Starts the thread. The directory is open."""
        self.lock = threading.Lock()
        self.registration: Registration | None = None
        self.callbacks: weakref.WeakSet[MemberCallback] = weakref.WeakSet()  # their threads keep them alive
        self._directory = directory
        self._view = view
        self._heartbeat_s = heartbeat_s
        self._waking = threading.Lock()  # so that the wake descriptor is not written to after it was closed
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvpool-cluster", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread run now. Takes no lock that it would have to wait for: any code may call this, anywhere.

        If another thread is waking it at the same moment this does nothing; the thread then runs within a heartbeat.
        """
        if self._waking.acquire(blocking=False):
            try:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)
            finally:
                self._waking.release()

    def stop(self) -> None:
        """Tells the thread to end soon. Does not wait, like `wake`."""
        self._stopping = True
        if self.registration is not None:
            self.registration.leave_soon()
        self.wake()

    def close(self) -> None:
        """Ends the thread and its callbacks; where this must not wait (waiting/threads.py), soon. Idempotent."""
        self.stop()
        if may_wait():
            join(self._thread)
            for callback in list(self.callbacks):  # the thread has told them to stop, and none is added now
                callback.close()

    def _run(self) -> None:
        with busy:
            while not self._stopping:
                try:
                    self._wait(self._directory.descriptors())
                    self._directory.update()
                    if self.registration is not None:
                        self.registration.maintain()
                except Exception:
                    _log.exception("updating the membership has failed; it is tried again")
                    self._wait(())  # so as not to fail again at once
            self._end()

    def _end(self) -> None:
        with self.lock:  # wait for a thread that is registering or adding a callback
            registration, callbacks = self.registration, list(self.callbacks)
        self._view.wake()  # calls of wait_for
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
