"""fetch_with_insert: what a peer has cached of a prompt comes here, and is cached here. Messages without blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

import numpy as np
import pytest
from attach_kit import two, url
from kit import cached_tokens, refused
from transfer.kit import (
    BLOCK_ROUTES,
    NEAR,
    Child,
    address_of,
    content,
    eventually,
    fill,
    local_settings,
    not_on_gpu,
    pair_of,
    prompt,
    small_layout,
    small_pool,
    stop_process,
    store,
    wait_for,
)
from transfer.ranks_kit import Instance, instances_of

import kvpool
from kvpool import DRAM, HBM, ArgumentError, ArgumentTypeError, Cancelled, OutOfBlocks, PeerLost, StateError

__all__ = ["url"]

SETTINGS = local_settings("sock-unix")
CACHED = "addrs = pool.alloc(3)\nwritten = fill(pool, addrs, 5)\npool.insert(prompt(3), addrs).close()\nwritten"


def found(pool, tokens, namespace=""):
    with pool.match(tokens, namespace) as hit:
        return hit.addrs.tolist(), content(pool, hit.addrs)


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("medium", [HBM, DRAM])
def test_the_prompt_is_cached_here_when_it_is_done(route, medium):
    with pair_of(route) as pair:
        sent = pair.b(CACHED.replace("prompt(3), addrs", "prompt(3), addrs, 'tenant'"))
        done = pair.a.fetch_with_insert(pair.to_b, prompt(5), namespace="tenant", medium=medium).wait()
        assert found(pair.a, prompt(5), "tenant") == (done.addrs.tolist(), sent)
        assert {kvpool.decode_address(int(one)).medium for one in done.addrs} == {medium}
        assert (done.stats.blocks, done.stats.skipped_blocks) == (3, 0)
        assert done.stats.bytes == 3 * pair.a.kv_layout.block_bytes
        assert done.stats.total_us >= done.stats.reserve_us > 0
        assert cached_tokens(pair.a, prompt(3)) == 0  # of another namespace
        assert pair.b("wait_for(lambda: pool.stats().hbm.pinned == 0)\npool.stats().hbm.historical") == 3


@pytest.mark.parametrize("held", [0, 1, 2, 3, 4])
def test_what_is_here_is_not_sent(held):
    with pair_of("sock-unix") as pair:
        sent = pair.b(CACHED)
        own = pair.a.alloc(held)
        mine = fill(pair.a, own, 9)
        pair.a.insert(prompt(4)[: 4 * held], own).close()
        done = pair.a.fetch_with_insert(pair.to_b, prompt(4)).wait()
        assert done.stats.skipped_blocks == held
        assert done.stats.bytes == max(3 - held, 0) * pair.a.kv_layout.block_bytes
        assert found(pair.a, prompt(4)) == (done.addrs.tolist(), mine + sent[held:])


def test_nothing_anywhere_is_no_error():
    with pair_of(NEAR) as pair:
        for tokens in (prompt(2), [], [1, 2]):
            done = pair.a.fetch_with_insert(pair.to_b, tokens).wait()
            assert (done.addrs.tolist(), done.stats.bytes, done.progress) == ([], 0, (0, 0))


def test_it_can_be_awaited_and_is_counted_once():
    with pair_of("sock-unix") as pair:
        pair.b(CACHED)

        async def fetch():
            return (await pair.a.fetch_with_insert(pair.to_b, prompt(3))).addrs

        assert len(asyncio.run(fetch())) == 3
        totals = pair.a.peers.totals()["fetch"]
        assert (totals.succeeded, totals.bytes) == (1, 3 * pair.a.kv_layout.block_bytes)


@not_on_gpu("the pools are full")
def test_room_is_made_here_but_not_of_what_the_prompt_begins_with():
    with pair_of("sock-unix") as pair:
        sent = pair.b(CACHED)
        for at in range(1, 8):
            store(pair.a, prompt(1, at))
        own = pair.a.alloc(1)
        mine = fill(pair.a, own, 9)
        pair.a.insert(prompt(1), own).close()
        for at in range(1, 8):
            pair.a.match(prompt(1, at)).close()  # its beginning is the least recently used
        with pytest.raises(OutOfBlocks):
            pair.a.fetch_with_insert(pair.to_b, prompt(3), evict=False).wait()
        pair.a.fetch_with_insert(pair.to_b, prompt(3)).wait()
        assert found(pair.a, prompt(3))[1] == mine + sent[1:]


def test_two_full_pools_that_fetch_from_each_other_get_on():
    with small_pool(8, 0, name="a", **SETTINGS) as a, small_pool(8, 0, name="b", **SETTINGS) as b:
        a.peers.connect(b.peers.listen(address_of("sock-unix")))
        contents = {}
        for pool, first in ((a, 0), (b, 10)):
            for at in range(first, first + 4):
                addrs = pool.alloc(2)
                contents[at] = fill(pool, addrs, at)
                pool.insert(prompt(2, at), addrs).close()
        wrong = []

        def work(pool, peer, first):
            for turn in range(40):
                at = first + turn % 2
                error = pool.fetch_with_insert(peer, prompt(2, at), timeout=30).exception()
                if error is not None and not isinstance(error, OutOfBlocks):
                    wrong.append(error)
                with pool.match(prompt(2, at)) as hit:
                    if content(pool, hit.addrs) != contents[at][: len(hit.addrs)]:
                        wrong.append(at)

        threads = [
            threading.Thread(target=work, args=one) for one in ((a, "b", 10), (b, "a", 0), (a, "b", 12), (b, "a", 2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        for pool in (a, b):
            eventually(lambda pool=pool: pool.stats().hbm.pinned == 0)
            assert pool.audit().hbm.reserved == 0


@pytest.mark.parametrize("how", ["cancelled", "late", "lost"])
def test_one_that_fails_leaves_nothing_here(how):
    child = Child()
    settings = SETTINGS | {"lease_s": 3.0 if how == "lost" else 60.0}
    with small_pool(name="a", **settings) as a:
        address = child(
            "pool = small_pool(name='b', **settings)\nstore(pool, prompt(3))\n"
            "pool.peers.listen(address_of('sock-unix'))",
            settings=settings,
        )
        peer = a.peers.connect(address)
        stop_process(child.process.pid)
        fetch = a.fetch_with_insert(peer, prompt(3), timeout=0.05 if how == "late" else 30)
        if how == "cancelled":
            assert fetch.cancel()
            assert isinstance(fetch.exception(), Cancelled)
        else:
            assert isinstance(fetch.exception(), kvpool.DeadlineExceeded if how == "late" else PeerLost)
        with pytest.raises(kvpool.Error):
            assert fetch.addrs
        assert cached_tokens(a, prompt(3)) == 0
        child.process.send_signal(18)
        if how != "lost":
            child("wait_for(lambda: pool.stats().hbm.pinned == 0 and pool.evict(3, kvpool.HBM) == 3)")
        eventually(lambda: a.audit().hbm.free == a.stats().hbm.capacity)
        child("pool.close()")
    child.close()


def test_members_of_a_cluster_are_reached_by_name(url):
    with two(url) as (a, b):
        own = b.alloc(2)
        sent = fill(b, own)
        b.insert(prompt(2), own).close()
        done = a.fetch_with_insert("b", prompt(2)).wait()
        assert found(a, prompt(2)) == (done.addrs.tolist(), sent)
        with refused(a, PeerLost, "nobody"):
            a.fetch_with_insert("nobody", prompt(9))


@not_on_gpu("the engine's tensors are NumPy's")
def test_a_pool_whose_engine_allocates_takes_it_into_dram():
    layout = small_layout()
    tensors = [np.zeros((8, 2, 2, 4, 4), np.float32) for _ in range(layout.layers)]
    with small_pool(0, 8, hbm=tensors, engine_allocates=True, name="a", **SETTINGS) as a:
        with small_pool(name="b", **SETTINGS) as b:
            peer = a.peers.connect(b.peers.listen(address_of("sock-unix")))
            own = b.alloc(3)
            fill(b, own)
            b.insert(prompt(3), own).close()
            assert isinstance(a.fetch_with_insert(peer, prompt(3)).exception(), StateError)
            done = a.fetch_with_insert(peer, prompt(3), medium=DRAM).wait()
            with a.match(prompt(3)) as hit:
                assert hit.addrs.tolist() == done.addrs.tolist()
            eventually(lambda: b.stats().hbm.pinned == 0)
            a.audit()


@pytest.mark.parametrize(("here", "there"), [("tp2", "tp2"), ("tp2", ""), ("", "tp2"), ("tp4", "tp2")])
def test_logical_instances_fetch_prompts_from_each_other(here, there):
    def parallel(name):
        return kvpool.ParallelConfig(tp=int(name[2:])) if name else None

    with instances_of() as make:
        a: Instance = make("a", parallel(here))
        b: Instance = make("b", parallel(there))
        peer = a.pool.peers.connect(b.address)
        addrs, kv = b.filled(3)
        b.pool.insert(prompt(3), addrs).close()
        done = a.pool.fetch_with_insert(peer, prompt(3)).wait()
        with a.pool.match(prompt(3)) as hit:
            assert hit.addrs.tolist() == done.addrs.tolist()
            assert (a.read(hit.addrs).view(np.uint16) == kv.view(np.uint16)).all()
        with a.pool.peers.match(peer, prompt(4)) as match:
            assert match.tokens == 12
        eventually(lambda: b.pool.stats().hbm.pinned == 0)


def test_bad_arguments_are_typed_errors():
    with pair_of(NEAR) as pair:
        a, b = pair.a, pair.to_b
        for error, call in [
            (ArgumentTypeError, lambda: a.fetch_with_insert(7, prompt(1))),
            (ArgumentTypeError, lambda: a.fetch_with_insert(b, object())),
            (ArgumentTypeError, lambda: a.fetch_with_insert(b, prompt(1), namespace=1)),
            (ArgumentTypeError, lambda: a.fetch_with_insert(b, prompt(1), evict=1)),
            (ArgumentError, lambda: a.fetch_with_insert(b, prompt(1), medium=9)),
            (ArgumentError, lambda: a.fetch_with_insert(b, prompt(1), priority="soon")),
            (ArgumentError, lambda: a.fetch_with_insert(b, np.zeros((1 << 20) + 4, np.int32))),
            (PeerLost, lambda: a.fetch_with_insert("nobody", prompt(1))),
        ]:
            with refused(a, error):
                call()
    with small_pool() as alone, refused(alone, StateError, "no peers"):
        alone.fetch_with_insert("b", prompt(1))


# ---- messages without blocks


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_message_without_blocks_reaches_the_application(route):
    with pair_of(route) as pair:
        done = pair.a.transfer(pair.to_b, [], private=b"done, free them").wait()
        assert (done.addrs.tolist(), done.stats.blocks, done.stats.bytes) == ([], 0, 0)
        got = pair.b("item = pool.inbox.receive(60)\ngot = item.private, item.addrs.tolist()\nitem.close()\ngot")
        assert got == (b"done, free them", [])
        with refused(pair.a, ArgumentError, "needs blocks"):
            pair.a.transfer(pair.to_b, [])
        with refused(pair.a, ArgumentError, "needs blocks"):
            pair.a.transfer_with_insert(pair.to_b, [], [], private=b"x")
        with refused(pair.a, ArgumentError, "needs blocks"):
            pair.a.transfer(pair.to_b, [], private=b"x", layerwise=True)


def test_messages_without_blocks_keep_their_order_among_many():
    with pair_of("sock-unix") as pair:
        for number in range(50):
            pair.a.transfer(pair.to_b, [], private=str(number).encode()).wait()
        got = pair.b("[pool.inbox.receive(60).private for _ in range(50)]")
        assert got == [str(number).encode() for number in range(50)]
        assert os.getpid() != pair.b("os.getpid()")


def alloc_all(pool):
    try:
        return pool.alloc(8).tolist()
    except OutOfBlocks:
        return None


def test_a_fetch_that_is_cancelled_at_any_time_ends_once():
    """Both pools in one process, whose threads meet within microseconds. A second end aborts the process."""
    with small_pool(hbm_blocks=8, name="here") as here, small_pool(hbm_blocks=8, name="there") as there:
        peer = here.peers.connect(there.peers.listen(address_of("sock-unix")))
        tokens, others = prompt(8), [prompt(8) + 1000 * (each + 1) for each in range(2)]
        there.insert(tokens, there.alloc(8)).close()
        ended = {True: 0, False: 0}
        for number in range(4000):
            room = wait_for(lambda: alloc_all(here))  # what was cancelled last may still be written to
            here.insert(others[number % 2], room).close()  # so that room must be made each time
            fetch = here.fetch_with_insert(peer, tokens)
            until = time.perf_counter() + number % 100 * 4e-6
            while time.perf_counter() < until:
                pass
            ended[fetch.cancel()] += 1
            with contextlib.suppress(Cancelled):
                fetch.wait(30)
        assert min(ended.values()) > 0, ended
        eventually(lambda: there.stats().hbm.pinned == 0)
        here.audit()
        there.audit()
