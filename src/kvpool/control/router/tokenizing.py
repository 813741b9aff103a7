"""The model's tokens of prompts, for which the router asks its instances: these have the tokenizer and the template.

A question takes a round trip before the request, so it has a short deadline, and an instance that does not answer well
is left alone for a while. A prompt whose tokens are not known is routed as without this: by its bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

import anyio.to_thread

from kvpool.control.reading.asking import answered, question
from kvpool.control.reading.prompts import INLINE_BYTES, Kind, Tokens
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.settings import RouterSettings
from kvpool.control.router.upstream import Asker, UpstreamError

__all__ = ["Tokenizing"]

_PAUSE_S: Final = 5.0  # of an instance that gave no answer in time
_LONG_PAUSE_S: Final = 60.0  # of one that cannot tell tokens
_UNABLE: Final = frozenset({404, 405, 501})
_ANSWER_BYTES: Final = 12  # of a token, with its comma
_TEMPLATE_BYTES: Final = 1 << 20  # of what a template adds, such as how to call tools


class _NoTokensError(Exception):
    """The tokens of a prompt are not to be had; says why, for metrics."""


class Tokenizing:
    """Asks instances for tokens. Belongs to one event loop.

    Args:
        settings: `tokenize` is a path.
        fleet: The instances.
        metrics: To count in.
        clock: Seconds from any start.
    """

    def __init__(
        self, settings: RouterSettings, fleet: Fleet, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert settings.tokenize is not None
        self._settings = settings
        self._path = settings.tokenize
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._asker = Asker(settings.tokenize_timeout_s)
        self._asked: dict[int, int] = {}  # questions under way, by the instance's number
        self._not_before: dict[int, float] = {}  # on the clock

    async def ask(self, kind: Kind, headers: Mapping[str, str], body: bytes | bytearray) -> Tokens | None:
        """The tokens of a request's prompt; None if they are not to be had.

        Args:
            kind: Of the endpoint; not "other".
            headers: Of the request, names in lower case.
            body: Of the request, JSON.
        """
        try:
            return await self._tokens(kind, headers, body)
        except _NoTokensError as error:
            self._metrics.untokenized.labels(str(error)).inc()
            return None

    async def close(self) -> None:
        """Closes all connections."""
        await self._asker.close()

    # ---- inside

    async def _tokens(self, kind: Kind, headers: Mapping[str, str], body: bytes | bytearray) -> Tokens:
        if len(body) > self._settings.prompt_bytes_max:
            raise _NoTokensError("long")
        if len(body) > INLINE_BYTES:
            asked = await anyio.to_thread.run_sync(question, kind, body)
        else:
            asked = question(kind, body)
        if asked is None:
            raise _NoTokensError("form")
        instance = self._choose()
        if instance is None:
            raise _NoTokensError("nobody")
        began = self._clock()
        try:
            return await self._ask(instance, headers, asked)
        finally:
            self._metrics.tokenizing.observe(self._clock() - began)

    def _choose(self) -> Instance | None:
        """The one that is least busy, of those that are up and have not failed to tell tokens lately."""
        now = self._clock()
        able = [each for each in self._fleet if each.in_table and self._not_before.get(each.number, now) <= now]
        return min(able, key=lambda each: (self._asked.get(each.number, 0), each.in_flight), default=None)

    async def _ask(self, instance: Instance, headers: Mapping[str, str], asked: bytes) -> Tokens:
        number = instance.number
        self._asked[number] = self._asked.get(number, 0) + 1
        most = _ANSWER_BYTES * len(asked) + _TEMPLATE_BYTES  # a byte is a token at most
        try:
            status, data = await self._asker.post(instance.spec, self._path, self._key(headers), asked, most)
        except UpstreamError as error:
            if not error.ours:
                self._pause(instance, _PAUSE_S, str(error))
            raise _NoTokensError("slow" if isinstance(error.__cause__, TimeoutError) else "failed") from error
        finally:
            self._asked[number] -= 1
            if not self._asked[number]:
                del self._asked[number]
        if status != 200:
            if status in _UNABLE or status >= 500:
                pause_s = _LONG_PAUSE_S if status in _UNABLE else _PAUSE_S
                self._pause(instance, pause_s, f"it answered with status {status}")
            raise _NoTokensError("refused")  # which may lie in the prompt
        tokens = answered(data)
        if tokens is None:
            self._pause(instance, _LONG_PAUSE_S, "its answer has no tokens")
            raise _NoTokensError("wrong")
        return tokens

    def _key(self, headers: Mapping[str, str]) -> str | None:
        """What the instance is told as `Authorization`: the same as with the request."""
        if self._settings.instance_key is not None:
            return f"Bearer {self._settings.instance_key}"
        return headers.get("authorization") if self._settings.api_key is None else None

    def _pause(self, instance: Instance, seconds: float, cause: str) -> None:
        now = self._clock()
        if self._not_before.get(instance.number, now) <= now:
            name = instance.spec.name
            event(logging.WARNING, "no tokens from instance", instance=name, cause=cause, pause_s=seconds)
        self._not_before = {number: until for number, until in self._not_before.items() if until > now}
        self._not_before[instance.number] = now + seconds
