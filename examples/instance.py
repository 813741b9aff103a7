"""One serving instance: a model, a pool, and the verbs that move blocks to and from its peers.

Each runs in a process; process.py has what starts it and asks it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

import kvpool

if TYPE_CHECKING:
    from serving import Served

Tokens = npt.NDArray[np.int32]

HBM_BLOCKS = 512


@dataclass(frozen=True)
class Reply:
    """A prompt that was served. Times in seconds."""

    tokens: list[int]  # generated
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed here
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class Delivery:
    """What a peer sent, and what was generated from it."""

    peer: str
    request: int
    blocks: int
    tokens: int  # in those blocks
    reply: Reply


@dataclass(frozen=True)
class Blocks:
    """Where the blocks of an instance are. The pool has just been audited."""

    cached: int
    active: int
    for_peers: int  # reserved, lent or quarantined


class Server:
    """A model with a pool, and peers. Its methods are what a serving process does, when the parent process asks."""

    imports: ClassVar[Sequence[str]] = ("torch", "kvpool")

    def __init__(self, name: str, **settings: Any) -> None:
        # Here, and not above: the process that starts an instance needs no PyTorch.
        from comparison import use_one_thread, warm_up
        from llama import Llama, LlamaConfig
        from serving import Engine, kv_layout

        use_one_thread()
        model = Llama(LlamaConfig(), seed=0)  # the same weights in all processes
        self.pool = kvpool.Pool(kv_layout(model.config), HBM_BLOCKS, name=name, **settings)
        self.engine = Engine(model, self.pool)
        self.engine_without_cache = Engine(model, self.pool, cache=False)
        self._layers = model.config.layers
        self._stream: kvpool.TransferStream | None = None
        warm_up(self.engine_without_cache)

    def close(self) -> None:
        self.pool.close()

    # ---- peers

    def listen(self, address: str) -> str:
        return self.pool.peers.listen(address)

    def connect(self, address: str, within_s: float) -> str:
        """Meets the instance that listens there, or that will: it may be starting still."""
        until = time.monotonic() + within_s
        while True:
            try:
                return self.pool.peers.connect(address, timeout=within_s)
            except kvpool.PeerLost:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def peers(self) -> list[kvpool.PeerInfo]:
        return self.pool.peers.list()

    # ---- prompts

    def serve(self, prompt: Tokens, new_tokens: int) -> Reply:
        """Generates, with what is cached; what was computed is cached afterwards."""
        return _reply(self.engine.serve(prompt, new_tokens))

    def serve_without_cache(self, prompt: Tokens, new_tokens: int) -> Reply:
        return _reply(self.engine_without_cache.serve(prompt, new_tokens))

    def send(self, peer: str, request: int, prompt: Tokens) -> kvpool.TransferStats:
        """Sends the cached blocks of a prompt; the peer caches them, and is not sent what it has."""
        with self.pool.match(prompt) as hit:
            message = json.dumps({"request": request, "prompt": prompt.tolist()}).encode()
            sent = self.pool.transfer_with_insert(peer, prompt[: hit.tokens], hit.addrs, private=message, timeout=5.0)
            return sent.wait().stats

    def serve_received(self, new_tokens: int, within_s: float) -> Delivery:
        """Waits for a peer's prompt, and serves it."""
        item = self.pool.inbox.receive(timeout=within_s)
        if item is None:
            raise TimeoutError(f"no peer sent anything within {within_s} s")
        with item:  # its blocks stay cached while it is open
            message = json.loads(item.private)
            reply = self.serve(np.array(message["prompt"], np.int32), new_tokens)
            return Delivery(item.peer, message["request"], len(item.addrs), len(item.tokens), reply)

    # ---- what the demo breaks

    def begin_sending(self, peer: str, prompt: Tokens, layers: int, within_s: float) -> tuple[int, int]:
        """Begins to send a prompt's blocks, layer by layer, and stops in the middle: after `layers` of them.

        Returns how many bytes are written by then, and how many it would be.
        """
        with self.pool.match(prompt) as hit:  # a transfer holds what it reads by itself: the match may close
            self._stream = self.pool.transfer_with_insert(
                peer, prompt[: hit.tokens], hit.addrs, timeout=30.0, layerwise=True
            )
        for layer in range(layers):
            self._stream.send_layer(layer)
        until = time.monotonic() + within_s
        while True:
            done, total = self._stream.transfer.progress
            if total and done * self._layers >= total * layers:
                return done, total
            if time.monotonic() > until:
                raise TimeoutError(f"{done} of {total} bytes written after {within_s} s")
            time.sleep(0.001)

    def sending_fails(self, within_s: float) -> tuple[str, float]:
        """Waits for the transfer that was begun to fail: with what, and when (CLOCK_MONOTONIC)."""
        assert self._stream is not None
        error = self._stream.transfer.exception(within_s)
        return type(error).__name__, time.monotonic()

    def peer_is_lost(self, peer: str, within_s: float) -> float:
        """Waits until a peer is gone: when (CLOCK_MONOTONIC)."""
        until = time.monotonic() + within_s
        while any(info.name == peer for info in self.pool.peers.list()):
            if time.monotonic() > until:
                raise TimeoutError(f"{peer} is still there after {within_s} s")
            time.sleep(0.001)
        return time.monotonic()

    def sending_fails_at_once(self, peer: str) -> str:
        """Sends a block to a peer that is not there: the name of the error."""
        block = self.pool.alloc(1)
        try:
            self.pool.transfer(peer, block).wait(5.0)
        except kvpool.Error as error:
            return type(error).__name__
        finally:
            self.pool.free(block)
        return "nothing"

    def cached_tokens(self, prompt: Tokens) -> int:
        return self.pool.explain_match(prompt).matched_tokens

    def blocks(self) -> Blocks:
        """Raises if the pool does not add up."""
        hbm = self.pool.audit().hbm
        return Blocks(hbm.historical, hbm.active, hbm.reserved + hbm.lent + hbm.quarantined)

    def blocks_come_back(self, within_s: float) -> tuple[Blocks, float]:
        """Waits until no block is kept for peers: what there is then, and when (CLOCK_MONOTONIC).

        A connection ends a moment before its process does. What a dead peer could write into is kept for that moment.
        """
        until = time.monotonic() + within_s
        while (blocks := self.blocks()).for_peers and time.monotonic() < until:
            time.sleep(0.001)
        return blocks, time.monotonic()


def _reply(served: Served) -> Reply:
    total_s = served.ttft_s + served.decode_s
    return Reply(served.tokens, served.prompt_tokens, served.cached_tokens, served.ttft_s, total_s)
