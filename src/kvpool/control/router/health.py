"""Whether one instance may have requests: a state machine, without sockets, on an injected clock.

    STARTING --probe passes--> HEALTHY <--answers, or `passes` probes--- TRIAL
                                  |                                      |  ^
                 `fails` probes or `errors` requests in a row      any error  time is up, and `passes` probes
                                  v                                      v  |
                                OUT <--------------------------------------+

A healthy instance comes back: a passed probe counts whatever happened before, and without probes time alone leads to a
trial. No instance stays out forever.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from kvpool.control.router.settings import HealthSettings

__all__ = ["Breaker", "State"]


class State(Enum):
    """The state of an instance."""

    STARTING = "starting"  # not probed yet
    HEALTHY = "healthy"
    TRIAL = "trial"  # gets one request at a time
    OUT = "out"


class Breaker:
    """Not thread-safe.

    Args:
        settings: The thresholds.
        clock: Seconds from any start.
    """

    def __init__(self, settings: HealthSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._state = State.STARTING if settings.probes else State.HEALTHY
        self._passed = self._failed = self._errors = 0  # in a row
        self._trials = 0  # in a row that failed
        self._out_until = 0.0

    @property
    def state(self) -> State:
        """Now: without probes the end of an exclusion is a matter of time."""
        if self._state is State.OUT and not self._settings.probes and self._clock() >= self._out_until:
            self._enter(State.TRIAL)
        return self._state

    def probe_passed(self) -> None:
        """The instance said that it is well."""
        self._failed = 0
        self._passed += 1
        enough = self._passed >= self._settings.passes
        if self._state is State.STARTING:
            self._recover()
        elif self._state is State.OUT and enough and self._clock() >= self._out_until:
            self._enter(State.TRIAL)
        elif self._state is State.TRIAL and enough:
            self._recover()

    def probe_failed(self) -> None:
        """It did not say so in time."""
        self._passed = 0
        self._failed += 1
        if self._state is State.TRIAL or (self._state is State.HEALTHY and self._failed >= self._settings.fails):
            self._exclude()

    def answered(self) -> None:
        """A request got an answer from it, whatever status."""
        self._errors = 0
        if self.state is State.TRIAL:
            self._recover()

    def request_failed(self) -> None:
        """A request got none: no connection, or one that broke."""
        self._errors += 1
        state = self.state
        if state is State.TRIAL or (state is State.HEALTHY and self._errors >= self._settings.errors):
            self._exclude()

    def _enter(self, state: State) -> None:
        self._state = state
        self._passed = self._failed = self._errors = 0

    def _recover(self) -> None:
        self._trials = 0
        self._enter(State.HEALTHY)

    def _exclude(self) -> None:
        backoff_s = self._settings.backoff_s * 2.0 ** min(self._trials, 30)
        self._out_until = self._clock() + min(backoff_s, self._settings.backoff_max_s)
        self._trials += 1
        self._enter(State.OUT)
