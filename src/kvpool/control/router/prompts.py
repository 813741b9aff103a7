"""What requests ask for: short bodies are read where they come, others in processes beside, and some not at all.

A request whose body is not read (it is too long, or all processes are busy, or the body is odd) is routed by load.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from kvpool.control.reading.process import NotRead, ReaderProcess
from kvpool.control.reading.prompts import (
    NOTHING,
    Kind,
    Reading,
    Tokens,
    Unreadable,
    is_quick,
    load_tokenizer,
    read_prompt,
    short,
)
from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.errors import Refusal
from kvpool.control.router.logs import event

__all__ = ["Ask", "Asked", "Kind", "PromptReader"]

Ask = Callable[[Kind, Mapping[str, str], bytes | bytearray], Awaitable[Tokens | None]]

_READING_S: Final = 10.0  # of one body, in the process: beyond it the process is replaced


@dataclass(frozen=True)
class Asked:
    """What a request wants, for routing.

    Attributes:
        kind: Of the endpoint.
        tokens: Of the prompt; at least one.
        session: Of the client, None where it names none.
        namespace: Model, salt and kind of token, or as KV events name it: prompts of different ones share no cache.
        stream: The client wants events, or may want them.
        unread: Why its prompt is not known, for metrics; None where it is.
    """

    kind: Kind
    tokens: Tokens
    session: str | None = None
    namespace: str = ""
    stream: bool = False
    unread: str | None = None


class PromptReader:
    """Reads requests. Belongs to one event loop.

    Args:
        tokenizer: A tokenizer.json; None for four bytes a token.
        prompt_bytes_max: Of a prompt that are read.
        processes: That read what is long, at most.
        wait_s: For one of them to be free.
        ask: Asks an instance for the tokens of a request's prompt; None: nobody is asked.
        adapters: What is known of adapters, if instances are followed by their KV events, which name no other model:
            prompts of the model's tokens are to match them.

    Raises:
        ArgumentError: The tokenizer is invalid.
        Unsupported: A tokenizer is given, and its package is missing.
    """

    def __init__(
        self,
        tokenizer: Path | None,
        prompt_bytes_max: int,
        processes: int,
        wait_s: float,
        ask: Ask | None = None,
        adapters: AdapterNames | None = None,
    ) -> None:
        self._tokenizer = load_tokenizer(tokenizer)
        self._prompt_bytes_max = prompt_bytes_max
        self._wait_s = wait_s
        self._tokens_of = ask
        self._adapters = adapters
        self._all = [ReaderProcess(tokenizer, prompt_bytes_max) for _ in range(processes)]
        self._free: queue.LifoQueue[ReaderProcess] = queue.LifoQueue()  # the one that runs already comes first
        for process in reversed(self._all):
            self._free.put(process)
        self._limiter: anyio.CapacityLimiter | None = None

    async def read(self, kind: Kind, headers: Mapping[str, str], body: bytes | bytearray) -> Asked:
        """What a request wants. What the router does not know in a body is the instance's to judge.

        Raises:
            Refusal: 400, the body is no JSON object.
        """
        session = headers.get("x-session-id")
        if kind == "other":
            return Asked(kind, NOTHING, short(session))
        try:
            if not is_quick(body):
                read = await self._read_aside(kind, session, body)
            elif self._tokenizer.slow:
                read = await anyio.to_thread.run_sync(self._read, kind, session, body)
            else:
                read = self._read(kind, session, body)
        except Unreadable as error:
            raise Refusal(400, str(error), "invalid_json") from error
        except NotRead:
            return self.unread(kind, headers, "failed")
        except TimeoutError:
            return self.unread(kind, headers, "busy")
        if self._tokens_of is not None and read.namespace != read.ids_namespace:
            tokens = await self._tokens_of(kind, headers, body)
            if tokens is not None:
                read = replace(read, tokens=tokens, namespace=read.ids_namespace)
        return Asked(kind, read.tokens, read.session, self._namespace(read), read.stream)

    def unread(self, kind: Kind, headers: Mapping[str, str], why: str) -> Asked:
        """A request whose body is not read."""
        return Asked(kind, NOTHING, short(headers.get("x-session-id")), stream=True, unread=why)

    async def start(self) -> None:
        """Starts one process, so that the first long body does not wait for it."""
        async with self._gate():
            await anyio.to_thread.run_sync(self._start)

    def close(self) -> None:
        """Ends the processes. REQUIRES: nothing is being read."""
        for process in self._all:
            process.close()

    # ---- inside

    def _namespace(self, read: Reading) -> str:
        if self._adapters is not None and read.namespace == read.ids_namespace and read.salt is not None:
            return self._adapters.namespace(read.model, read.salt, read.lora_path)
        return read.namespace

    def _read(self, kind: Kind, session: str | None, body: bytes | bytearray) -> Reading:
        return read_prompt(self._tokenizer, kind, session, body, self._prompt_bytes_max)

    async def _read_aside(self, kind: Kind, session: str | None, body: bytes | bytearray) -> Reading:
        """Raises TimeoutError when no process is free in time."""
        gate = self._gate()
        with anyio.fail_after(self._wait_s):
            await gate.acquire()
        try:
            # Not among the threads that others may use up: the gate bounds these.
            return await anyio.to_thread.run_sync(self._ask, kind, session, body, limiter=anyio.CapacityLimiter(1))
        finally:
            gate.release()

    def _gate(self) -> anyio.CapacityLimiter:
        """As many as there are processes; it belongs to the loop that runs."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(len(self._all))
        return self._limiter

    def _ask(self, kind: Kind, session: str | None, body: bytes | bytearray) -> Reading:
        process = self._free.get_nowait()
        try:
            return process.read(kind, session, body, _READING_S)
        finally:
            self._free.put(process)

    def _start(self) -> None:
        process = self._free.get_nowait()
        try:
            process.start()
        except OSError as error:  # it is tried again by the first long body
            event(logging.WARNING, "no process to read prompts", cause=str(error))
        finally:
            self._free.put(process)
