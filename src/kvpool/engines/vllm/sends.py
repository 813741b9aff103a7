"""Sends of prompts to other engines, from vLLM's own blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.links import Links
from kvpool.engines.vllm.params import letter
from kvpool.engines.vllm.plans import SendPlan
from kvpool.errors import Busy, DeadlineExceeded, Error, PeerLost
from kvpool.pool import Pool
from kvpool.types import DRAM, KVLayout

__all__ = ["Sends", "left_until"]

_log = logging.getLogger("kvpool.engines.vllm")

_STEP_S: Final = 120.0  # by layer, a send also lasts as long as the step computes
_GRACE_S: Final = 0.2  # for which a step waits for a send that reads a block which the step writes
_AGAIN_S: Final = 0.01  # after which a receiver that is busy is tried again
_LOOK_S: Final = 1.0  # between two words in the log about a send that does not end


class _Send:
    """One transfer: not begun, under way, or over. It begins in the engine's thread, or in one that has connected.

    Until a time it is tried again when the receiver is busy: it is saving a block of the same prompt, say.
    """

    def __init__(self, plan: SendPlan, begin: Callable[[], _core.Transfer], until: float = 0.0) -> None:
        self.plan = plan
        self.blocks = frozenset(plan.blocks.tolist())
        self.transfer: _core.Transfer | None = None
        self.error: Exception | None = None
        self.dropped = False
        self.asked_about = True  # somebody may still want to know whether it has failed
        self.again_at: float | None = None  # it is to begin once more
        self._begin = begin
        self._until = until
        self._lock = threading.Lock()  # it begins or is dropped, never both

    @property
    def over(self) -> bool:
        """Whether nothing reads its blocks any more."""
        if self.transfer is not None:
            return self.transfer.done()
        return self.dropped or self.error is not None

    def begin(self, error: Error | None = None) -> None:
        """Begins, unless it was dropped. `error`: why it cannot."""
        with self._lock:
            if self.dropped:
                return
            if error is None:
                try:
                    self.transfer = self._begin()
                except Error as refused:
                    error = refused
            self.error = error

    def retry(self, begin: Callable[[], _core.Transfer], until: float) -> None:
        """It may be tried again in this way until then."""
        self._begin, self._until = begin, until

    def note_end(self) -> None:
        """REQUIRES: it is over. Keeps its error; or it is to begin again, and is not over, since that was Busy."""
        if self.error is None and self.transfer is not None:
            self.error = self.transfer.exception(0)
        now = time.monotonic()
        if isinstance(self.error, Busy) and not self.dropped and now + _AGAIN_S < self._until:
            self.transfer = self.error = None
            self.again_at = now + _AGAIN_S

    def give_up(self) -> None:
        """It shall not begin, if it has not yet, nor again."""
        self._until = 0.0
        self.drop()

    def drop(self) -> None:
        """It shall not begin, if it has not yet."""
        with self._lock:
            self.dropped = self.transfer is None and self.error is None

    def cancel(self) -> None:
        """It shall end soon."""
        if self.transfer is not None:
            self.transfer.cancel()


class _Layers:
    """The layers of one plan that are computed, and the stream that sends them, once it is open."""

    def __init__(self) -> None:
        self.computed: list[int] = []
        self.sent = 0
        self.stream: _core.TransferStream | None = None
        self.send: _Send | None = None


class Sends:
    """The sends of an engine. Not thread-safe: the engine's one thread calls.

    No method waits for a peer, but `await_writes` and `close`, whose waits are bounded.
    """

    def __init__(
        self,
        pool: Pool,
        addrs: npt.NDArray[np.uint64],
        is_member: Callable[[str], bool],
        timeout_s: float,
        stream: Callable[[], Any],
    ) -> None:
        """Of an engine.

        Args:
            pool: A member of a cluster.
            addrs: The addresses of vLLM's blocks.
            is_member: Whether a member of this name is up.
            timeout_s: Seconds for a send.
            stream: Returns the CUDA stream whose work writes the blocks, or None.
        """
        layout = pool.kv_layout
        assert isinstance(layout, KVLayout)
        self._pool = pool
        self._addrs = addrs
        self._is_member = is_member
        self._timeout_s = timeout_s
        self._stream = stream
        self._block_tokens = layout.block_tokens
        self._layers = layout.layers
        self._links = Links(pool, timeout_s)
        self._sends: list[_Send] = []
        self._open: dict[str, _Layers] = {}  # by the plans' ids: those of this step
        self._failed: set[str] = set()
        self._figures = Figures()

    @property
    def busy(self) -> bool:
        """Whether a send is under way, or is to begin."""
        self._reap()
        return bool(self._sends)

    def connect(self, peer: str) -> None:
        """There will be sends to this member."""
        if self._is_member(peer) and not self._links.connected(peer):
            self._links.connect(peer)

    def begin_step(self) -> None:
        """The previous step has ended. What it left open, because the model failed, is not sent."""
        for layers in self._open.values():
            if layers.send is not None:
                layers.send.cancel()
        self._open.clear()

    def layer(self, plans: Sequence[SendPlan], layer: int) -> None:
        """One more layer of all these is computed. Sends it, unless something is in the way."""
        for plan in plans:
            layers = self._open.setdefault(plan.id, _Layers())
            if layer in layers.computed:
                continue
            layers.computed.append(layer)
            if layers.send is None and not self._under_way(plan.id) and self._links.connected(plan.peer):
                self._begin_layers(plan, layers)
            self._send_computed(layers)

    def send(self, plan: SendPlan) -> None:
        """All layers are computed: sends what was not sent."""
        layers = self._open.pop(plan.id, None)
        if layers is None or layers.send is None:
            self._send_whole(plan)
            return
        layers.computed += [layer for layer in range(self._layers) if layer not in layers.computed]
        self._send_computed(layers)
        if layers.stream is not None:
            layers.stream.finish()
        stream, until = self._stream(), time.monotonic() + self._timeout_s
        layers.send.retry(lambda: self._transfer(plan, stream, until), until)

    def refuse(self, plan: SendPlan) -> None:
        """Its blocks are not what they should be: nothing is sent."""
        layers = self._open.pop(plan.id, None)
        if layers is not None and layers.send is not None:
            layers.send.cancel()
        if plan.last:
            self._failed.add(plan.id)

    def await_writes(self, written: set[int] | None) -> None:
        """Waits for the sends that read one of the blocks; None: any. What has not begun is given up."""
        waiting = [send for send in self._sends if written is None or not send.blocks.isdisjoint(written)]
        if not waiting:
            return
        began = time.perf_counter()
        for send in waiting:
            self._end(send)
        self._figures.add(send_wait_seconds=time.perf_counter() - began)
        self._reap()

    def failed(self, number: str) -> bool:
        """Whether a send of this id has failed, so far; or waits for a member that could not be reached before."""
        self._reap()
        return number in self._failed or any(
            send.plan.id == number and send.transfer is None and self._links.refused(send.plan.peer)
            for send in self._sends
        )

    def forget(self, number: str) -> None:
        """Nobody will ask about what was sent under this id until now."""
        self._failed.discard(number)
        for send in self._sends:
            if send.plan.id == number:
                send.asked_about = False

    def take_figures(self) -> Figures:
        """What happened since the last call."""
        self._reap()
        taken, self._figures = self._figures, Figures()
        return taken

    def close(self) -> None:
        """Ends all sends. REQUIRES: the pool is closed next, and then `join` is called."""
        self.begin_step()
        for send in self._sends:
            send.drop()
            send.cancel()
        for send in self._sends:
            self._end(send)
        self._sends.clear()

    def join(self) -> None:
        """Waits for the threads. REQUIRES: the pool is closed."""
        self._links.close()

    # ----

    def _under_way(self, number: str) -> bool:
        """Whether an earlier send of this prompt has not ended: what it sends the receiver does not skip yet."""
        return any(send.plan.id == number and not send.over for send in self._sends)

    def _send_whole(self, plan: SendPlan, asked_about: bool = True) -> None:
        self._reap()
        for earlier in self._sends:
            if earlier.plan.id == plan.id:
                earlier.drop()
        self._sends = [send for send in self._sends if not send.dropped]  # this one sends what those should have sent
        if not plan.last and self._under_way(plan.id):
            return  # the next one sends it, too
        stream, until = self._stream(), time.monotonic() + self._timeout_s
        send = _Send(plan, lambda: self._transfer(plan, stream, until), until)
        send.asked_about = asked_about
        self._sends.append(send)
        self._begin(send)

    def _begin(self, send: _Send) -> None:
        peer = send.plan.peer
        if not self._is_member(peer):
            send.begin(PeerLost(f"there is no engine {peer!r} in the cluster"))
        elif self._links.connected(peer):
            send.begin()
        else:
            self._links.connect(peer, send.begin)

    def _transfer(self, plan: SendPlan, stream: Any, until: float) -> _core.Transfer:
        """Begins, perhaps after some time for a connection."""
        return self._pool.transfer_with_insert(
            plan.peer, plan.tokens, self._addrs[plan.blocks], namespace=plan.namespace, medium=DRAM,
            private=letter(plan.id) if plan.last else None, stream=stream, timeout=left_until(until, plan.peer),
        )  # fmt: skip

    def _begin_layers(self, plan: SendPlan, layers: _Layers) -> None:
        def begin() -> _core.Transfer:
            layers.stream = self._pool.transfer_with_insert(
                plan.peer, plan.tokens, self._addrs[plan.blocks], namespace=plan.namespace, medium=DRAM,
                private=letter(plan.id) if plan.last else None, layerwise=True,
                timeout=self._timeout_s + _STEP_S,
            )  # fmt: skip
            return layers.stream.transfer

        layers.send = _Send(plan, begin)
        self._sends.append(layers.send)
        layers.send.begin()

    def _send_computed(self, layers: _Layers) -> None:
        if layers.stream is None:
            return
        try:
            for layer in layers.computed[layers.sent :]:
                layers.stream.send_layer(layer, stream=self._stream())
                layers.sent += 1
        except Error:  # with which the transfer has ended, or ends now
            layers.stream.transfer.cancel()
            layers.stream = None

    def _end(self, send: _Send) -> None:
        """Returns when nothing reads the send's blocks: soon, if the receiver works, and then in any case."""
        send.give_up()
        if send.transfer is None:
            return
        began = time.perf_counter()
        wait_s = _GRACE_S
        while not send.transfer.done():
            try:
                send.transfer.exception(wait_s)
            except TimeoutError:
                if wait_s == _LOOK_S:
                    _log.warning("a send to %s does not end for %.1f s", send.plan.peer, time.perf_counter() - began)
                send.cancel()
                wait_s = _LOOK_S

    def _reap(self) -> None:
        """Counts the sends that are over, and begins again those that are to."""
        left = []
        for send in self._sends:
            if send.over:
                send.note_end()
            if not send.over:
                left.append(send)
                if send.again_at is not None and send.again_at <= time.monotonic():
                    send.again_at = None
                    self._begin(send)
                continue
            if send.error is not None or send.dropped:
                self._send_failed(send)
            elif send.transfer is not None:
                stats = send.transfer.stats
                tokens = (stats.blocks - stats.skipped_blocks) * self._block_tokens
                self._figures.add(sends=1, sent_tokens=tokens)
        self._sends = left

    def _send_failed(self, send: _Send) -> None:
        plan = send.plan
        if not send.dropped:
            self._figures.add(failed_sends=1)
            _log.warning("a prompt of %d tokens was not sent to %s: %s", len(plan.tokens), plan.peer, send.error)
        if plan.last:
            if send.asked_about:
                self._failed.add(plan.id)
            self._tell_failure(plan)

    def _tell_failure(self, plan: SendPlan) -> None:
        """Tells the receiver that the prompt does not come: its request may wait already."""
        if not self._links.connected(plan.peer):
            return
        try:
            self._pool.transfer(
                plan.peer, [], private=letter(plan.id, complete=False), priority="decode", timeout=self._timeout_s
            )
        except Error as error:
            _log.debug("%s is not told of a failed send: %s", plan.peer, error)


def left_until(until: float, peer: str) -> float:
    """The seconds that are left for a send. Raises DeadlineExceeded if its time is over."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded(f"the connection to {peer} took too long")
    return left_s
