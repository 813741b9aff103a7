"""KV events over ZMQ: a publisher, routers that know vLLM's format, and our own subscriber."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import BLOCK, prompt, refused, small_pool, store

import kvpool
from kvpool import DRAM, InstanceIndex
from kvpool.observe.events import BlockHasher, EventPublisher, EventSubscriber
from kvpool.observe.events.block_hash import short
from kvpool.observe.events.translate import Translator

DEADLINE = 60.0  # seconds until a test gives up; far above what anything here takes
QUICK = {"probe": 0.1, "timeout": 10.0}
END = b"\xff" * 8


@pytest.fixture
def pool():
    with small_pool(32, 32) as pool:
        yield pool


@pytest.fixture
def listen():
    """Makes routers, and closes them."""
    routers = []
    context = zmq.Context()
    yield lambda publisher: routers.append(Router(context, publisher)) or routers[-1]
    context.destroy(linger=0)


def eventually(holds):
    """Waits until it holds, and says what it was at last otherwise."""
    give_up = time.monotonic() + DEADLINE
    while not (found := holds()):
        assert time.monotonic() < give_up, found
        time.sleep(0.005)


def quick(pool, **options):
    return EventPublisher(pool, **({"interval": 0.005} | options))


def follow(index, publisher, instance=1, **options):
    return EventSubscriber(index, instance, publisher.endpoint, publisher.replay_endpoint, **(QUICK | options))


def agrees(index, pool, prompts, instance=1):
    """Whether the index says of the instance what its pool says itself."""

    def holds():
        index.audit()
        for tokens, namespace in prompts:
            held = pool.explain_match(tokens, namespace=namespace).matched_tokens
            if dict(index.match(tokens, namespace=namespace)).get(instance, 0) != held:
                return False
        return index.blocks(instance) == pool.stats().index_blocks

    return holds


class Router:
    """What subscribers of vLLM are: ZMQ and msgpack, nothing of kvpool. It keeps the hashes that are stored."""

    def __init__(self, context, publisher):
        self.socket = context.socket(zmq.SUB)
        self.socket.connect(publisher.endpoint)
        self.socket.subscribe(b"kv-events")
        self.replay_socket = context.socket(zmq.DEALER)
        self.replay_socket.connect(publisher.replay_endpoint)
        self.sequences = []
        self.events = []
        self.held = {}

    def wait_until_subscribed(self, pool):
        """A subscription takes effect some time after it was made: what is published before is not heard."""
        give_up = time.monotonic() + DEADLINE
        number = 1000
        while not self.socket.poll(20):
            assert time.monotonic() < give_up
            number += 1
            store(pool, prompt(1, number), evict=True)
            pool.delete(prompt(1, number))
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


def test_a_router_for_vllm_understands_what_is_published(pool, listen):
    with quick(pool, data_parallel_rank=3) as publisher:
        router = listen(publisher)
        router.wait_until_subscribed(pool)
        router.events.clear()
        store(pool, prompt(2), namespace="tenant")
        (event,), rank = router.receive()
        assert rank == 3
        assert event == {
            "type": "BlockStored",
            "block_hashes": names(prompt(2), "tenant"),
            "parent_block_hash": None,
            "token_ids": prompt(2).tolist(),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant"], ["tenant"]],
        }
        with pool.match(prompt(2), namespace="tenant") as hit:
            pool.insert(prompt(3), np.r_[hit.addrs, pool.alloc(1)], namespace="tenant").close()
        (event,), _ = router.receive()
        assert event["parent_block_hash"] == names(prompt(2), "tenant")[-1]
        assert event["block_hashes"] == names(prompt(3), "tenant")[2:]
        assert event["token_ids"] == prompt(3)[2 * BLOCK :].tolist()

        pool.swap_out(1)
        events, _ = router.receive()
        assert [(event["type"], event["medium"]) for event in events] == [
            ("BlockRemoved", "GPU"),
            ("BlockStored", "CPU"),
        ]
        assert [event["block_hashes"] for event in events] == [names(prompt(3), "tenant")[2:]] * 2

        pool.delete(prompt(3), namespace="tenant")
        router.receive_until(lambda: not router.held)
        assert router.sequences == list(range(router.sequences[0], router.sequences[0] + len(router.sequences)))


def test_a_block_of_another_instance_is_told_whatever_medium_its_address_names(pool):
    """insert() takes addresses of other instances as they are, and a name that is missing would end the publisher."""
    events = pool.subscribe()
    for medium in kvpool.Medium:
        pool.insert(prompt(1, 100 + medium), [9 << 50 | int(medium) << 47 | 1 << 24 | 5])
    told = [event.medium for batch in Translator(BLOCK).batches(events.drain()) for event in batch]
    assert told == ["GPU", "CPU", "DISK"]


def test_the_array_form_and_whole_digests_can_be_had(pool, listen):
    with quick(pool, encoding="array", hashes="bytes") as publisher:
        store(pool, prompt(2))
        router = listen(publisher)
        payloads = []
        eventually(lambda: len(payloads := [payload for _, payload in router.replay(0)]) == 2 and payloads)
        payloads = [payload for _, payload in router.replay(0)]
        assert msgpack.unpackb(payloads[0])[1] == [["AllBlocksCleared"]]
        (event,) = msgpack.unpackb(payloads[1])[1]
        digests = BlockHasher(BLOCK).chain(prompt(2))
        assert event == ["BlockStored", digests, None, prompt(2).tolist(), BLOCK, None, "GPU", None]


def test_what_was_missed_can_be_replayed_and_what_is_too_old_is_told_anew(pool, listen):
    with quick(pool, replay_bytes=2000) as publisher:
        router = listen(publisher)
        router.wait_until_subscribed(pool)
        store(pool, prompt(2, 1))
        router.receive()
        missed = router.sequences[-1]
        (again,) = router.replay(missed)
        assert again[0] == missed
        assert msgpack.unpackb(again[1])[1] == router.events[-1:]
        assert router.replay(missed + 1) == []
        for name in range(2, 40):
            store(pool, prompt(2, name), evict=True)
        last = set(names(prompt(2, 39)))  # however many batches they came in
        router.receive_until(lambda: last <= set(router.held))
        found = router.replay(missed)
        assert len({number for number, _ in found}) == 1  # all of it is true up to this number
        assert found[0][0] >= router.sequences[-1]
        fresh = listen(publisher)
        for _, payload in found:
            fresh.take(payload)
        assert fresh.events[0] == {"type": "AllBlocksCleared"}
        assert fresh.held == router.held
        assert len(fresh.held) == pool.stats().index_blocks


def test_a_long_prompt_is_told_in_pieces_of_bounded_size(listen):
    with small_pool(5000, 0) as pool, quick(pool) as publisher:
        router = listen(publisher)
        tokens = prompt(5000)
        store(pool, tokens)
        eventually(lambda: len(router.replay(0)) > 1)
        found = router.replay(0)
        for _, payload in found:
            assert len(payload) < 1 << 20
            router.take(payload)
        stored = [event for event in router.events if event["type"] == "BlockStored"]
        assert len(stored) > 1
        assert [name for event in stored for name in event["block_hashes"]] == names(tokens)
        assert [event["parent_block_hash"] for event in stored[1:]] == [
            event["block_hashes"][-1] for event in stored[:-1]
        ]
        index = InstanceIndex(BLOCK)
        with follow(index, publisher):
            eventually(agrees(index, pool, [(tokens, "")]))


def test_a_subscriber_begins_with_what_is_cached_and_follows(pool):
    prompts = [(prompt(3, 1), ""), (prompt(4, 2), "tenant"), (prompt(2, 3), "")]
    for tokens, namespace in prompts[:2]:
        store(pool, tokens, namespace=namespace)
    index = InstanceIndex(BLOCK)
    index.insert(prompt(3, 1), 2)  # what other instances hold stays
    with quick(pool) as publisher, follow(index, publisher) as subscriber:
        subscriber.wait_synced(DEADLINE)
        eventually(agrees(index, pool, prompts))
        store(pool, prompts[2][0])
        pool.swap_out(2)
        eventually(agrees(index, pool, prompts))
        pool.evict(2, medium=DRAM)
        pool.delete(prompts[1][0], namespace="tenant")
        eventually(agrees(index, pool, prompts))
        assert index.expire(before=10) == 3  # the other instance's; what events vouch for lasts
        assert agrees(index, pool, prompts)()
        assert (subscriber.gaps, subscriber.malformed, subscriber.left_out) == (0, 0, 0)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("idesx"), st.integers(0, 2), st.integers(1, 5)), min_size=10, max_size=40))
def test_the_index_ends_as_the_pool_does_however_much_was_dropped_and_replayed(steps):
    """Small buffers, so that some is replayed and some told anew. test_picture.py looks after every step."""
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(5, name), "") for name in range(3)]
    with small_pool(10, 6) as pool, quick(pool, replay_bytes=1000, capacity_tokens=60) as publisher:
        with follow(index, publisher) as subscriber:
            for what, name, blocks in steps:
                if what == "i":
                    store(pool, prompt(blocks, name), evict=True)
                elif what == "d":
                    pool.delete(prompt(blocks, name))
                elif what == "e":
                    pool.evict(blocks, medium=DRAM)
                elif what == "s":
                    pool.swap_out(1)
                else:
                    eventually(agrees(index, pool, prompts))
            eventually(agrees(index, pool, prompts))
            assert (subscriber.malformed, subscriber.left_out) == (0, 0)


def test_a_publisher_that_lost_events_tells_everything_anew(pool, listen):
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(3, name), "") for name in range(20)]
    with quick(pool, interval=60.0, capacity_tokens=8 * BLOCK) as publisher, follow(index, publisher) as subscriber:
        subscriber.wait_synced(DEADLINE)
        for tokens, _ in prompts:  # the publisher looks up only when the subscriber asks it
            store(pool, tokens, evict=True)
        eventually(agrees(index, pool, prompts))
        cleared = listen(publisher)
        for _, payload in cleared.replay(0):
            cleared.take(payload)
        assert sum(event["type"] == "AllBlocksCleared" for event in cleared.events) >= 1
        assert set(cleared.held) == {name for tokens, _ in prompts for name in names(tokens[: held(pool, tokens)])}


def held(pool, tokens):
    return pool.explain_match(tokens).matched_tokens


def test_a_publisher_that_is_started_again_is_not_taken_for_the_one_before(pool):
    """At the same address, with another pool behind it; also when as many batches were published as before."""
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(3, name), "") for name in range(4)]
    with quick(pool) as publisher:
        subscriber = follow(index, publisher)
        store(pool, prompts[0][0])
        store(pool, prompts[1][0])
        eventually(agrees(index, pool, prompts))
    with small_pool(32, 32) as other, subscriber:
        store(other, prompts[2][0])
        with bound_again(other, publisher):
            eventually(agrees(index, other, prompts))
            store(other, prompts[3][0])
            eventually(agrees(index, other, prompts))


def bound_again(pool, publisher):
    """A publisher at the addresses of one that was closed; the kernel may keep them for a moment."""
    give_up = time.monotonic() + DEADLINE
    while True:
        try:
            return quick(pool, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        except kvpool.StateError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


def test_a_subscriber_may_start_first(pool, tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.observe.events.subscriber._SYNC_S", 0.1)
    index = InstanceIndex(BLOCK)
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    store(pool, prompt(3))
    with EventSubscriber(index, 1, endpoint, replay, **QUICK) as subscriber:
        for timeout in (0.1, None):  # None is the default, and not for ever
            with pytest.raises(kvpool.DeadlineExceeded, match=r"instance 1 .* in 0\.1 s"):
                subscriber.wait_synced(timeout)
        with quick(pool, endpoint=endpoint, replay_endpoint=replay):
            subscriber.wait_synced(DEADLINE)
            eventually(agrees(index, pool, [(prompt(3), "")]))


@pytest.mark.parametrize(("replay_bytes", "gaps"), [(1 << 20, 0), (0, 1)], ids=["replayed", "told anew"])
def test_batches_that_were_dropped_on_the_way_are_made_up_for(pool, replay_bytes, gaps):
    """As they are for a subscriber that reads too slowly. The next batch that arrives tells of the gap."""
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(2, name), "") for name in range(8)]
    with quick(pool, replay_bytes=replay_bytes) as publisher, Stalled(publisher) as proxy:
        with EventSubscriber(
            index, 1, proxy.endpoint, publisher.replay_endpoint, probe=3600.0, timeout=DEADLINE
        ) as subscriber:
            store(pool, prompts[0][0])
            subscriber.wait_synced(DEADLINE)
            proxy.wait_until_heard(pool, index)
            known = subscriber.gaps
            proxy.drop = True
            for tokens, _ in prompts[1:]:
                before = proxy.dropped
                store(pool, tokens)
                proxy.wait_dropped(before + 1)
            pool.delete(prompts[0][0])
            proxy.wait_dropped(before + 2)
            proxy.drop = False
            pool.delete(prompts[1][0])
            eventually(agrees(index, pool, prompts))
            subscriber.wait_synced(DEADLINE)
            assert subscriber.gaps - known == gaps


def test_a_subscriber_that_does_not_read_keeps_nobody_waiting(pool, listen):
    """It may lose messages, by the high-water mark; the others get theirs, and the publisher keeps no more for it."""
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(1, name), "") for name in range(40)]
    with quick(pool, hwm=1, interval=0.001) as publisher:
        sleeper = listen(publisher)
        sleeper.wait_until_subscribed(pool)
        with follow(index, publisher):
            for tokens, _ in prompts:
                store(pool, tokens, evict=True)
            eventually(agrees(index, pool, prompts))
        for number, payload in sleeper.replay(0):
            assert number >= sleeper.sequences[-1]
            sleeper.take(payload)
        assert len(sleeper.held) == pool.stats().index_blocks


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


def test_the_last_word_that_is_lost_is_noticed_without_another(pool):
    """No later message tells of the gap: the subscriber asks after a moment of silence."""
    index = InstanceIndex(BLOCK)
    store(pool, prompt(2))
    with quick(pool) as publisher, Stalled(publisher) as proxy:
        with EventSubscriber(index, 1, proxy.endpoint, publisher.replay_endpoint, **QUICK) as subscriber:
            eventually(agrees(index, pool, [(prompt(2), "")]))
            proxy.drop = True
            pool.delete(prompt(2))
            eventually(lambda: not index.blocks(1))
            assert subscriber.gaps == 0


def test_a_closed_pool_is_not_kept_alive():
    index = InstanceIndex(BLOCK)
    pool = small_pool()
    store(pool, prompt(2))
    with quick(pool) as publisher, follow(index, publisher):
        eventually(agrees(index, pool, [(prompt(2), "")]))
        pool.close()
        eventually(lambda: not index.blocks(1))
        eventually(lambda: publisher.closed)


ENGINE = """
import sys, numpy as np, kvpool, kit
from kvpool.observe.events import EventPublisher
with kit.small_pool(32, 32) as pool, EventPublisher(pool, interval=0.01) as publisher:
    print(publisher.endpoint, publisher.replay_endpoint, flush=True)
    for line in sys.stdin:
        name, blocks = map(int, line.split())
        kit.store(pool, kit.prompt(blocks, name), namespace="t")
