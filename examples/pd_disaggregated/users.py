"""The users of a run: each asks a turn of a session when the one before it was answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pd_disaggregated.records import Answer, Kill, Session

if TYPE_CHECKING:
    from pd_disaggregated.dispatcher import Dispatcher


class Users:
    """All users of a run, and the thread that kills instances.

    Attributes:
        answers: In the order in which they were complete.
        start: When the run began (time.monotonic).
    """

    def __init__(
        self, dispatcher: Dispatcher, on_answer: Callable[[Answer], None] | None, kill: Sequence[Kill]
    ) -> None:
        """Begins the run: from now on the clock runs."""
        self.answers: list[Answer] = []
        self.start = time.monotonic()
        self._dispatcher = dispatcher
        self._on_answer = on_answer
        self._kills = sorted(kill, key=lambda order: order.after_tokens, reverse=True)

    async def play(self, sessions: Sequence[Session]) -> None:
        """Asks all there is to ask. The first that fails ends the others."""
        playing = [asyncio.ensure_future(self._play_one(session)) for session in sessions]
        try:
            await asyncio.gather(*playing)
        finally:
            for one in playing:
                one.cancel()

    async def _play_one(self, session: Session) -> None:
        await asyncio.sleep(session.arrival_s + self.start - time.monotonic())
        past = session.prefix
        for number, turn in enumerate(session.turns):
            if number:
                await asyncio.sleep(session.think_s)
            prompt = np.concatenate([past, turn.added], dtype=np.int32)
            reply = self._dispatcher.ask(session.number, prompt, turn.new_tokens)
            async for _ in reply:
                self._kill_in_time()
            answer = reply.answer(number, self.start)
            self.answers.append(answer)
            if self._on_answer is not None:
                self._on_answer(answer)
            if session.remembers:
                past = np.concatenate([prompt, np.array(answer.tokens, np.int32)], dtype=np.int32)

    def _kill_in_time(self) -> None:
        while self._kills and self._dispatcher.streamed_tokens >= self._kills[-1].after_tokens:
            self._dispatcher.kill(self._kills.pop().instance)
