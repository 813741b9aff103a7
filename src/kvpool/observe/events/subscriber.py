"""The other end: a router's tree, fed by the KV events of a publisher."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from kvpool.errors import ArgumentError, DeadlineExceeded, ProtocolError
from kvpool.index import InstanceIndex, RemovedEvent, StoredEvent
from kvpool.observe.events.picture import BLOCKS_MAX, FollowsEvents, Picture
from kvpool.observe.events.wire import decode

try:
    import zmq

    from kvpool.observe.events.connection import ConnectionWatch
except ImportError as error:
    raise ImportError("kvpool.observe.events needs pyzmq: pip install 'kvpool[events]'") from error

__all__ = ["EventSubscriber", "FollowsEvents"]

_log = logging.getLogger("kvpool.events")

_REPLAY_END: Final = (1 << 64) - 1  # -1 in 64 bits
_NUMBERS: Final = 1 << 63  # of batches are below it: publishers count in signed numbers
_MESSAGES_WAITING_MAX: Final = 64  # beyond it they wait at the publisher, which drops them in the end: a gap
_MESSAGE_BYTES_MAX: Final = 32 << 20  # ZMQ gives up the connection for good above it
_BATCH_BYTES_MAX: Final = 16 << 20  # some two million tokens: seconds to read, half a minute on a busy machine
_REPLAY_SECONDS_MAX: Final = 120.0
_UNSYNCED_WAIT: Final = 0.05  # seconds between two checks for a publisher
_TELL_S: Final = 0.1  # between two calls of the picture's `catch_up` while messages never pause
_SYNC_S: Final = 30.0  # default timeout of wait_synced


class EventSubscriber:
    """Feeds a router's tree with the KV events of one instance, in a separate thread, until it is closed.

    The publisher is an `EventPublisher` of kvpool, or an engine that publishes vLLM's format with tokens. It may start
    later, or be restarted. The subscriber begins by asking for everything that is cached. It fills a gap in the
    sequence from the replay endpoint. If that is not possible, or after a restart of the publisher, the tree forgets
    the instance and learns it again: from kvpool all at once, from others with their next events. It also forgets an
    instance whose publisher has been gone for `timeout`. Thread-safe.

    Args:
        index: An InstanceIndex, or anything with ``apply(instance, event)`` and ``forget(instance)``, such as the
            PromptTree of kvpool.policy.routing. Its entries do not expire.
        instance: The instance id of the publisher in the index, from 0 to 16383.
        endpoint: The publisher's endpoint.
        replay_endpoint: The publisher's endpoint for missed batches; None: do not ask.
        block_tokens: Tokens a block; by default that of the index.
        topic: Prefix of the first frame; ignores other messages.
        probe: Seconds of silence after which it asks for missed batches, so that it also notices a loss at the end of a
            burst.
        timeout: Seconds without any answer after which a request for replay has failed. It is repeated after `probe`.
            Also how long the publisher may be disconnected before the instance is forgotten.
        blocks_max: The most blocks of the instance that are known; beyond it those stored longest ago are dropped.
        rank: The publisher's data-parallel rank: batches that name another one are ignored. None: any.
        on_adapter: Is told the name of the LoRA adapter of each event that names one, in the subscriber's thread.

    Raises:
        ArgumentError: A number or an endpoint is wrong.
        OSError, RuntimeError: The process has no file or thread left.
    """

    def __init__(
        self,
        index: InstanceIndex | FollowsEvents,
        instance: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        block_tokens: int | None = None,
        topic: str = "",
        probe: float = 1.0,
        timeout: float = 5.0,
        blocks_max: int = BLOCKS_MAX,
        rank: int | None = None,
        on_adapter: Callable[[str], object] | None = None,
    ) -> None:
        if not 0 <= instance < 1 << 14:
            raise ArgumentError(f"an instance is a number from 0 to 16383, not {instance}", instance=instance)
        if not (0 < probe <= 3600 and 0 < timeout <= 3600):
            raise ArgumentError(
                f"probe is {probe} and timeout {timeout}; both must be above 0 and at most 3600 seconds"
            )
        size = getattr(index, "block_tokens", None) if block_tokens is None else block_tokens
        if type(size) is not int or size < 1:
            raise ArgumentError(f"block_tokens is {size}, and the index does not say; give it")
        if type(blocks_max) is not int or blocks_max < 1:
            raise ArgumentError(f"blocks_max is {blocks_max}; it must be at least 1")
        self.instance = instance
        self.endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._rank = rank
        self._of_others = 0
        self._probe = probe
        self._asked_at = -math.inf  # by the monotonic clock
        self._told_at = -math.inf
        self._timeout = timeout
        self._picture = Picture(
            _Lasting(index) if isinstance(index, InstanceIndex) else index, instance, size, blocks_max, on_adapter
        )
        self._next: int | None = None  # the number of the batch that is expected
        self._last_live: int | None = None  # that of the last one that was published to us
        self._replayed = False  # the publisher has answered a request for replay since it was last lost
        self._lost = False  # it is another one perhaps: its connection for replays was closed
        self._changed = threading.Condition()
        self._synced = False
        self._gaps = 0
        self._malformed = 0
        self._process = os.getpid()
        self._stopping = False
        self._failed = False
        self._context = zmq.Context()
        try:
            self._subscription, self._connection = self._subscribed(endpoint)
            self._subscription.setsockopt(zmq.SUBSCRIBE, topic.encode("utf-8"))
            self._replay = None if replay_endpoint is None else self._asking(replay_endpoint)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name="kvpool-follow", daemon=True)
            try:
                self._thread.start()
            except BaseException:
                os.close(self._wake)
                raise
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def synced(self) -> bool:
        """Whether the tree has everything that the publisher is known to have published, as far as it could be read.

        False while the publisher is gone; without a replay endpoint until its next message, too.
        """
        return self._synced

    @property
    def failed(self) -> bool:
        """Whether an error has ended it: nothing is followed any more, and the tree keeps what it had."""
        return self._failed

    @property
    def gaps(self) -> int:
        """How often the instance was forgotten, because no replay could fill a gap."""
        return self._gaps

    @property
    def malformed(self) -> int:
        """Ignored messages that were no batch of KV events."""
        return self._malformed

    @property
    def left_out(self) -> int:
        """Ignored blocks: of another size, or of layers of another kind."""
        return self._picture.left_out

    @property
    def dropped(self) -> int:
        """Blocks that were dropped because the instance has more than `blocks_max`."""
        return self._picture.dropped

    @property
    def of_others(self) -> int:
        """Ignored batches of other data-parallel ranks: the endpoint is another rank's."""
        return self._of_others

    def wait_synced(self, timeout: float | None = None) -> None:
        """Waits until it is `synced`.

        Args:
            timeout: Seconds; None: 30.

        Raises:
            DeadlineExceeded: It is not synced after that time.
        """
        timeout_s = _SYNC_S if timeout is None else timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self._synced, timeout_s):
                raise DeadlineExceeded(
                    f"no picture of instance {self.instance} from {self.endpoint} in {timeout_s:g} s"
                )

    def close(self) -> None:
        """Ends it; the tree keeps its content. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._changed:
            if not self._stopping:  # else its thread has closed the file
                self._stopping = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def __enter__(self) -> EventSubscriber:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _subscribed(self, endpoint: str) -> tuple[zmq.Socket[bytes], ConnectionWatch]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        watch = ConnectionWatch(socket)
        socket.setsockopt(zmq.RCVHWM, _MESSAGES_WAITING_MAX)
        self._connect(socket, endpoint)
        return socket, watch

    def _asking(self, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        # All of a replay is read, however long it takes to apply; what is not read yet waits in the publisher.
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a request does not wait: it fails while there is no publisher
        self._connect(socket, endpoint)
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        if "[" in endpoint:  # an address of IPv6; names are of IPv4, on which publishers listen if not told otherwise
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ArgumentError(f"cannot subscribe to {endpoint!r}: {error}") from error

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._subscription, zmq.POLLIN)
        poller.register(self._connection.socket, zmq.POLLIN)
        try:
            while not self._stopping:
                soon = not (self._synced and self._picture.is_caught_up)
                wait = min(self._probe, _UNSYNCED_WAIT) if soon else self._probe
                ready = [socket for socket, _ in poller.poll(max(1, int(wait * 1000)))]
                if not ready or time.monotonic() - self._told_at >= _TELL_S:
                    self._picture.catch_up()
                    self._told_at = time.monotonic()
                self._look_at_connection()
                if self._subscription in ready:
                    self._take(self._subscription.recv_multipart())
                if self._may_ask() and not (ready and self._synced):
                    self._catch_up()
        except Exception:
            _log.exception("following %s has failed", self.endpoint, extra=self._fields())
            self._failed = True
            self._set_synced(False)
        finally:
            with self._changed:
                self._stopping = True
                os.close(self._wake)
            self._context.destroy(linger=0)

    def _look_at_connection(self) -> None:
        """Forgets an instance whose publisher is gone: what it has cached meanwhile nobody tells."""
        if self._connection.take():
            self._set_synced(False)
        if self._connection.lost_s >= self._timeout:
            self._connection.forgotten()
            self._start_over("the publisher is gone")

    def _take(self, frames: list[bytes]) -> None:
        """A message of the publisher."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self._malformed += 1
            return
        number = int.from_bytes(frames[1], "big")
        if number >= _NUMBERS:
            self._malformed += 1
            return
        again = self._last_live is not None and number <= self._last_live
        self._last_live = number
        if again:
            self._start_over("the publisher was started again")
        if (number != self._next or self._lost) and (self._synced or self._may_ask()):
            self._catch_up()
        if self._next is not None and number < self._next and not self._lost:
            return  # a replay had it already
        if self._next is not None and (number != self._next or self._lost):
            self._start_over("batches were missed, and could not be replayed")
        complete = number == self._next or self._replay is None
        self._apply(frames[2])
        self._next = number + 1
        self._set_synced(complete)

    def _may_ask(self) -> bool:
        """Whether the last question is long enough ago: one that fails takes time, in which messages wait."""
        return time.monotonic() - self._asked_at >= self._probe

    def _catch_up(self) -> None:
        """Asks for everything from the batch that is expected; for all there is, when nothing is known for certain."""
        if self._replay is None:
            return
        start = self._next if self._synced and self._next is not None else 0
        if self._replay_from(start):
            self._set_synced(True)

    def _replay_from(self, start: int) -> bool:
        """Applies what is replayed. False when the answer did not come to its end."""
        assert self._replay is not None
        try:
            self._replay.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
        except zmq.Again:  # there is no publisher
            self._lost, self._replayed = self._lost or self._replayed, False
            self._set_synced(False)
            return False
        self._asked_at = time.monotonic()
        first = True
        give_up = time.monotonic() + _REPLAY_SECONDS_MAX
        while not self._stopping and time.monotonic() < give_up and self._replay.poll(int(self._timeout * 1000)):
            frames = self._replay.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != 8:
                break
            number = int.from_bytes(frames[-2], "big")
            end = number == _REPLAY_END
            if first and (not start or (number != start and not end)):
                self._start_over("the missed batches are no longer kept" if start else None)
            if end:
                self._replayed, self._lost = True, False
                return True
            if number >= _NUMBERS:
                break
            self._apply(frames[-1])
            self._next = number + 1
            first = False
        self._renew_replay()
        return False

    def _renew_replay(self) -> None:
        """A new socket, on which no rest of an answer arrives that was given up."""
        assert self._replay is not None
        assert self._replay_endpoint is not None
        self._replay.close()
        self._replay = self._asking(self._replay_endpoint)
        self._set_synced(False)

    def _start_over(self, why: str | None) -> None:
        if why is not None and self._next is not None:
            self._gaps += 1
            _log.warning("forgetting what instance %d holds: %s", self.instance, why, extra=self._fields())
        self._next = None
        self._lost = False
        self._set_synced(False)
        self._picture.clear()

    def _apply(self, payload: bytes) -> None:
        try:
            if len(payload) > _BATCH_BYTES_MAX:
                raise ProtocolError(f"a batch of {len(payload)} bytes; at most {_BATCH_BYTES_MAX} are read")
            batch = decode(payload)
        except ProtocolError as error:
            self._malformed += 1
            _log.warning("instance %d sends %s", self.instance, error, extra=self._fields())
            if not self._picture.is_empty:  # what it said may have been of any of these
                self._start_over("a batch could not be read")
            return
        if self._rank is not None and batch.data_parallel_rank not in (None, self._rank):
            self._of_others += 1
        else:
            self._picture.apply(batch.events)

    def _set_synced(self, synced: bool) -> None:
        with self._changed:
            self._synced = synced
            self._changed.notify_all()

    def _fields(self) -> dict[str, object]:
        return {"instance": self.instance, "endpoint": self.endpoint}


class _Lasting:
    """An InstanceIndex with entries that do not expire, because every event is followed."""

    def __init__(self, index: InstanceIndex) -> None:
        self.apply: Callable[[int, StoredEvent | RemovedEvent], None] = lambda instance, event: index.apply(
            instance, event, lasting=True
        )
        self.forget = index.remove_instance
