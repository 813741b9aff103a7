"""Limits: full receivers, caps, deadlines, cancelling, closing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from transfer.kit import (
    BLOCK_ROUTES,
    NEAR,
    NEAR_ROUTES,
    Child,
    address_of,
    content,
    eventually,
    fill,
    pair_of,
    prompt,
    small_pool,
)  # fmt: skip

import kvpool
from kvpool import DRAM


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_a_full_receiver_says_so_and_the_sender_keeps_its_blocks(route):
    with pair_of(route) as pair:
        pair.b("mine = pool.alloc(6)\nNone")
        addrs = pair.a.alloc(3)
        sent = fill(pair.a, addrs)
        for send in (
            lambda: pair.a.transfer(pair.to_b, addrs),
            lambda: pair.a.transfer_with_insert(pair.to_b, prompt(3), addrs),
        ):
            with pytest.raises(kvpool.OutOfBlocks) as caught:
                send().wait()
            assert (caught.value.requested, caught.value.free, caught.value.capacity) == (3, 2, 8)
        with pytest.raises(kvpool.OutOfBlocks):
            pair.a.alloc(3, instance=pair.to_b)
        assert content(pair.a, addrs) == sent
        assert pair.a.stats().hbm.active == 3
        assert pair.b("(pool.stats().hbm.free, pool.inbox.receive(0))") == (2, None)
        pair.a.free(addrs)


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_cached_prompts_are_evicted_only_if_the_caller_allows_it(route):
    with pair_of(route, b={"dram_blocks": 0}) as pair:
        pair.b("store(pool, prompt(8))\nNone")
        addrs = pair.a.alloc(2)
        for send in (
            lambda: pair.a.transfer(pair.to_b, addrs, evict=False).wait(),
            lambda: pair.a.alloc(2, evict=False, instance=pair.to_b),
        ):
            with pytest.raises(kvpool.OutOfBlocks) as caught:
                send()
            assert (caught.value.free, caught.value.evictable) == (0, 8)
        assert pair.b("pool.stats().hbm.historical") == 8
        pair.a.transfer(pair.to_b, addrs).wait()
        assert pair.b("pool.stats().hbm.historical") == 6
        pair.a.free(pair.a.alloc(2, instance=pair.to_b))
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_the_blocks_of_one_peer_are_limited(route):
    with pair_of(route, b={"reserved_max": 4}) as pair:
        lent = pair.a.alloc(3, instance=pair.to_b)
        with pytest.raises(kvpool.Busy) as caught:
            pair.a.alloc(2, instance=pair.to_b)
        assert (caught.value.limit, caught.value.requested) == (4, 2)
        assert caught.value.retry_after_us > 0
        addrs = pair.a.alloc(2)
        with pytest.raises(kvpool.Busy):
            pair.a.transfer(pair.to_b, addrs).wait()
        pair.a.free(lent)
        pair.a.transfer(pair.to_b, addrs).wait()
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_the_blocks_that_a_pool_lends_are_limited(route):
    with pair_of(route, b={"lend_max": 4}) as pair:
        lent = pair.a.alloc(3, instance=pair.to_b)
        with pytest.raises(kvpool.Busy) as caught:
            pair.a.alloc(2, instance=pair.to_b)
        assert (caught.value.limit, caught.value.requested, caught.value.free) == (4, 2, 1)
        assert caught.value.retry_after_us > 0
        pair.b("setattr(pool.peers, 'lend_max', 2)")
        with pytest.raises(kvpool.Busy):
            pair.a.alloc(1, instance=pair.to_b)
        assert pair.b("pool.stats().hbm.lent") == 3
        pair.a.free(lent[:2])
        more = pair.a.alloc(1, instance=pair.to_b)
        pair.b("setattr(pool.peers, 'lend_max', None)")
        assert pair.b("pool.peers.lend_max") is None
        pair.a.free([*lent[2:], *more, *pair.a.alloc(6, instance=pair.to_b)])
        assert pair.b("pool.stats().hbm.lent") == 0
        for wrong in (-1, 1.5, "4", True):
            with pytest.raises((kvpool.ArgumentError, kvpool.ArgumentTypeError)):
                pair.a.peers.lend_max = wrong
        assert pair.a.peers.lend_max is None


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_transfers_under_way_are_limited(route):
    with pair_of(route, a={"transfers_max": 2}, b={"transfers_max": 2}) as pair:
        addrs = pair.a.alloc(3)
        streams = [pair.a.transfer(pair.to_b, addrs[i : i + 1], layerwise=True) for i in range(2)]
        with pytest.raises(kvpool.Busy) as caught:
            pair.a.transfer(pair.to_b, addrs[2:]).wait()
        assert caught.value.limit == 2
        for stream in streams:
            stream.transfer.cancel()
            assert isinstance(stream.transfer.exception(60), kvpool.Cancelled)
        pair.a.transfer(pair.to_b, addrs[2:]).wait()
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_an_application_that_does_not_receive_makes_its_pool_busy(route):
    with pair_of(route, b={"received_max": 2}) as pair:
        addrs = pair.a.alloc(1)
        for _ in range(2):
            pair.a.transfer(pair.to_b, addrs).wait()
        with pytest.raises(kvpool.Busy) as caught:
            pair.a.transfer(pair.to_b, addrs).wait()
        assert (caught.value.limit, caught.value.retry_after_us > 0) == (2, True)
        eventually(lambda: pair.b("pool.stats().hbm.active") == 2)
        pair.b("pool.inbox.receive(60).close()")
        pair.a.transfer(pair.to_b, addrs).wait()
        pair.b("for _ in range(2): pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_transfer_that_is_cancelled_leaves_nothing(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(2)
        stream = pair.a.transfer(pair.to_b, addrs, layerwise=True)
        stream.send_layer(0)
        assert not stream.transfer.done()
        assert stream.transfer.cancel()
        with pytest.raises(kvpool.Cancelled):
            stream.transfer.wait(60)
        assert stream.transfer.done()
        assert not stream.transfer.cancel()
        assert isinstance(stream.transfer.exception(), kvpool.Cancelled)
        with pytest.raises(kvpool.Cancelled):
            _ = stream.transfer.addrs
        eventually(lambda: pair.b("pool.stats().hbm.free") == 8)
        pair.a.transfer(pair.to_b, addrs).wait()  # the pair goes on
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_deadline_ends_a_transfer(route, named):
    with pair_of(route) as pair:
        to = pair.a.alloc(2, instance=pair.to_b) if named else None
        addrs = pair.a.alloc(2)
        begin = time.monotonic()
        stream = pair.a.transfer(pair.to_b, addrs, to=to, timeout=0.1, layerwise=True)
        with pytest.raises(kvpool.DeadlineExceeded):
            stream.transfer.wait(60)
        assert 0.1 <= time.monotonic() - begin < 30
        eventually(lambda: pair.b("pool.stats().hbm.reserved") == 0)
        if named:
            pair.a.transfer(pair.to_b, addrs, to=to).wait()
            pair.a.free(to)


def test_a_passed_deadline_is_reported_at_once():
    with pair_of("sock-unix") as pair:
        error = pair.a.transfer(pair.to_b, pair.a.alloc(1), timeout=0).exception(60)
        assert type(error) in (kvpool.DeadlineExceeded, type(None))
        if error is None:  # it was quicker than the clock
            pair.b("pool.inbox.receive(60).close()")


def test_waiting_may_time_out_while_the_transfer_goes_on():
    with pair_of(NEAR) as pair:
        stream = pair.a.transfer(pair.to_b, pair.a.alloc(1), layerwise=True)
        with pytest.raises(TimeoutError) as caught:
            stream.transfer.wait(0.05)
        assert not isinstance(caught.value, kvpool.Error)  # DeadlineExceeded is for the transfer's own deadline
        with pytest.raises(TimeoutError):
            stream.transfer.exception(0)
        with pytest.raises(kvpool.StateError, match="under way"):
            _ = stream.transfer.addrs
        with pytest.raises(kvpool.StateError, match="under way"):
            _ = stream.transfer.stats
        assert "under way" in repr(stream.transfer)
        stream.send_layer(1)
        stream.send_layer(0)
        assert stream.finish().wait(60).done()
        assert "done" in repr(stream.transfer)
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_a_thousand_transfers_at_once(route):
    with pair_of(route, a={"hbm_blocks": 8}, b={"hbm_blocks": 1100, "audit": False}) as pair:
        addrs = pair.a.alloc(8)
        sent = fill(pair.a, addrs)
        handles = [pair.a.transfer(pair.to_b, addrs[i % 8 : i % 8 + 1]) for i in range(1000)]
        where = np.concatenate([handle.wait(60).addrs for handle in handles])
        assert len(set(where.tolist())) == 1000
        assert pair.b("content(pool, addrs)", addrs=where) == [sent[i % 8] for i in range(1000)]
        assert pair.b("sum(1 for _ in range(1000) if pool.inbox.receive(60))") == 1000
        assert pair.b("pool.audit().hbm.free") == 1100


@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_threads_send_at_once(route):
    with pair_of(route, a={"hbm_blocks": 32, "audit": False}, b={"hbm_blocks": 32, "audit": False}) as pair:
        wrong = []

        def send(seed: int) -> None:
            lent = pair.a.alloc(2, instance=pair.to_b)
            addrs = pair.a.alloc(2)
            for round_ in range(20):
                fill(pair.a, addrs, 100 * seed + round_)
                pair.a.transfer(pair.to_b, addrs, to=lent, checksum=round_ % 2 == 0).wait()
            wrong.append((lent, content(pair.a, addrs)))

        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wrong) == 6
        for lent, sent in wrong:
            assert pair.b("content(pool, addrs)", addrs=lent) == sent
            pair.a.free(lent)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("route", NEAR_ROUTES)
def test_closing_ends_what_is_under_way(route, who):
    with pair_of(route, clean=False) as pair:
        addrs = pair.a.alloc(4)
        streams = [pair.a.transfer(pair.to_b, addrs[i : i + 1], layerwise=True) for i in range(4)]
        pair.b("wait_for(lambda: pool.stats().hbm.reserved == 4)")
        if who == "sender":
            pair.a.close()
            for stream in streams:
                assert isinstance(stream.transfer.exception(60), kvpool.ClosedError)
            pair.b("eventually(lambda: blocks_at_peers(pool) == 0 and pool.peers.list() == [])")
            assert pair.b("pool.stats().hbm.free") == 8
        else:
            pair.b("pool.close()")
            for stream in streams:
                assert isinstance(stream.transfer.exception(60), kvpool.PeerLost)
            eventually(lambda: pair.a.peers.list() == [])
            assert pair.a.audit().hbm.active == 4


def test_closing_ends_the_wait_for_items():
    with small_pool() as pool:
        pool.peers.listen(address_of("shm"))
        caught = []

        def wait() -> None:
            try:
                pool.inbox.receive()
            except kvpool.ClosedError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        pool.close()
        thread.join(60)
        assert len(caught) == 1


def test_a_sender_that_is_killed_between_layers_leaves_nothing():
    child = Child()
    with pair_of(NEAR, child=child, clean=False) as pair:
        pair.b(
            "stream = pool.transfer(peer, pool.alloc(4), medium=kvpool.DRAM, layerwise=True)\n"
            "stream.send_layer(0)\nNone",
            peer=pair.to_a,
        )
        eventually(lambda: pair.a.stats().dram.reserved == 4)
        assert pair.a.peers.list()[0].reserved_blocks == 4
        assert pair.a.alloc(8, medium=DRAM, evict=False) is None if pair.a.stats().dram.free >= 8 else True
        child.kill()
        eventually(lambda: pair.a.audit().dram.free == 8)
        assert pair.a.inbox.receive(0) is None