"""


def test_engines_in_processes_of_their_own_feed_one_router(listen):
    index = InstanceIndex(BLOCK)
    path = os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *filter(None, sys.path)])
    with contextlib.ExitStack() as stack:
        engines = []
        for instance, seed in ((1, "1"), (2, "2")):
            engine = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
            )  # fmt: skip
            stack.callback(engine.kill)
            stack.enter_context(engine)
            endpoint, replay = engine.stdout.readline().split()
            stack.enter_context(EventSubscriber(index, instance, endpoint, replay, **QUICK))
            engines.append((engine, endpoint, replay))
        for engine, blocks in ((engines[0][0], 4), (engines[1][0], 2)):
            engine.stdin.write(f"7 {blocks}\n")
            engine.stdin.flush()
        expected = [(1, 4 * BLOCK), (2, 2 * BLOCK)]
        eventually(lambda: index.match(prompt(5, 7), namespace="t") == expected)
        assert index.match(prompt(5, 7)) == []
        told = []
        for _, endpoint, replay in engines:
            router = listen(SimpleNamespace(endpoint=endpoint, replay_endpoint=replay))
            for _, payload in router.replay(0):
                router.take(payload)
            told.append(list(router.held))
        assert told[0] == names(prompt(4, 7), "t")
        assert told[1] == told[0][:2]
        for engine, _, _ in engines:
            engine.stdin.close()
            assert engine.wait(DEADLINE) == 0


def test_a_child_of_a_fork_may_close_what_is_its_parents(pool):
    with quick(pool) as publisher, follow(InstanceIndex(BLOCK), publisher) as subscriber:
        subscriber.wait_synced(DEADLINE)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                publisher.close()
                subscriber.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        store(pool, prompt(1))
        subscriber.wait_synced(DEADLINE)
        assert not publisher.closed


def test_what_cannot_be_published_is_refused(pool):
    with refused(pool, kvpool.ArgumentError, "nowhere"):
        EventPublisher(pool, "nowhere")
    with refused(pool, kvpool.ArgumentError, "interval"):
        EventPublisher(pool, interval=0)
    with refused(pool, kvpool.ArgumentError, "hashes"):
        EventPublisher(pool, hashes="hex")
    with refused(pool, kvpool.ArgumentError, "encoding"):
        EventPublisher(pool, encoding="json")
    with refused(pool, kvpool.ArgumentError, "hwm"):
        EventPublisher(pool, hwm=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused(pool, kvpool.StateError, "in use"):
            EventPublisher(pool, f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    gone = small_pool()
    gone.close()
    with pytest.raises(kvpool.ClosedError):
        EventPublisher(gone)


def test_what_cannot_be_followed_is_refused():
    index = InstanceIndex(BLOCK)
    with pytest.raises(kvpool.ArgumentError, match="16384"):
        EventSubscriber(index, 1 << 14, "tcp://127.0.0.1:1")
    with pytest.raises(kvpool.ArgumentError, match="nowhere"):
        EventSubscriber(index, 1, "nowhere")
    with pytest.raises(kvpool.ArgumentError, match="probe"):
        EventSubscriber(index, 1, "tcp://127.0.0.1:1", probe=0)
    with pytest.raises(kvpool.ArgumentError, match="block_tokens"):
        EventSubscriber(index, 1, "tcp://127.0.0.1:1", block_tokens=0)
