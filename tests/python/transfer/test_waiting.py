"""Handles: coroutines, callbacks, signals; batches, streams and fetches."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading

import pytest
from kit import run_script
from transfer.kit import (
    NEAR,
    address_of,
    eventually,
    fill,
    local_settings,
    pair_of,
    prompt,
    small_pool,
    wait_for,
)

import kvpool

# ---- coroutines


def test_a_transfer_can_be_awaited():
    with pair_of("sock-unix") as pair:
        addrs = pair.a.alloc(2)
        sent = fill(pair.a, addrs)

        async def send():
            done = await pair.a.transfer(pair.to_b, addrs)
            again = await done  # one that is done already
            return again.addrs

        assert pair.b("content(pool, addrs)", addrs=asyncio.run(send())) == sent
        pair.b("pool.inbox.receive(60).close()")


def test_many_transfers_can_be_awaited_together_while_the_loop_runs():
    with pair_of(NEAR) as pair:
        addrs = pair.a.alloc(4)

        async def send():
            streams = [pair.a.transfer(pair.to_b, addrs[i : i + 1], layerwise=True) for i in range(4)]
            waiting = asyncio.gather(*(one.transfer for one in streams), return_exceptions=True)
            await asyncio.sleep(0.01)
            assert not waiting.done()
            for stream in streams[:3]:
                with stream:
                    stream.send_layer(0)
                    stream.send_layer(1)
            streams[3].transfer.cancel()
            return await asyncio.wait_for(waiting, 60)

        ended = asyncio.run(send())
        assert [type(one) for one in ended] == [kvpool.Transfer] * 3 + [kvpool.Cancelled]
        pair.b("for _ in range(3): pool.inbox.receive(60).close()")


def test_several_tasks_may_await_one_transfer_and_one_may_give_up():
    with pair_of(NEAR) as pair:
        fds = len(os.listdir("/proc/self/fd"))

        async def send():
            stream = pair.a.transfer(pair.to_b, pair.a.alloc(1), layerwise=True)

            async def wait():
                return await stream.transfer

            tasks = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0.01)
            tasks[0].cancel()
            await asyncio.sleep(0.01)
            assert tasks[0].cancelled()
            assert not stream.transfer.done()  # a waiter that gives up ends nothing
            with stream:
                stream.send_layer(0)
                stream.send_layer(1)
            assert await asyncio.wait_for(asyncio.gather(*tasks[1:]), 60) == [stream.transfer] * 2

        asyncio.run(send())
        pair.b("pool.inbox.receive(60).close()")
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)


def test_a_transfer_can_be_selected():
    with pair_of(NEAR) as pair:
        stream = pair.a.transfer(pair.to_b, pair.a.alloc(1), layerwise=True)
        assert select.select([stream.transfer], [], [], 0) == ([], [], [])
        with stream:
            stream.send_layer(0)
            stream.send_layer(1)
        assert select.select([stream.transfer], [], [], 60) == ([stream.transfer], [], [])
        assert stream.transfer.done()
        pair.b("pool.inbox.receive(60).close()")


def test_ctrl_c_ends_waiting():
    run_script("""
import os, signal, threading, time
from transfer.kit import *
one, two = small_pool(), small_pool()
peer = two.peers.connect(one.peers.listen(address_of("shm")))
stream = two.transfer(peer, two.alloc(1), layerwise=True)
receive = one.inbox.receive
for wait in (stream.transfer.wait, lambda: stream.transfer.exception(60), receive, lambda: receive(60)):
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        wait()
    except KeyboardInterrupt:
        continue
    raise SystemExit("it was not interrupted")
