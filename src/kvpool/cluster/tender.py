"""The one thread of a `Cluster`: it sees to the directory and to the member's own lease."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading

from kvpool.cluster.directory import Directory
from kvpool.cluster.registration import Registration

__all__ = ["Tender"]

_log = logging.getLogger("kvpool.cluster")


class Tender:
    """A thread that looks when something happens, and at least every heartbeat. It keeps no `Cluster` alive.

    When it ends it leaves, and closes the directory.
    """

    def __init__(self, directory: Directory, heartbeat_s: float) -> None:
        """Starts it. The directory is open."""
        self._directory = directory
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()  # the wake descriptor is not written to once it is closed
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.registration: Registration | None = None
        self._thread = threading.Thread(target=self._run, name="kvpool-cluster", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Looks now. Waits for no lock, because the garbage collector may call this in the middle of anything.

        While another thread is just waking it this does nothing; then it looks within a heartbeat at the latest.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._wake >= 0:
                    os.eventfd_write(self._wake, 1)
            finally:
                self._lock.release()

    def stop(self) -> None:
        """Lets it end soon. Waits for nothing, like `wake`."""
        self._stopping = True
        self.wake()

    def runs_here(self) -> bool:
        """Whether this is its thread, or one of the directory's: what these wait for may be waiting for them."""
        return threading.current_thread() in (self._thread, *self._directory.threads())

    def close(self) -> None:
        """Ends it; from the thread itself too, which then ends soon. Idempotent."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._wait(self._directory.descriptors())
                self._directory.tend()
                registration = self.registration
                if registration is not None:
                    registration.tend()
            except Exception:
                _log.exception("looking after the cluster has failed; it is tried again")
                self._wait(())  # not at once: what has failed may fail again
        self._end()

    def _end(self) -> None:
        try:
            if self.registration is not None:
                self.registration.leave()
            self._directory.close()
        except Exception:
            _log.exception("leaving the cluster has failed")
        with self._lock:
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
