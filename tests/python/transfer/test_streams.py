"""Batches, streams of layers, and fetches."""

from __future__ import annotations

import pytest
from transfer.kit import (
    BLOCK_ROUTES,
    NEAR,
    can_checksum,
    content,
    eventually,
    fill,
    pair_of,
    prompt,
)

import kvpool
from kvpool import DRAM


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_batch_starts_many(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(4)
        sent = fill(pair.a, addrs)
        lent = pair.a.alloc(1, instance=pair.to_b, medium=DRAM)
        handles = pair.a.batch.transfer(
            [
                kvpool.TransferSpec(pair.to_b, addrs[:1], private=b"0"),
                kvpool.TransferSpec(pair.to_b, addrs[1:3], tokens=prompt(2), checksum=can_checksum(route)),
                kvpool.TransferSpec(pair.to_b, addrs[3:], to=lent, priority="decode"),
            ]
        )
        where = [addr for handle in handles for addr in handle.wait().addrs]
        assert pair.b("content(pool, addrs)", addrs=where) == sent
        assert pair.b("with pool.match(prompt(2)) as hit: tokens = hit.tokens\ntokens") == 8
        pair.b("pool.inbox.receive(60).close()")
        pair.a.free(lent)
        assert pair.a.batch.transfer([]) == []


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("strategy", ["by_layer", "by_layer_agg", "auto"])
@pytest.mark.parametrize("named", [False, True])
def test_a_stream_sends_layers_as_they_are_computed(route, strategy, named):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(3)
        fill(pair.a, addrs, 1)
        to = pair.a.alloc(3, instance=pair.to_b) if named else None
        with pair.a.transfer(
            pair.to_b, addrs, to=to, strategy=strategy, checksum=can_checksum(route), layerwise=True
        ) as stream:
            fill(pair.a, addrs, 2)  # nothing was sent yet
            sent = content(pair.a, addrs)
            stream.send_layer(1)
            with pytest.raises(kvpool.ArgumentError):
                stream.send_layer(1)
            with pytest.raises(kvpool.ArgumentError):
                stream.send_layer(2)
            with pytest.raises(kvpool.ArgumentError):
                stream.send_layer(-1)
            with pytest.raises(kvpool.ArgumentTypeError):
                stream.send_layer("0")
            with pytest.raises(kvpool.StateError):
                stream.finish()
            stream.send_layer(0)
        done = stream.transfer.wait()
        assert stream.finish() is done
        with pytest.raises(kvpool.StateError):
            stream.send_layer(0)
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent
        assert done.stats.strategy == ("by_layer_agg" if strategy == "auto" else strategy)
        pair.a.free(to) if named else pair.b("pool.inbox.receive(60).close()")


def test_an_exception_cancels_a_stream():
    with pair_of(NEAR) as pair:
        with pytest.raises(RuntimeError), pair.a.transfer(pair.to_b, pair.a.alloc(1), layerwise=True) as stream:
            stream.send_layer(0)
            raise RuntimeError
        assert isinstance(stream.transfer.exception(60), kvpool.Cancelled)
        eventually(lambda: pair.b("pool.stats().hbm.free") == 8)


def test_a_plain_transfer_is_no_stream():
    with pair_of(NEAR) as pair:
        transfer = pair.a.transfer(pair.to_b, pair.a.alloc(1))
        assert isinstance(transfer, kvpool.Transfer)
        assert not {"send_layer", "finish", "_send_layer", "_finish"} & set(dir(transfer))
        with pytest.raises(TypeError):
            kvpool.TransferStream(transfer, None)  # type: ignore[call-arg]
        transfer.wait()
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_blocks_can_be_fetched(route):
    with pair_of(route) as pair:
        theirs, written = pair.b("mine = pool.alloc(2, medium=kvpool.MIXED)\n(mine.tolist(), fill(pool, mine))")
        done = pair.a.fetch(pair.to_b, theirs).wait()
        assert content(pair.a, done.addrs) == written
        assert pair.a.stats().hbm.active == 2
        mine = pair.a.alloc(2, medium=DRAM)
        done = pair.a.fetch(pair.to_b, theirs, to=mine, priority="decode").wait()
        assert done.addrs.tolist() == mine.tolist()
        assert content(pair.a, mine) == written
        assert pair.b("(pool.stats().hbm.active, pool.inbox.receive(0))") == (2, None)


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_cached_blocks_can_be_fetched_and_stale_ones_not(route):
    with pair_of(route) as pair:
        cached, written = pair.b("mine = pool.alloc(2)\nwas = fill(pool, mine)\npool.insert(prompt(2), mine).close()\n"
                                 "(mine.tolist(), was)")  # fmt: skip
        assert content(pair.a, pair.a.fetch(pair.to_b, cached).wait().addrs) == written
        pair.b("pool.delete(prompt(2))")
        free = pair.a.stats().hbm.free
        with pytest.raises(kvpool.StaleAddress) as caught:
            pair.a.fetch(pair.to_b, cached).wait()
        assert caught.value.address in cached
        eventually(lambda: pair.a.stats().hbm.free == free)  # blocks that were allocated for it are free again
        mine = pair.a.alloc(2)
        assert isinstance(pair.a.fetch(pair.to_b, cached, to=mine).exception(60), kvpool.StaleAddress)
        pair.a.free(mine)  # the caller owns the named blocks again


def test_a_fetch_needs_room_here():
    with pair_of(NEAR) as pair:
        theirs = pair.b("pool.alloc(2).tolist()")
        mine = pair.a.alloc(7)
        with pytest.raises(kvpool.OutOfBlocks):
            pair.a.fetch(pair.to_b, theirs)
        pair.a.insert(prompt(7), mine).close()
        with pytest.raises(kvpool.OutOfBlocks):
            pair.a.fetch(pair.to_b, theirs, evict=False)
        assert pair.a.fetch(pair.to_b, theirs).wait().done()
        assert pair.a.stats().dram.historical == 1