assert not stream.transfer.done()
two.close()
one.close()
""")


# ---- items of peers


def test_received_waits_and_may_time_out():
    with pair_of(NEAR) as pair:
        assert pair.b("pool.inbox.receive(0)") is None
        assert pair.b("pool.inbox.receive(0.01)") is None
        got = []
        thread = threading.Thread(target=lambda: got.append(pair.a.inbox.receive()))
        thread.start()
        pair.b("pool.transfer(peer, pool.alloc(1), private=b'x').wait()\nNone", peer=pair.to_a)
        thread.join(60)
        (item,) = got
        assert (item.peer, item.private, item.closed) == (pair.to_b, b"x", False)
        assert "1 blocks" in repr(item)
        with item:
            pass
        assert item.closed
        item.close()
        with pytest.raises(kvpool.ClosedError):
            item.take()
        with pytest.raises(kvpool.ClosedError):
            item.__enter__()
        assert pair.a.stats().hbm.free == 8


def test_items_that_are_taken_stay_and_dropped_ones_are_freed():
    with pair_of(NEAR) as pair:
        for _ in range(2):
            pair.b("pool.transfer(peer, pool.alloc(1), private=b'x').wait()\nNone", peer=pair.to_a)
        item = pair.a.inbox.receive(60)
        mine = item.take()
        item.close()
        with pytest.raises(kvpool.ClosedError):
            item.take()
        del item
        item = pair.a.inbox.receive(60)
        del item
        assert pair.a.stats().hbm.active == 1
        pair.a.insert(prompt(1), mine).close()


def test_items_come_in_the_order_of_completion_each_once():
    with pair_of(NEAR, a={"hbm_blocks": 64}) as pair:
        pair.b(
            "addrs = pool.alloc(1)\nfor i in range(50): pool.transfer(peer, addrs, private=b'%d' % i).wait()",
            peer=pair.to_a,
        )
        assert [int(pair.a.inbox.receive(60).private) for _ in range(50)] == list(range(50))
        assert pair.a.inbox.receive(0) is None


def test_a_callback_gets_every_item_that_is_sent(caplog):
    with pair_of(NEAR) as pair:
        got = []
        names = set()

        def callback(item):
            names.add(threading.current_thread().name)
            if item.private == b"bad":
                raise RuntimeError("this callback is broken")
            got.append((item.private, item.take().tolist()))

        with caplog.at_level(logging.ERROR, "kvpool"), pair.a.inbox.on_received(callback) as handle:
            with pytest.raises(kvpool.StateError, match="already"):
                pair.a.inbox.on_received(print)
            for private in (b"one", b"bad", b"two"):
                pair.b(
                    "pool.transfer(peer, pool.alloc(1), private=private).wait()\nNone", peer=pair.to_a, private=private
                )
            wait_for(lambda: len(got) == 2)
        assert [private for private, _ in got] == [b"one", b"two"]
        assert names == {"kvpool-received"}
        assert "this callback is broken" in caplog.text
        assert pair.to_b in caplog.text
        eventually(lambda: pair.a.stats().hbm.active == 2)  # the item of the broken callback was closed
        assert handle.closed
        pair.b("pool.transfer(peer, pool.alloc(1), private=b'late').wait()\nNone", peer=pair.to_a)
        assert pair.a.inbox.receive(60).private == b"late"
        assert len(got) == 2


@pytest.mark.parametrize("begin", [lambda pool: pool.inbox.on_received, lambda pool: pool.peers.on_change])
def test_a_pool_has_one_callback_of_a_kind_at_a_time(begin):
    with small_pool() as pool:
        with pytest.raises(kvpool.StateError, match="no peers"):
            begin(pool)(print)
        pool.peers.listen(address_of(NEAR))
        with pytest.raises(kvpool.ArgumentTypeError, match="callable"):
            begin(pool)("print")
        first = begin(pool)(print)
        with pytest.raises(kvpool.StateError, match="already"):
            begin(pool)(print)
        first.close()
        second = begin(pool)(print)
        assert not second.closed
    assert second.closed


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_a_callback_that_is_ended_from_within_is_called_again(kind, caplog):
    """These are no Exception: the thread used to end, without a word, and the item stayed open."""
    with pair_of(NEAR) as pair:
        got, peers, kept = [], [], []

        def on_item(item):
            kept.append(item)
            if item.private == b"bad":
                raise kind("not for this thread")
            got.append(item.private)

        def on_peer(event):
            peers.append(event.kind)
            raise kind("not for this thread")

        with caplog.at_level(logging.ERROR, "kvpool"):
            with pair.a.inbox.on_received(on_item) as items, pair.a.peers.on_change(on_peer) as events:
                for private in (b"bad", b"good"):
                    pair.b(
                        "pool.transfer(peer, pool.alloc(1), private=private).wait()\nNone",
                        peer=pair.to_a, private=private,
                    )  # fmt: skip
                wait_for(lambda: got == [b"good"] and peers == ["joined"])
                assert kept[0].closed
                assert not items.closed
                with small_pool(name="third", **local_settings(NEAR)) as third:
                    third.peers.connect(pair.a.peers.listen(address_of(NEAR)), timeout=60)
                    wait_for(lambda: peers[:2] == ["joined", "joined"])
                wait_for(lambda: peers == ["joined", "joined", "lost"])
                assert not events.closed
            wait_for(lambda: caplog.text.count(f"{kind.__name__}: not for this thread") == 4)
        while kept:
            kept.pop().close()


def test_a_callback_may_use_the_pool_and_end_itself():
    with pair_of(NEAR) as pair:
        ended = threading.Event()

        def callback(item):
            pair.a.insert(prompt(1), item.take()).close()
            handle.close()
            ended.set()

        handle = pair.a.inbox.on_received(callback)
        pair.b("pool.transfer(peer, pool.alloc(1)).wait()\nNone", peer=pair.to_a)
        assert ended.wait(60)
        eventually(lambda: handle.closed)
        assert pair.a.stats().hbm.historical == 1
        pair.a.inbox.on_received(print).close()


def test_a_callback_ends_with_its_pool():
    with pair_of(NEAR, clean=False) as pair:
        handle = pair.a.inbox.on_received(print)
        pair.a.close()
        assert handle.closed
        assert "kvpool-received" not in {thread.name for thread in threading.enumerate()}


def test_a_callback_must_be_callable():
    with pair_of(NEAR) as pair, pytest.raises(kvpool.ArgumentTypeError):
        pair.a.inbox.on_received(7)
