"""A publisher without an endpoint for replays that goes away: what it had cached is forgotten after a while."""

from __future__ import annotations

import contextlib
import socket

import pytest
import zmq
from kit import BLOCK
from observe.event_kit import DEADLINE, eventually
from observe.test_event_subscriber import Numbered, batch, heard

from kvpool import InstanceIndex
from kvpool.errors import ArgumentError
from kvpool.observe.events import EventSubscriber


def test_a_publisher_that_is_gone_is_forgotten_and_its_successor_is_followed(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, probe=0.1, timeout=0.2) as subscriber:
        with Numbered(endpoint) as publisher:
            heard(publisher, index)
            publisher.publish(batch(1, 2), 1)
            eventually(lambda: index.blocks(1) == 3 and subscriber.synced)
        eventually(lambda: not subscriber.synced)
        eventually(lambda: not index.blocks(1))
        assert subscriber.gaps == 1
        with Numbered(endpoint) as publisher:
            heard(publisher, index)
            eventually(lambda: subscriber.synced)
            assert index.blocks(1) == 1


def test_a_connection_that_breaks_and_comes_back_costs_nothing_if_no_batch_was_missed(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, probe=0.1, timeout=DEADLINE) as subscriber:
        with Numbered(endpoint) as publisher:
            heard(publisher, index)
            publisher.publish(batch(1, 2), 1)
            eventually(lambda: index.blocks(1) == 3)
        eventually(lambda: not subscriber.synced)
        assert index.blocks(1) == 3
        with zmq.Context() as context, context.socket(zmq.XPUB) as again:  # as the same one, where it was
            again.bind(endpoint)
            assert again.poll(DEADLINE * 1000)
            assert again.recv() == b"\x01"  # the subscription
            again.send_multipart([b"", (2).to_bytes(8, "big"), batch(7)])
            eventually(lambda: subscriber.synced)
            assert (index.blocks(1), subscriber.gaps) == (4, 0)


def test_a_publisher_is_gone_though_something_else_accepts_its_port():
    """As a proxy does, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    index, endpoint = InstanceIndex(BLOCK), f"tcp://127.0.0.1:{port}"
    with EventSubscriber(index, 1, endpoint, probe=0.1, timeout=1.0) as subscriber:
        with Numbered(endpoint) as publisher:
            heard(publisher, index)
            publisher.publish(batch(1, 2), 1)
            eventually(lambda: index.blocks(1) == 3 and subscriber.synced)
        with socket.create_server(("127.0.0.1", port)) as other:
            other.settimeout(0.05)

            def hangs_up():
                with contextlib.suppress(TimeoutError):
                    other.accept()[0].close()
                return not index.blocks(1)

            eventually(hangs_up)
            assert not subscriber.synced
            for _ in range(3):  # and each further attempt changes nothing
                other.settimeout(DEADLINE)
                other.accept()[0].close()
        assert subscriber.gaps == 1


def test_a_huge_message_is_not_taken_into_memory(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with EventSubscriber(index, 1, endpoint, probe=0.1, timeout=0.2) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        publisher.publish(bytes(33 << 20), 1)
        eventually(lambda: not index.blocks(1))
        assert (subscriber.malformed, subscriber.synced) == (0, False), "the connection has ended"


def test_the_most_blocks_are_counted_and_checked(tmp_path):
    index, endpoint = InstanceIndex(BLOCK), f"ipc://{tmp_path}/events"
    with pytest.raises(ArgumentError, match="blocks_max"):
        EventSubscriber(index, 1, endpoint, blocks_max=0)
    with EventSubscriber(index, 1, endpoint, blocks_max=8) as subscriber, Numbered(endpoint) as publisher:
        heard(publisher, index)
        publisher.publish(batch(*range(1, 13)), 1)
        eventually(lambda: (index.blocks(1), subscriber.dropped) == (8, 5))
