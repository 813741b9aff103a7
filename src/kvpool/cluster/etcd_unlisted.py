"""Members whose records have run out in etcd, though they may live (ADR 0022).

A record runs out when nobody renewed its lease. That has three reasons, and only one of them is a loss:

    the member is gone           it is lost
    etcd was silent              nobody could renew anything: all members have some time to write themselves down again
    the member cannot reach etcd a direct link to it shows that it lives, for as long as the link lasts
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Contact", "Unlisted"]

_SLACK_S: Final = 2.0  # etcd looks for leases that have run out twice a second, and ends a thousand of them a second


class Contact:
    """When etcd has answered this process, and whether it was silent for so long that leases may have run out.

    Any thread may call anything.
    """

    def __init__(self, lease_s: float, heartbeat_s: float) -> None:
        """It answers now."""
        self.lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._answered = time.monotonic()
        self._forgiven_until = 0.0

    def answered(self) -> None:
        """Etcd has just said something."""
        now = time.monotonic()
        with self._lock:
            if now - self._answered > self._long_s():
                self._forgive(now)
            self._answered = now

    def forgive(self) -> None:
        """Etcd has lost its memory, and what it does not list says nothing."""
        with self._lock:
            self._forgive(time.monotonic())

    def is_due(self) -> bool:
        """Whether etcd should be asked for a sign of life. Not while it is silent: its return is noticed anyway."""
        with self._lock:
            silent_s = time.monotonic() - self._answered
        return self._heartbeat_s / 2 < silent_s <= self._long_s()

    def forgiven_until(self) -> float:
        """Until when a record that is missing is no loss (time.monotonic()); in the past, if etcd was not silent."""
        with self._lock:
            return self._forgiven_until

    def _long_s(self) -> float:
        """A silence in which a lease may have run out that was renewed just before, or a heartbeat before.

        Longer than the time between two signs of life of an idle etcd: half a heartbeat and a heartbeat.
        """
        return max(1.6 * self._heartbeat_s, 0.8 * (self.lease_s - self._heartbeat_s))

    def _forgive(self, now: float) -> None:
        self._forgiven_until = now + 2 * self.lease_s + _SLACK_S


class Unlisted:
    """Names of members that are on the board and not in etcd. Any thread may call anything."""

    def __init__(self) -> None:
        """There are none."""
        self._lock = threading.Lock()
        self._names: dict[str, tuple[float, str]] = {}

    def add(self, name: str, until: float, why: str) -> None:
        """Its record is gone; it may be back by `until` (time.monotonic())."""
        with self._lock:
            self._names.setdefault(name, (until, why))

    def discard(self, name: str) -> None:
        """Its record is there again, or it is off the board."""
        with self._lock:
            self._names.pop(name, None)

    def has(self, name: str) -> bool:
        """Whether its record is still missing."""
        with self._lock:
            return name in self._names

    def settle(self, give_up: Callable[[str, str], bool]) -> None:
        """Calls `give_up` with each name whose time is over, and why; True: it is off the board."""
        now = time.monotonic()
        with self._lock:
            late = [(name, why) for name, (until, why) in self._names.items() if now >= until]
        for name, why in late:
            if give_up(name, why):
                self.discard(name)
