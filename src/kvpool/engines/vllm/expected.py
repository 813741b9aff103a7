"""The requests that wait for a prompt which another engine has announced. The scheduler's side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.params import Announced

__all__ = ["Expected", "Source"]

_log = logging.getLogger("kvpool.engines.vllm")


class Source(Protocol):
    """Where prompts arrive."""

    @property
    def figures(self) -> Figures:
        """What happened since somebody took them."""

    def arrived(self, number: str) -> bool:
        """Whether the prompt of this id has arrived."""

    def failed(self, number: str) -> bool:
        """Whether its sender has said that the prompt of this id does not come."""

    def let_go(self, number: str) -> None:
        """Its request needs it no more."""

    def is_member(self, name: str) -> bool:
        """Whether an engine of this name is there."""


@dataclass
class _Wait:
    announced: Announced
    began: float
    over: bool = False


class Expected:
    """Which requests wait. Not thread-safe.

    No request waits for ever: only until its prompt has come, or the engine that sends it is gone or says that it
    could not, or the deadline has passed. Then it loads what is cached, and computes the rest.
    """

    def __init__(self, source: Source, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Of an engine.

        Args:
            source: Where prompts arrive.
            timeout_s: Seconds from the begin of a request to the end of its wait.
            clock: Seconds.
        """
        self._source = source
        self._timeout_s = timeout_s
        self._clock = clock
        self._waits: dict[str, _Wait] = {}

    def add(self, request_id: str, announced: Announced) -> None:
        """A request whose prompt comes from another engine."""
        self._waits[request_id] = _Wait(announced, self._clock())

    def end(self, request_id: str) -> int:
        """How many tokens of the request's prompt another engine has announced; 0: none."""
        wait = self._waits.get(request_id)
        return 0 if wait is None else wait.announced.tokens

    def has_arrived(self, request_id: str) -> bool:
        """Whether the request's prompt has come from another engine. Then it need not wait."""
        wait = self._waits.get(request_id)
        if wait is None or not self._source.arrived(wait.announced.id):
            return False
        self._end(wait)
        return True

    def must_wait(self, request_id: str, cached: int, wanted: int) -> bool:
        """Whether the request should be asked again later. REQUIRES: its prompt had not arrived before the look-up.

        Args:
            request_id: Of a request, announced or not.
            cached: How many of its tokens are cached now.
            wanted: How many it could load at most, in whole blocks.
        """
        wait = self._waits.get(request_id)
        if wait is None or wait.over:
            return False
        announced = wait.announced
        if cached >= min(wanted, announced.tokens):
            self._end(wait)
            return False
        if self._source.failed(announced.id):
            return self._give_up(request_id, wait, "could not send it")
        if self._clock() - wait.began >= self._timeout_s:
            return self._give_up(request_id, wait, "has not sent it in time")
        if not self._source.is_member(announced.peer):
            return self._give_up(request_id, wait, "is not in the cluster")
        return True

    def finish(self, request_id: str) -> None:
        """The request loads now, or needs nothing any more."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._source.let_go(wait.announced.id)

    # ----

    def _give_up(self, request_id: str, wait: _Wait, why: str) -> bool:
        announced = wait.announced
        _log.warning("request %s computes its prompt: %s, which announced it, %s", request_id, announced.peer, why)
        self._source.figures.add(expired_waits=1)
        self._end(wait)
        return False

    def _end(self, wait: _Wait) -> None:
        if wait.over:
            return
        wait.over = True
        self._source.figures.add(prompt_waits=1, prompt_wait_seconds=self._clock() - wait.began)
