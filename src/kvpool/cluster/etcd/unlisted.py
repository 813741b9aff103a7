"""Members whose records have expired in etcd, though they may live (ADR 0022).

A record expires if its lease is not renewed. There are three reasons, and only the first is a loss:

    the member is gone           it is lost
    etcd was silent              no lease could be renewed: all members get some time to register again
    the member cannot reach etcd a direct link shows that it lives, for as long as the link lasts
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Contact", "Unlisted"]

_SLACK_S: Final = 2.0  # etcd looks for expired leases twice a second, and ends a thousand of them a second


class Contact:
    """When etcd last answered, and whether it was silent for so long that leases may have expired.

    Any thread may call.
    """

    def __init__(self, lease_s: float, heartbeat_s: float) -> None:
        """Starts as if etcd had just answered."""
        self.lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._answered = time.monotonic()
        self._forgiven_until = 0.0

    def answered(self) -> None:
        """Notes an answer of etcd."""
        now = time.monotonic()
        with self._lock:
            if now - self._answered > self._silence_s():
                self._forgive(now)
            self._answered = now

    def forgive(self) -> None:
        """Notes that etcd has lost its data, so a missing record is no sign of a loss."""
        with self._lock:
            self._forgive(time.monotonic())

    def is_due(self) -> bool:
        """Whether to ask etcd for a sign of life. Not during a silence, whose end is noticed anyway."""
        with self._lock:
            silent_s = time.monotonic() - self._answered
        return self._heartbeat_s / 2 < silent_s <= self._silence_s()

    def forgiven_until(self) -> float:
        """Until when a missing record is no loss (time.monotonic()); in the past if etcd was not silent."""
        with self._lock:
            return self._forgiven_until

    def _silence_s(self) -> float:
        """How long a silence must be for a lease to expire that was renewed up to a heartbeat before.

        It is longer than the time between two answers of an idle etcd, which is one and a half heartbeats.
        """
        return max(1.6 * self._heartbeat_s, 0.8 * (self.lease_s - self._heartbeat_s))

    def _forgive(self, now: float) -> None:
        self._forgiven_until = now + 2 * self.lease_s + _SLACK_S


class Unlisted:
    """Names of members that are in the view but not in etcd. Any thread may call."""

    def __init__(self) -> None:
        """Starts empty."""
        self._lock = threading.Lock()
        self._names: dict[str, tuple[float, str]] = {}

    def add(self, name: str, until: float, why: str) -> None:
        """Notes that its record is gone; it may come back by `until` (time.monotonic())."""
        with self._lock:
            self._names.setdefault(name, (until, why))

    def discard(self, name: str) -> None:
        """Notes that its record is back, or that the view no longer has it."""
        with self._lock:
            self._names.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether its record is missing."""
        with self._lock:
            return name in self._names

    def give_up_expired(self, give_up: Callable[[str, str], bool]) -> None:
        """Calls `give_up` with each name whose time is over, and why. True means that the view no longer has it."""
        now = time.monotonic()
        with self._lock:
            late = [(name, why) for name, (until, why) in self._names.items() if now >= until]
        for name, why in late:
            if give_up(name, why):
                self.discard(name)
