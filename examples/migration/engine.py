"""The engine of one instance: a batch of requests, one token each a step, over the blocks of a pool."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from llama import PagedKV
from torch.utils.dlpack import from_dlpack

import kvpool
from kvpool.control.migration import Arrived, RequestProgress, Stopped
from kvpool.policy.migration import FIRST, Term
from migration.model import BLOCK, block_ids, next_token

__all__ = ["Engine", "Request"]

Addresses = npt.NDArray[np.uint64]


@dataclass
class Request:
    """One request, wherever it is.

    Attributes:
        name: Its name.
        tokens: All that are known.
        prompt: So many of them were its prompt.
        length: So many it has at its end.
        term: Everything that is put out for it carries this.
    """

    name: str
    tokens: list[int]
    prompt: int
    length: int
    term: Term = FIRST


@dataclass
class _Running:
    request: Request
    blocks: Addresses
    own: Addresses
    spare: list[int] = field(default_factory=list)
    prefix: kvpool.Match | None = None
    stopped: bool = False


class Engine:
    """See above. `step` is called by one thread; migrations and rebalancing call from theirs.

    Args:
        pool: For its blocks.
        put_out: Called with each token, under its term, with its position in the answer.
        send: Called with a request that waited here, and the member where it is to begin.
        stopping: Called when a request is stopped to be handed over.
    """

    def __init__(
        self,
        pool: kvpool.Pool,
        put_out: Callable[[Request, int, int], None],
        send: Callable[[Request, str], None],
        stopping: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._kv = PagedKV(from_dlpack(pool.tensor(kvpool.HBM)))
        self._put_out = put_out
        self._send = send
        self._stopping = stopping
        self._lock = threading.RLock()
        self._running: dict[str, _Running] = {}  # oldest first
        self._new: dict[str, Request] = {}
        self._cancelled: set[str] = set()
        self.closing = False  # it takes nothing more

    # ---- the life of a request

    def submit(self, request: Request) -> None:
        """A new request waits here for its place."""
        with self._lock:
            self._new[request.name] = request

    def begin(self, request: Request) -> bool:
        """Prefills a request here, and decodes it from now on. Whether there was room."""
        with self._lock:
            try:
                own = self._pool.alloc(-(-(len(request.tokens) + 1) // BLOCK))
            except kvpool.OutOfBlocks:
                return False
            running = self._running[request.name] = _Running(request, own, own)
            self._token(running, 0)
            return True

    def step(self) -> None:
        """Decodes one token of each request."""
        for name in list(self._running):
            with self._lock:
                running = self._running.get(name)
                if running is None or running.stopped:
                    continue
                one = running.request
                if len(one.tokens) >= one.length or name in self._cancelled:
                    self._free(self._running.pop(name))
                elif self._has_room(running):
                    self._token(running, (len(one.tokens) - 1) // BLOCK)

    def cancel(self, name: str) -> None:
        """Nobody wants the answer any more."""
        with self._lock:
            self._cancelled.add(name)
            self._new.pop(name, None)

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return not self._running and not self._new

    def _token(self, running: _Running, first_block: int) -> None:
        one = running.request
        token = next_token(one.tokens, self._kv, block_ids(running.blocks), first_block)
        self._put_out(one, len(one.tokens) - one.prompt, token)
        one.tokens.append(token)

    def _has_room(self, running: _Running) -> bool:
        """Room for the next token: else the newest request here gives up its blocks, and waits for another place."""
        while len(running.request.tokens) > len(running.blocks) * BLOCK:
            try:
                more = np.array([running.spare.pop(0)], np.uint64) if running.spare else self._pool.alloc(1)
            except kvpool.OutOfBlocks:
                newest = next((each for each in reversed(self._running.values()) if not each.stopped), running)
                self._free(self._running.pop(newest.request.name))
                self._new[newest.request.name] = newest.request
                if newest is running:
                    return False
                continue
            running.blocks = np.concatenate([running.blocks, more])
            running.own = np.concatenate([running.own, more])
        return True

    def _free(self, running: _Running) -> None:
        if running.prefix is not None:
            running.prefix.close()
        addresses = np.concatenate([running.own, np.array(running.spare, np.uint64)])
        if len(addresses):
            self._pool.free(addresses)

    # ---- what rebalancing asks

    def running(self) -> Sequence[tuple[str, int]]:
        with self._lock:
            return [(name, (len(each.blocks) + len(each.spare)) * BLOCK) for name, each in self._running.items()]

    def waiting(self) -> Sequence[tuple[str, int]]:
        with self._lock:
            return [(name, -(-(len(one.tokens) + 1) // BLOCK) * BLOCK) for name, one in self._new.items()]

    def place(self, request: str, to: str) -> None:
        with self._lock:
            one = self._new.pop(request)
        self._send(one, to)

    # ---- what migrations ask, at the source

    def progress(self, request: str) -> RequestProgress | None:
        with self._lock:
            running = self._running.get(request)
            if running is None or running.stopped or request in self._cancelled:
                return None
            one = running.request
            tokens = np.array(one.tokens, np.int32)
            return RequestProgress(tokens, len(tokens) - 1, running.blocks, term=one.term, room=len(tokens) + 2 * BLOCK)

    def stop(self, request: str) -> Stopped | None:
        with self._lock:
            running = self._running.get(request)
            if running is None or request in self._cancelled:
                return None
            running.stopped = True
            one = running.request
        self._stopping(request)  # the reader sorts what comes from two places, so it need not have all of it yet
        tokens = np.array(one.tokens, np.int32)
        return Stopped(tokens, len(tokens) - 1, running.blocks, f"{one.prompt} {one.length}".encode())

    def resume(self, request: str, term: Term) -> None:
        with self._lock:
            running = self._running[request]
            if running.stopped:
                running.request.term, running.stopped = term, False

    def release(self, request: str) -> None:
        with self._lock:
            self._free(self._running.pop(request))

    # ---- and at the destination

    def batch(self) -> int:
        return len(self._running)

    def admit(self, request: str, tokens: int) -> bool:
        return not self.closing

    def prefill(self, request: str, tokens: npt.NDArray[np.int32], begin: int, blocks: Addresses) -> None:
        next_token(tokens.tolist(), self._kv, block_ids(blocks), begin // BLOCK)

    def adopt(self, arrived: Arrived) -> None:
        prompt, length = map(int, arrived.state.split())
        one = Request(arrived.request, arrived.tokens.tolist(), prompt, length, arrived.term)
        with self._lock:
            self._running[one.name] = _Running(one, arrived.blocks, arrived.own, arrived.spare.tolist(), arrived.prefix)

    def drop(self, request: str, term: Term) -> None:
        with self._lock:
            running = self._running.get(request)
            if running is not None and running.request.term == term:
                self._free(self._running.pop(request))
