"""Fixed bugs that no other test would notice again."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from transfer.kit import NEAR, address_of, content, fill, pair_of, prompt, small_pool, wait_for

import kvpool


def test_a_block_stands_twice_in_a_list_when_one_address_is_older_than_the_instance_id():
    with small_pool(name="one") as pool:
        old = pool.alloc(1)
        pool.peers.listen(address_of("shm"))
        own = int(pool.alloc(1)[0]) >> 50 << 50
        both = np.array([int(old[0]), int(old[0]) | own], dtype=np.uint64)
        for give in (lambda: pool.free(both), lambda: pool.insert(prompt(2), both)):
            with pytest.raises(kvpool.ArgumentError, match="twice"):
                give()
        pool.audit()
        assert pool.stats().hbm.active == 2


def test_a_borrower_cannot_read_what_an_earlier_owner_left():
    with pair_of(NEAR, b={"zero_on_alloc": True}) as pair:
        pair.b("old = pool.alloc(8); fill(pool, old); pool.free(old)")
        lent = pair.a.alloc(2, instance=pair.to_b)
        mine = pair.a.alloc(2)
        fill(pair.a, mine)
        pair.a.fetch(pair.to_b, lent, to=mine).wait()
        assert not any(map(any, content(pair.a, mine)))
        pair.a.free(np.concatenate([lent, mine]))


def test_blocks_borrowed_by_a_replaced_pool_of_this_process_come_back():
    address = address_of("loopback")
    with small_pool(name="lender") as lender:
        lender.peers.listen(address)
        for _ in range(10):
            with small_pool(name="borrower") as first, small_pool(name="borrower") as second:
                first.peers.connect(address)
                first.alloc(2, instance="lender")
                second.peers.connect(address)  # under the name of the first, which is lost
                wait_for(lambda: lender.audit().hbm.free == lender.stats().hbm.capacity)


def test_lent_blocks_that_go_to_the_index_are_not_freed_by_the_item_that_reported_them():
    """The item of an earlier transfer to them freed them, if it was closed in the moment before the index had them:
    then blocks were lent and free at once."""
    done = threading.Event()
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def application():
        while not done.is_set():
            if (item := lender.inbox.receive(0.1)) is not None:
                item.close()

    thread = threading.Thread(target=application)
    with small_pool(name="lender") as lender, small_pool(name="borrower") as borrower:
        peer = borrower.peers.connect(lender.peers.listen(address_of("loopback")))
        mine = borrower.alloc(1)
        thread.start()
        try:
            until = time.monotonic() + 1.5
            rounds = 0
            while rounds < 20 or time.monotonic() < until:
                lent = borrower.alloc(1, instance=peer)
                borrower.transfer(peer, mine, to=lent, private=b"").wait()
                borrower.transfer_with_insert(peer, np.full(len(prompt(1)), rounds), mine, to=lent).wait()
                rounds += 1
                lender.audit()
        finally:
            done.set()
            thread.join()
            sys.setswitchinterval(switch_interval)
        assert lender.audit().hbm.lent == lender.stats().hbm.active == 0


# A thread of one pool releases another pool's adopted memory, for which it needs the interpreter.
DROPS = """
import gc, numpy as np, kvpool
for i in range(100):
    layout = kvpool.RawLayout(512, block_tokens=4)
    adopting = kvpool.Pool(layout, hbm=[np.zeros((8, 512), np.uint8)])
    other = kvpool.Pool(layout, hbm_blocks=8)
    address = f"unix:@kvpool-test-drop-{i}-{__import__('os').getpid()}"
    adopting.peers.listen(address)
    other.transfer(other.peers.connect(address), other.alloc(2)).wait()
    if i % 2:
        adopting.close()
    del adopting
    del other
"""


def test_pools_that_are_dropped_unclosed_end():
    assert subprocess.run([sys.executable, "-c", DROPS], check=False, timeout=250).returncode == 0


@pytest.mark.parametrize("route", [NEAR, "sock-unix"])
def test_a_forked_child_leaves_transfers_and_callbacks_alone(route):
    with pair_of(route) as pair:
        seen = []
        with pair.a.inbox.on_received(lambda item: seen.append(item.private)) as callback:
            stream = pair.a.transfer(pair.to_b, pair.a.alloc(1), layerwise=True)
            child = os.fork()
            if child == 0:
                wrong = 1
                try:
                    transfer = stream.transfer
                    for use in (transfer.wait, transfer.cancel, transfer.exception, transfer.fileno,
                                lambda: stream.send_layer(0)):  # fmt: skip
                        with pytest.raises(kvpool.ForkError):
                            use()
                    callback.close()
                    pair.a.close()
                    del stream, transfer, use
                    gc.collect()
                    wrong = 0
                finally:
                    os._exit(wrong)
            assert os.waitpid(child, 0)[1] == 0
            began = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - began < 0.1  # no thread was woken endlessly
            for layer in range(pair.a.kv_layout.layers):
                stream.send_layer(layer)
            stream.finish().wait(60)
            pair.b("t = pool.transfer(peer, pool.alloc(1), private=b'on').wait()\nNone", peer=pair.to_a)
            wait_for(lambda: seen == [b"on"])
        pair.b("pool.inbox.receive(60).close()")


def test_ctrl_c_is_not_lost_while_connect_waits():
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with socket.socket(socket.AF_UNIX) as silent, small_pool() as pool:
            silent.bind(f"\0kvpool-test-silent-{os.getpid()}")
            silent.listen()
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                pool.peers.connect(f"unix:@kvpool-test-silent-{os.getpid()}", timeout=60)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_engine_cannot_free_blocks_that_a_transfer_reads():
    memory = np.full((8, 512), 5, dtype=np.uint8)
    layout = kvpool.RawLayout(512, block_tokens=4)
    with (
        kvpool.Pool(layout, hbm=[memory], engine_allocates=True, name="engine") as engine,
        kvpool.Pool(layout, hbm_blocks=8, name="other") as other,
    ):
        peer = engine.peers.connect(other.peers.listen(address_of("shm")))
        addrs = engine.adopt([0, 1, 2])
        stream = engine.transfer(peer, addrs, layerwise=True)
        with pytest.raises(kvpool.StateError, match="a transfer, a save or a sequence reads"):
            engine.free(addrs)
        stream.transfer.cancel()
        with pytest.raises(kvpool.Cancelled):
            stream.transfer.wait()
        engine.free(addrs)
        assert engine.audit().hbm.free == 8


def test_a_peer_cannot_fill_the_memory_with_items_that_are_not_received():
    with pair_of("loopback") as pair:
        lent = pair.a.alloc(1, instance=pair.to_b)
        mine = pair.a.alloc(1)
        megabyte = bytes(1 << 20)
        with pytest.raises(kvpool.Busy, match=r"receive\(\)"):
            for _ in range(300):
                pair.a.transfer(pair.to_b, mine, to=lent, private=megabyte).wait()
        pair.b("while (item := pool.inbox.receive(0)) is not None: item.close()")
        pair.a.transfer(pair.to_b, mine, to=lent, private=megabyte).wait()
        pair.b("pool.inbox.receive(60).close()")  # told after the sender
        pair.a.free(np.concatenate([lent, mine]))
