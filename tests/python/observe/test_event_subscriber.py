"""KV events over ZMQ: our own subscriber, which keeps an index in step with a pool."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import BLOCK, prompt, small_pool, store
from observe.event_kit import DEADLINE, END, QUICK, Stalled, agrees, eventually, follow, quick

import kvpool
import kvpool.observe.events.subscriber as subscriber_module
from kvpool import DRAM, InstanceIndex
from kvpool.observe.events import BlockStored, EventBatch, EventSubscriber, encode


@pytest.fixture
def pool():
    with small_pool(32, 32) as pool:
        yield pool


def test_a_subscriber_begins_with_what_is_cached_and_follows(pool):
    prompts = [(prompt(3, 1), ""), (prompt(4, 2), "tenant"), (prompt(2, 3), "")]
    for tokens, namespace in prompts[:2]:
        store(pool, tokens, namespace=namespace)
    index = InstanceIndex(BLOCK)
    index.insert(prompt(3, 1), 2)  # pages of other instances stay
    with quick(pool) as publisher, follow(index, publisher) as subscriber:
        subscriber.wait_synced(DEADLINE)
        eventually(agrees(index, pool, prompts))
        store(pool, prompts[2][0])
        pool.swap_out(2)
        eventually(agrees(index, pool, prompts))
        pool.evict(2, medium=DRAM)
        pool.delete(prompts[1][0], namespace="tenant")
        eventually(agrees(index, pool, prompts))
        assert index.expire(before=10) == 3  # the other instance's; pages from events last
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


def test_a_restarted_publisher_is_not_taken_for_the_earlier_one(pool):
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
        for timeout in (0.1, None):  # None is the default, and not forever
            with pytest.raises(kvpool.DeadlineExceeded, match=r"instance 1 .* in 0\.1 s"):
                subscriber.wait_synced(timeout)
        with quick(pool, endpoint=endpoint, replay_endpoint=replay):
            subscriber.wait_synced(DEADLINE)
            eventually(agrees(index, pool, [(prompt(3), "")]))


@pytest.mark.parametrize(("replay_bytes", "gaps"), [(1 << 20, 0), (0, 1)], ids=["replayed", "told anew"])
def test_dropped_batches_are_replayed(pool, replay_bytes, gaps):
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


def test_the_loss_of_the_last_batch_is_noticed_without_another(pool):
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


class Numbered:
    """A publisher as vLLM's: its numbers begin at 0, and it repeats what it has published."""

    def __init__(self, endpoint, replay_endpoint=None):
        self.kept = []
        self._context = zmq.Context()
        self._out = self._bound(zmq.XPUB, endpoint)
        self._asked = None if replay_endpoint is None else self._bound(zmq.ROUTER, replay_endpoint)

    def _bound(self, kind, endpoint):
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)
        socket.bind(endpoint)
        return socket

    def subscribed(self):
        """Waits for a subscription: what was published before it does not arrive."""
        return self._out.poll(DEADLINE * 1000) and self._out.recv() == b"\x01"

    def publish(self, payload, number=None):
        number = len(self.kept) if number is None else number
        self.kept.append(payload)
        self._out.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def answer(self):
        """Answers the next question."""
        assert self._asked.poll(DEADLINE * 1000)
        who, _, start = self._asked.recv_multipart()
        for number, payload in enumerate(self.kept):
            if number >= int.from_bytes(start, "big"):
                self._asked.send_multipart([who, b"", number.to_bytes(8, "big"), payload])
        self._asked.send_multipart([who, b"", END, b""])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)


def batch(*names):
    """The blocks of these names are stored, each at the start of a prompt."""
    return encode(EventBatch(0.0, [BlockStored([each], None, prompt(1, each), BLOCK) for each in names]))


def heard(publisher, index):
    """Publishes a block once the subscription is there, and waits for it. Only once: a number that comes again is a
    restart to the subscriber."""
    assert publisher.subscribed()
    publisher.publish(batch(99), 0)
    eventually(lambda: index.blocks(1))


