"""A request on its way through the instances, and the answer as it streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pd_disaggregated import messages
from pd_disaggregated.fleet import Instance
from pd_disaggregated.records import Answer, Tokens


class RequestFailed(RuntimeError):
    """A request was given up: its time is over, or the run has failed."""


@dataclass(eq=False)
class Request:
    """What the dispatcher knows of a request.

    An attempt asks for what is missing: its prompt is the prompt and the tokens that were streamed before it.

    Attributes:
        number: Unique in the run.
        session: Whose turn it is.
        prompt: What was asked.
        new_tokens: How many tokens the answer has.
        asked: When (time.monotonic).
        tokens: The answer, as far as it was streamed.
        times: When each token came.
        attempt: From 1; 0 before the first one.
        begun: When it was given to prefill (time.monotonic).
        base: Tokens that were streamed before this attempt.
        prefill: Where it is prefilled; None while it waits for a place.
        decode: Where it is decoded.
        taken_over: Whether decode has it, so that prefill may be lost.
        prefilled: What prefill has told at its end; None before.
        answered: What decode has told at its end; None before.
    """

    number: int
    session: int
    prompt: Tokens
    new_tokens: int
    asked: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    attempt: int = 0
    begun: float = 0.0
    base: int = 0
    prefill: Instance | None = None
    decode: Instance | None = None
    taken_over: bool = False
    prefilled: messages.Prefilled | None = None
    answered: messages.Answered | None = None
    bytes_to_decode: int = 0
    bytes_to_prefill: int = 0
    kvpool_s: float = 0.0
    stream: asyncio.Queue[int | BaseException | None] = field(default_factory=asyncio.Queue)

    def begin(self, prefill: Instance, decode: Instance) -> messages.Serve:
        """A new attempt, there: what prefill is to be told."""
        self.attempt += 1
        self.begun = time.monotonic()
        self.base = len(self.tokens)
        self.prefill, self.decode = prefill, decode
        self.taken_over = False
        self.prefilled = self.answered = None
        where = "" if prefill is decode else decode.name
        return messages.Serve(self.number, self.attempt, self.next_prompt, self.new_tokens - self.base, where)

    @property
    def next_prompt(self) -> Tokens:
        """The prompt of an attempt that begins now."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)], dtype=np.int32)

    def leave(self) -> None:
        """The attempt is over, without an answer."""
        self.prefill = self.decode = None

    def stands_at(self, instance: Instance) -> bool:
        """Whether it ends with that instance: it is decoded there, or is not yet handed over from there."""
        return instance is self.decode or (instance is self.prefill and not self.taken_over)

    def waits_for(self, instance: Instance) -> bool:
        """Whether it is that instance's turn: prefill's up to the first token, then decode's."""
        return instance is (self.decode if len(self.tokens) > self.base else self.prefill)

    @property
    def waits_since(self) -> float:
        """Since when the request has waited for its instance (time.monotonic). REQUIRES: an attempt has begun."""
        return self.times[self.base] if len(self.tokens) > self.base else self.begun

    def accept(self, message: messages.Token) -> bool:
        """A token of this attempt. False: it was streamed before."""
        position = self.base + message.position
        if position < len(self.tokens):
            if self.tokens[position] != message.token:
                raise RequestFailed(
                    f"request {self.number}: token {position} was {self.tokens[position]}, and is {message.token} now"
                )
            return False
        if position > len(self.tokens):
            raise RequestFailed(f"request {self.number}: token {position} comes after {len(self.tokens)} tokens")
        self.tokens.append(message.token)
        self.times.append(time.monotonic())
        self.stream.put_nowait(message.token)
        return True

    def count(self, message: messages.Prefilled | messages.Answered) -> None:
        """What a part of it cost."""
        if isinstance(message, messages.Prefilled):
            self.prefilled = message
            self.bytes_to_decode += message.sent_bytes
        else:
            self.answered = message
            self.bytes_to_prefill += message.sent_back_bytes
        self.kvpool_s += message.kvpool_s


class Reply:
    """The answer to a request: iterate over its tokens as they come. For one task.

    Leaving it before its end does not cancel it: call `cancel`.
    """

    def __init__(self, request: Request, cancel: Callable[[Request], None]) -> None:
        """Use `Dispatcher.ask`."""
        self._request = request
        self._cancel = cancel

    def __aiter__(self) -> Reply:
        """Itself."""
        return self

    async def __anext__(self) -> int:
        """The next token.

        Raises:
            RequestFailed: It was given up.
        """
        token = await self._request.stream.get()
        if token is None:
            raise StopAsyncIteration
        if isinstance(token, BaseException):
            raise token
        return token

    def cancel(self) -> None:
        """Nobody wants the rest: the instances let go of it, and the iteration ends. Idempotent."""
        self._cancel(self._request)

    def answer(self, turn: int, start: float) -> Answer:
        """The record of it. REQUIRES: all tokens were read.

        Args:
            turn: Which one of its session.
            start: Of the run, on the clock of time.monotonic.
        """
        request = self._request
        times = [at - start for at in request.times]
        prefilled = request.prefilled
        assert request.prefill is not None
        assert request.decode is not None
        return Answer(
            session=request.session,
            turn=turn,
            prompt_tokens=len(request.prompt),
            # Of a prompt that was tried again, only what is its own: tokens streamed before may be cached, too.
            cached_at_prefill=min(prefilled.cached_tokens, len(request.prompt)) if prefilled else 0,
            cached_at_decode=min(prefilled.skipped_tokens, len(request.prompt)) if prefilled else 0,
            tokens=tuple(request.tokens),
            asked_s=request.asked - start,
            first_s=times[0],
            second_s=times[1] if len(times) > 1 else None,
            done_s=times[-1],
            prefill=request.prefill.name,
            decode=request.decode.name,
            bytes_to_decode=request.bytes_to_decode,
            bytes_to_prefill=request.bytes_to_prefill,
            kvpool_s=request.kvpool_s,
            attempts=request.attempt,
        )
