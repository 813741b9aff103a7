"""Shared by the tests of KV events over ZMQ: quick publishers, a router as for vLLM, a link that loses messages."""

from __future__ import annotations

import itertools
import threading
import time

import msgpack
import zmq
from kit import BLOCK, prompt, store

from kvpool.observe.events import BlockHasher, EventPublisher, EventSubscriber
from kvpool.observe.events.block_hash import short

DEADLINE = 60.0  # seconds until a test gives up; far above what anything here takes
QUICK = {"probe": 0.1, "timeout": 10.0}
END = b"\xff" * 8


def eventually(holds):
    """Waits until it holds, and otherwise reports its last value."""
    give_up = time.monotonic() + DEADLINE
    while not (found := holds()):
        assert time.monotonic() < give_up, found
        time.sleep(0.005)


def quick(pool, **options):
    return EventPublisher(pool, **({"interval": 0.005} | options))


def follow(index, publisher, instance=1, **options):
    return EventSubscriber(index, instance, publisher.endpoint, publisher.replay_endpoint, **(QUICK | options))


def agrees(index, pool, prompts, instance=1):
    """Whether the index agrees with the instance's pool."""

    def holds():
        index.audit()
        for tokens, namespace in prompts:
            held = pool.explain_match(tokens, namespace=namespace).matched_tokens
            if dict(index.match(tokens, namespace=namespace)).get(instance, 0) != held:
                return False
        return index.blocks(instance) == pool.stats().index_blocks

    return holds


class Router:
    """A subscriber as for vLLM: ZMQ and msgpack, nothing of kvpool. It keeps the stored hashes."""

    def __init__(self, context, publisher):
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe(b"kv-events")
        self.replay_socket = context.socket(zmq.DEALER)
        self.replay_socket.connect(publisher.replay_endpoint)
        self.sequences = []
        self.events = []
        self.held = {}

    def wait_until_subscribed(self, pool, *, lossy=False):
        """A subscription takes effect some time after it was made: what is published before does not arrive.

        `lossy`: what is published at once behind it may not arrive either.
        """
        give_up = time.monotonic() + DEADLINE
        number = 1000
        while not self.socket.poll(20):
            assert time.monotonic() < give_up
            number += 1
            store(pool, prompt(1, number), evict=True)
            pool.delete(prompt(1, number))
        if lossy:
            self.receive()
            return
        store(pool, prompt(1, 999), evict=True)  # a last word, behind which nothing comes
        (last,) = names(prompt(1, 999))
        self.receive_until(lambda: last in self.held)
        pool.delete(prompt(1, 999))
        self.receive_until(lambda: last not in self.held)

    def receive(self):
        assert self.socket.poll(int(DEADLINE * 1000))
        topic, sequence, payload = self.socket.recv_multipart()
        assert topic == b"kv-events"
        self.sequences.append(int.from_bytes(sequence, "big"))
        return self.take(payload)

    def take(self, payload):
        ts, events, rank = msgpack.unpackb(payload)
        assert abs(ts - time.time()) < 3600
        for event in events:
            media = self.held
            if event["type"] == "AllBlocksCleared":
                media.clear()
            elif event["type"] == "BlockStored":
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                for name in event["block_hashes"]:
                    media.setdefault(name, set()).add(event["medium"])
            else:
                for name in event["block_hashes"]:
                    media.get(name, set()).discard(event["medium"])
                    if not media.get(name):
                        media.pop(name, None)
        self.events += events
        return events, rank

    def receive_until(self, holds):
        while not holds():
            self.receive()

    def replay(self, start):
        self.replay_socket.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while True:
            assert self.replay_socket.poll(int(DEADLINE * 1000))
            empty, sequence, payload = self.replay_socket.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(sequence, "big"), payload))


def names(tokens, namespace=""):
    return [short(digest) for digest in BlockHasher(BLOCK).chain(tokens, namespace)]


class Stalled:
    """Stands between a publisher and a subscriber, and may drop what is published."""

    def __init__(self, publisher):
        self.drop = False
        self.dropped = 0
        self.passed = 0
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.connect(publisher.endpoint)
        self._in.subscribe(b"")
        self._out = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._out.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.is_set():
            if self._in.poll(20):
                frames = self._in.recv_multipart()
                if self.drop:
                    self.dropped += 1
                else:
                    self._out.send_multipart(frames)
                    self.passed += 1
        self._context.destroy(linger=0)

    def wait_dropped(self, n):
        eventually(lambda: self.dropped >= n)

    def wait_until_heard(self, pool, index):
        """A subscription takes effect some time after it was made: both here and at the other end."""
        numbers = itertools.count(500)

        def heard():
            passed = self.passed
            store(pool, prompt(1, next(numbers)), evict=True)
            time.sleep(0.02)
            return self.passed > passed and index.blocks(1) == pool.stats().index_blocks

        eventually(heard)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