def test_the_end_of_a_long_prompt_is_told_though_messages_never_pause(tmp_path, monkeypatch):
    """It is less than a 32nd of its prompt, so it waits."""
    monkeypatch.setattr(subscriber_module, "_UNSYNCED_WAIT", 3600.0)  # no pause is long enough
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    blocks = 2001
    tokens = prompt(blocks, 7)
    with EventSubscriber(index, 1, endpoint, probe=3600), Numbered(endpoint) as publisher:
        heard(publisher, index)
        numbers = iter(range(1, 1 << 30))

        def told_of(first, end):
            names = [1000 + at for at in range(first, end)]
            event = BlockStored(names, 999 + first if first else None, tokens[first * BLOCK : end * BLOCK], BLOCK)
            publisher.publish(encode(EventBatch(0.0, [event])), next(numbers))

        told_of(0, blocks - 1)
        told_of(blocks - 1, blocks)

        def holds():
            publisher.publish(batch(99), next(numbers))
            return dict(index.match(tokens)).get(1) == blocks * BLOCK

        eventually(holds)


def test_a_publisher_that_is_gone_is_noticed_and_another_one_in_its_place_is_not_taken_for_it(tmp_path):
    index, addresses = InstanceIndex(BLOCK), (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    with EventSubscriber(index, 1, *addresses, **QUICK) as subscriber:
        with Numbered(*addresses) as first:
            first.kept = [batch(1), batch(2)]
            first.answer()
            subscriber.wait_synced(DEADLINE)
            assert index.blocks(1) == 2
        eventually(lambda: not subscriber.synced)
        with Numbered(*addresses) as second:  # which has got further meanwhile
            second.kept = [batch(each) for each in range(3, 8)]
            second.answer()
            subscriber.wait_synced(DEADLINE)
            assert index.blocks(1) == 5
            assert not index.match(prompt(1, 1))


def test_a_batch_that_cannot_be_read_may_have_removed_anything(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, **QUICK) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        number = 1
        publisher.publish(b"odd", number)
        eventually(lambda: subscriber.malformed == 1)
        eventually(lambda: index.blocks(1) == 0)  # which is cleared after it was counted
        publisher.publish(batch(3), number + 1)
        eventually(lambda: index.blocks(1) == 1)


def test_a_batch_that_would_take_long_to_read_is_not_read(tmp_path, caplog):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, **QUICK) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        publisher.publish(bytes(17 << 20), 1)
        publisher.publish(batch(3, 4), 2)
        eventually(lambda: index.match(prompt(1, 4)))  # the last one of the batch
        assert (subscriber.malformed, index.blocks(1)) == (1, 2)
        assert f"a batch of {17 << 20} bytes" in caplog.text


def test_numbers_beyond_63_bits_are_ignored(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, **QUICK) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        for number in (1 << 63, (1 << 64) - 1):
            publisher.publish(batch(3), number)
        eventually(lambda: subscriber.malformed == 2)
        publisher.publish(batch(4), 1)
        eventually(lambda: index.blocks(1) == 2)
        assert not subscriber.failed


def test_a_publisher_at_an_address_of_ipv6():
    index = InstanceIndex(BLOCK)
    try:
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::1", 0))
            endpoint = f"tcp://[::1]:{free.getsockname()[1]}"
    except OSError:
        pytest.skip("no IPv6 here")
    with EventSubscriber(index, 1, endpoint, **QUICK), Numbered(endpoint) as publisher:
        heard(publisher, index)


def test_an_error_ends_it_and_says_so(tmp_path, monkeypatch):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, **QUICK) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        eventually(lambda: subscriber.synced)
        monkeypatch.setattr("kvpool.observe.events.subscriber.decode", None)
        publisher.publish(batch(3), 1)
        eventually(lambda: subscriber.failed)
        eventually(lambda: not subscriber.synced)


def test_a_subscriber_that_cannot_begin_leaves_no_file_open(monkeypatch):
    def refused(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="new thread"):
        EventSubscriber(InstanceIndex(BLOCK), 1, "tcp://127.0.0.1:1")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_forked_child_may_close_its_parents_subscriber(pool):
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


def test_wrong_arguments_of_a_subscriber_are_refused():
    index = InstanceIndex(BLOCK)
    with pytest.raises(kvpool.ArgumentError, match="16384"):
        EventSubscriber(index, 1 << 14, "tcp://127.0.0.1:1")
    with pytest.raises(kvpool.ArgumentError, match="nowhere"):
        EventSubscriber(index, 1, "nowhere")
    with pytest.raises(kvpool.ArgumentError, match="probe"):
        EventSubscriber(index, 1, "tcp://127.0.0.1:1", probe=0)
    with pytest.raises(kvpool.ArgumentError, match="block_tokens"):
        EventSubscriber(index, 1, "tcp://127.0.0.1:1", block_tokens=0)
