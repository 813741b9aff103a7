"""The model's tokens of prompts, for which the router asks its instances: these have the tokenizer and the template.

A question takes a round trip before the request, so it has a short deadline, which grows with the text, it is asked of
no prompt beyond a limit, and an instance that does not answer well is left alone for a while (`token_source.py`). A
prompt whose tokens are not known is routed as without this: by its bytes. Whatever fails here, the request goes on.

What takes the event loop too long (a text of more than 64 KiB) is written and read in a thread, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from kvpool.control.reading.asking import answered, is_about_the_prompt, question
from kvpool.control.reading.prompts import INLINE_BYTES, Kind, Tokens, has_few_values, units
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.lease import Instance
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.settings import RouterSettings
from kvpool.control.router.token_source import TokenSource
from kvpool.control.router.upstream import Asker, UpstreamError

__all__ = ["Tokenizing"]

_UNABLE: Final = frozenset({404, 405, 501})
_TIMES_MAX: Final = 8  # the timeout, however long the text is
_SHORT_BYTES: Final = 4 << 10  # of a question that any instance can answer in time
_ANSWER_BYTES: Final = 12  # of a token, with its comma
_TEXT_BYTES: Final = 3  # of a token, at least, in most texts
_TEMPLATE_TOKENS: Final = 16 << 10  # that a template adds, such as how to call tools

_T = TypeVar("_T")


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
        self._long = anyio.CapacityLimiter(1)
        # By the instance's number, and how often it was ejected. Of long texts alone it may be too slow to tell tokens.
        self._asked: dict[tuple[int, int], TokenSource] = {}
        self._asked_long: dict[tuple[int, int], TokenSource] = {}

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
        except Exception as error:  # tokens are a hint, which is not to cost the request
            event(logging.WARNING, "no tokens of a prompt", cause=f"{type(error).__name__}: {error}")
            self._metrics.untokenized.labels("failed").inc()
        return None

    async def close(self) -> None:
        """Closes all connections."""
        await self._asker.close()

    # ---- inside

    async def _tokens(self, kind: Kind, headers: Mapping[str, str], body: bytes | bytearray) -> Tokens:
        limit = min(self._settings.tokenize_bytes_max, self._settings.prompt_bytes_max)
        if len(body) > limit or not has_few_values(body):
            raise _NoTokensError("long")
        asked = await self._aside(len(body) > INLINE_BYTES, partial(question, kind, body))
        if asked is None:
            raise _NoTokensError("form")
        is_long = len(asked) > INLINE_BYTES
        instance = self._choose(is_long)
        if instance is None:
            raise _NoTokensError("nobody")
        began = self._clock()
        sources = self._sources(instance, is_long)
        for known in sources:
            known.under_way += 1
        try:
            tokens = await self._ask(instance, sources, headers, asked)
        finally:
            for known in sources:
                known.under_way -= 1
            self._metrics.tokenizing.observe(self._clock() - began)
        for known in sources:
            known.told()
        return tokens

    async def _aside(self, is_long: bool, do: Callable[[], _T]) -> _T:
        """Does it here, or in a thread if it is long."""
        return await anyio.to_thread.run_sync(do, limiter=self._long) if is_long else do()

    def _choose(self, is_long: bool) -> Instance | None:
        """The one that is least busy, of those that are up and have not failed to tell tokens lately."""
        now = self._clock()
        able = [
            each
            for each in self._fleet
            if each.in_table and all(known.may_be_asked(now) for known in self._sources(each, is_long))
        ]
        return min(able, key=lambda each: (self._of(each).under_way, each.in_flight), default=None)

    def _of(self, instance: Instance) -> TokenSource:
        return self._sources(instance, False)[0]

    def _sources(self, instance: Instance, is_long: bool) -> tuple[TokenSource, ...]:
        """What is known of an instance, which must allow a question: of all texts, and of long ones."""
        key = instance.number, instance.epoch
        if key not in self._asked:
            there = {(each.number, each.epoch) for each in self._fleet}
            self._asked = {each: known for each, known in self._asked.items() if each in there}
            self._asked_long = {each: known for each, known in self._asked_long.items() if each in there}
            self._asked[key], self._asked_long[key] = TokenSource(), TokenSource()
        return (self._asked[key], self._asked_long[key]) if is_long else (self._asked[key],)

    async def _ask(
        self, instance: Instance, sources: tuple[TokenSource, ...], headers: Mapping[str, str], asked: bytes
    ) -> Tokens:
        """Faults are those of `sources`: meanwhile the instance may have been ejected, and be back as another one."""
        known = sources[0]
        most = len(asked) + _TEMPLATE_TOKENS  # a byte is a token at most
        try:
            status, data = await self._asker.post(
                instance.spec,
                self._path,
                self._key(headers),
                asked,
                _ANSWER_BYTES * most,
                min(units(asked), _TIMES_MAX),
            )
        except UpstreamError as error:
            slow = isinstance(error.__cause__, TimeoutError)
            if not error.ours and slow and len(sources) > 1:  # a long text may just take long: others may go on
                self._note(instance, sources[1], asked, f"{error}, of a long text")
            elif not error.ours:
                # One that has answered in time before may only have been busy, or the router was.
                sure = not known.proven and len(asked) <= _SHORT_BYTES if slow else not error.sent
                self._note(instance, known, asked, str(error), sure=sure)
            raise _NoTokensError("slow" if slow else "failed") from error
        if status != 200:
            if status in _UNABLE and not known.proven and not is_about_the_prompt(data):
                self._note(instance, known, asked, f"it answered with status {status}", sure=True, for_long=True)
            elif status >= 500:
                self._note(instance, known, asked, f"it answered with status {status}")
            raise _NoTokensError("refused")  # which may lie in the prompt
        tokens = await self._aside(len(data) > _ANSWER_BYTES * INLINE_BYTES // _TEXT_BYTES, partial(answered, data))
        if tokens is None or len(tokens) > most:
            self._note(instance, known, asked, "its answer has no tokens" if tokens is None else "it tells too many")
            raise _NoTokensError("wrong")
        return tokens

    def _note(
        self,
        instance: Instance,
        known: TokenSource,
        asked: bytes,
        cause: str,
        sure: bool = False,
        for_long: bool = False,
    ) -> None:
        pause_s = known.failed(asked, self._clock(), sure, for_long)
        if pause_s:
            name = instance.spec.name
            event(logging.WARNING, "no tokens from instance", instance=name, cause=cause, pause_s=pause_s)

    def _key(self, headers: Mapping[str, str]) -> bytes | None:
        """What the instance is told as `Authorization`: the same as with the request."""
        if self._settings.instance_key is not None:
            return f"Bearer {self._settings.instance_key}".encode()
        sent = headers.get("authorization") if self._settings.api_key is None else None
        return None if sent is None else sent.encode("latin-1")  # any byte, as it came
