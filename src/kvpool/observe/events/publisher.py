"""A pool's KV events, published over ZMQ as vLLM publishes its own."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from kvpool.errors import ArgumentError, ClosedError, StateError
from kvpool.observe.events.replay import ReplayBuffer
from kvpool.observe.events.translate import Hashes, Translator
from kvpool.observe.events.wire import AllBlocksCleared, Encoding, EventBatch, WireEvent, encode
from kvpool.pool import Pool

try:
    import zmq
except ImportError as error:
    raise ImportError("kvpool.observe.events needs pyzmq: pip install 'kvpool[events]'") from error

__all__ = ["EventPublisher"]

_log = logging.getLogger("kvpool.events")

_REPLAY_END: Final = (-1).to_bytes(8, "big", signed=True)
_REPLAY_BATCHES: Final = 10_000
_LINGER_MS: Final = 500  # for the last word of a pool that is closed


class EventPublisher:
    """Publishes the changes of a pool's cached prompts, in a separate thread, until it or the pool is closed.

    A message has three frames: topic, sequence (8 bytes, big-endian), batch (see `kvpool.observe.events.wire`). A
    subscriber that has missed batches asks the replay endpoint, with vLLM's protocol: it sends an empty frame and the
    first missing sequence from a DEALER socket. It gets (empty, sequence, batch) for each, and at the end (empty, -1,
    empty). If the batches are no longer kept, or never were, it gets AllBlocksCleared and then everything that is
    cached, all with the sequence up to which that is true.

    Sequences of one publisher are consecutive. The first is random, so that subscribers recognise a restarted
    publisher. When the pool had to drop events, AllBlocksCleared and everything that is cached follow. When the pool is
    closed, a last AllBlocksCleared follows.

    The pool is as fast as with any subscription; the publisher's thread needs the GIL while it translates. Memory is
    bounded: `capacity_tokens` before the publisher, `replay_bytes` in it, and at most `hwm` messages of some 100 KiB
    for each subscriber that does not read, which then loses messages. The events contain the tokens of prompts, and any
    subscriber can read them; by default the endpoints are on this machine only. Thread-safe.

    Args:
        pool: The pool. It is kept alive until this is closed.
        endpoint: Where to publish: "tcp://127.0.0.1:*" for any free port, "ipc:///path", "tcp://HOST:PORT".
        replay_endpoint: Where subscribers ask for missed batches; None: nowhere.
        topic: First frame of every message.
        interval: Seconds between two checks for events.
        data_parallel_rank: Part of every batch.
        hashes: "int": the first 64 bits of a block's digest, the default of vLLM; "bytes": all 256.
        encoding: "map" as in vLLM since its change #42892; "array" for older subscribers.
        capacity_tokens: As in `Pool.subscribe`.
        replay_bytes: The most bytes of all batches that are kept for replay.
        hwm: Messages that wait for one subscriber.

    Raises:
        ArgumentError: A number or an endpoint is wrong.
        StateError: An endpoint is in use.
        ClosedError, ForkError: The pool is closed, or belongs to the parent process.
    """

    def __init__(
        self,
        pool: Pool,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str | None = "tcp://127.0.0.1:*",
        *,
        topic: str = "kv-events",
        interval: float = 0.05,
        data_parallel_rank: int = 0,
        hashes: Hashes = "int",
        encoding: Encoding = "map",
        capacity_tokens: int = 1 << 24,
        replay_bytes: int = 64 << 20,
        hwm: int = 1000,
    ) -> None:
        _check(interval=interval, hashes=hashes, encoding=encoding, replay_bytes=replay_bytes, hwm=hwm)
        self._pool = pool
        self._topic = topic.encode("utf-8")
        self._interval = interval
        self._rank = data_parallel_rank
        self._hashes: Hashes = hashes
        self._encoding: Encoding = encoding
        self._capacity_tokens = capacity_tokens
        self._translator = Translator(pool.kv_layout.block_tokens, hashes)
        self._replay = ReplayBuffer(secrets.randbits(30) << 32, replay_bytes, _REPLAY_BATCHES)
        self._process = os.getpid()
        self._lock = threading.Lock()  # the wake descriptor is not written to once it is closed
        self._stopping = False
        self._stream = pool.subscribe(capacity_tokens, include_cached=True)
        self._context = zmq.Context()
        try:
            self._publisher = self._bound(zmq.PUB, endpoint, hwm)
            self._router = (
                None if replay_endpoint is None else self._bound(zmq.ROUTER, replay_endpoint, _REPLAY_BATCHES)
            )
        except BaseException:
            self._context.destroy(linger=0)
            self._stream.close()
            raise
        self.endpoint = _address(self._publisher)
        self.replay_endpoint = None if self._router is None else _address(self._router)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvpool-events", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or its pool was."""
        return self._stopping

    def close(self) -> None:
        """Ends it, without publishing the remaining events. Idempotent. Does not close the pool."""
        if os.getpid() != self._process:
            return  # in a forked child there is no thread, and the sockets are the parent's
        with self._lock:
            if not self._stopping:
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def __enter__(self) -> EventPublisher:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that does not fit is an error, and not lost in silence
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise StateError(f"{endpoint} is in use") from error
            raise ArgumentError(f"cannot publish at {endpoint!r}: {error}") from error
        return socket

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            self._publish([AllBlocksCleared()])  # to subscribers of an earlier publisher at this address
            while not self._stopping:
                self._publish_news()
                if any(socket is self._router for socket, _ in poller.poll(max(1, int(self._interval * 1000)))):
                    self._answer_requests()
        except ClosedError:
            self._publish([AllBlocksCleared()])
            _log.info("the pool is closed: its KV events at %s end", self.endpoint, extra={"endpoint": self.endpoint})
        except Exception:
            _log.exception("publishing KV events at %s has failed", self.endpoint, extra={"endpoint": self.endpoint})
        finally:
            with self._lock:
                self._stopping = True
                os.close(self._wake)
            self._stream.close()
            self._publisher.close()
            if self._router is not None:
                self._router.close(linger=0)
            self._context.term()

    def _publish_news(self) -> None:
        events = self._stream.drain()
        if self._stream.lost:
            _log.warning(
                "%d events were lost before they were published: publishing the whole state again", self._stream.lost,
                extra={"endpoint": self.endpoint, "events": self._stream.lost},
            )  # fmt: skip
            self._stream.close()
            self._stream = self._pool.subscribe(self._capacity_tokens, include_cached=True)
            self._publish([AllBlocksCleared()])
            events = self._stream.drain()
        for batch in self._translator.batches(events):
            self._publish(batch)

    def _publish(self, events: Sequence[WireEvent]) -> None:
        payload = self._encoded(events)
        number = self._replay.append(payload)
        self._publisher.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _encoded(self, events: Sequence[WireEvent]) -> bytes:
        return encode(EventBatch(time.time(), events, self._rank), self._encoding)

    def _answer_requests(self) -> None:
        assert self._router is not None
        while not self._stopping:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                self._answer(frames[0], int.from_bytes(frames[2], "big"))
            else:
                _log.debug("an invalid request for replay: %d frames", len(frames))

    def _answer(self, client: bytes, start: int) -> None:
        """Answers a request. If the client does not read, the rest and the end are not sent, so it asks again."""
        assert self._router is not None
        self._publish_news()  # so that what is sent is true up to the last number
        try:
            if self._replay.covers(start):
                for number, payload in self._replay.since(start):
                    self._router.send_multipart([client, b"", number.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            else:
                self._send_everything(client)
            self._router.send_multipart([client, b"", _REPLAY_END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            _log.warning("a subscriber does not read what it asked for", extra={"endpoint": self.endpoint})

    def _send_everything(self, client: bytes) -> None:
        # What happens from here on is in this picture and is published again after it. That does no harm: an event says
        # what holds of a block, and a subscriber that applies some events twice ends in the same state.
        assert self._router is not None
        number = (self._replay.next - 1).to_bytes(8, "big")
        translator = Translator(self._pool.kv_layout.block_tokens, self._hashes)
        with self._pool.subscribe(include_cached=True) as everything:
            self._router.send_multipart([client, b"", number, self._encoded([AllBlocksCleared()])], zmq.NOBLOCK)
            for batch in translator.batches(everything.drain()):
                self._router.send_multipart([client, b"", number, self._encoded(batch)], zmq.NOBLOCK)


def _check(*, interval: float, hashes: str, encoding: str, replay_bytes: int, hwm: int) -> None:
    if not 0 < interval <= 60:
        raise ArgumentError(f"interval is {interval}; it must be above 0 and at most 60 seconds")
    if hashes not in ("int", "bytes"):
        raise ArgumentError(f"hashes is {hashes!r}; it must be 'int' or 'bytes'")
    if encoding not in ("map", "array"):
        raise ArgumentError(f"encoding is {encoding!r}; it must be 'map' or 'array'")
    if replay_bytes < 0 or hwm < 1:
        raise ArgumentError(f"replay_bytes is {replay_bytes} and hwm {hwm}; they must be at least 0 and 1")


def _address(socket: zmq.Socket[bytes]) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")
