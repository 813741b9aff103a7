"""KV events over ZMQ: what a publisher sends, for routers that know vLLM's format."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import zmq
from kit import BLOCK, prompt, refused, small_pool, store
from observe.event_kit import DEADLINE, QUICK, Router, agrees, eventually, follow, names, quick

import kvpool
from kvpool import InstanceIndex
from kvpool.observe.events import BlockHasher, EventPublisher, EventSubscriber
from kvpool.observe.events.translate import Translator


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


def test_a_block_of_another_instance_is_reported_whatever_medium_its_address_names(pool):
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


def test_missed_batches_can_be_replayed_and_too_old_ones_lead_to_a_snapshot(pool, listen):
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


def test_a_long_prompt_is_published_in_pieces_of_bounded_size(listen):
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


def held(pool, tokens):
    return pool.explain_match(tokens).matched_tokens


def test_a_publisher_that_lost_events_publishes_a_snapshot(pool, listen):
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


def test_a_subscriber_that_does_not_read_delays_no_one(pool, listen):
    """It may lose messages, by the high-water mark; the others get theirs, and the publisher keeps no more for it."""
    index = InstanceIndex(BLOCK)
    prompts = [(prompt(1, name), "") for name in range(40)]
    with quick(pool, hwm=1, interval=0.001) as publisher:
        sleeper = listen(publisher)
        sleeper.wait_until_subscribed(pool, lossy=True)
        with follow(index, publisher):
            for tokens, _ in prompts:
                store(pool, tokens, evict=True)
            eventually(agrees(index, pool, prompts))
        for number, payload in sleeper.replay(0):
            assert number >= sleeper.sequences[-1]
            sleeper.take(payload)
        assert len(sleeper.held) == pool.stats().index_blocks


ENGINE = """
import sys, numpy as np, kvpool, kit
from kvpool.observe.events import EventPublisher
with kit.small_pool(32, 32) as pool, EventPublisher(pool, interval=0.01) as publisher:
    print(publisher.endpoint, publisher.replay_endpoint, flush=True)
    for line in sys.stdin:
        name, blocks = map(int, line.split())
        kit.store(pool, kit.prompt(blocks, name), namespace="t")
"""


def test_engines_in_separate_processes_feed_one_router(listen):
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


def test_events_that_cannot_be_published_are_refused(pool):
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
