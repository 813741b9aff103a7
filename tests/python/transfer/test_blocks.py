"""Blocks arrive unchanged, by any route, from and to any medium, however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from transfer.kit import BLOCK_ROUTES, NEAR, can_checksum, content, fill, pair_of, prompt, small_layout

import kvpool
from kvpool import DRAM, HBM, MIXED

STRATEGIES = ["auto", "by_layer", "by_layer_agg", "by_request", "by_request_agg"]


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize(("source", "target"), [(HBM, HBM), (HBM, DRAM), (DRAM, HBM), (DRAM, DRAM)])
def test_blocks_arrive_as_they_were(route, source, target):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(4, medium=source)
        sent = fill(pair.a, addrs)
        done = pair.a.transfer(pair.to_b, addrs, medium=target).wait()
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent
        assert set(kvpool.media(done.addrs)) == {target}
        assert (done.stats.blocks, done.stats.skipped_blocks) == (4, 0)
        assert done.stats.bytes == 4 * pair.a.kv_layout.block_bytes
        assert done.progress == (done.stats.bytes, done.stats.bytes)
        assert done.stats.route == route.partition("-")[0]
        assert content(pair.a, addrs) == sent
        # The receiving application owns the reserved blocks now.
        assert pair.b("with pool.inbox.receive(60) as item: got = item.take()\n(item.peer, got.tolist())") == (
            pair.to_a,
            done.addrs.tolist(),
        )
        pair.b("pool.free(got)")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("orders", [("discrete", "aggregated"), ("aggregated", "discrete"), ("discrete", "discrete")])
def test_layouts_may_differ_in_their_order(route, orders):
    ours, theirs = (small_layout(order=order, layers=3) for order in orders)
    with pair_of(route, a={"layout": ours}, b={"layout": theirs}) as pair:
        addrs = pair.a.alloc(5, medium=MIXED)
        sent = fill(pair.a, addrs)
        for strategy in STRATEGIES:
            done = pair.a.transfer(pair.to_b, addrs, strategy=strategy, checksum=can_checksum(route)).wait()
            assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent, strategy
            assert done.stats.strategy == ("by_request_agg" if strategy == "auto" else strategy)
            pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_named_destinations_are_written_and_stay_lent(route):
    with pair_of(route) as pair:
        lent = pair.a.alloc(3, instance=pair.to_b)
        assert {kvpool.decode_address(addr).instance for addr in lent} == {pair.a.peers.list()[0].instance}
        assert (pair.a.peers.list()[0].borrowed_blocks, pair.b("pool.peers.list()[-1].lent_blocks")) == (3, 3)
        addrs = pair.a.alloc(3)
        for seed in range(3):
            sent = fill(pair.a, addrs, seed)
            done = pair.a.transfer(pair.to_b, addrs, to=lent[::-1]).wait()
            assert done.addrs.tolist() == lent[::-1].tolist()
            assert pair.b("content(pool, addrs)", addrs=lent[::-1]) == sent
        assert pair.b("(pool.stats().hbm.lent, pool.inbox.receive(0))") == (3, None)
        pair.a.free(np.concatenate([addrs[:1], lent, addrs[1:]]))  # one list for both kinds
        assert pair.b("pool.stats().hbm.lent") == 0
        assert pair.a.stats().hbm.active == 0


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("private", [b"", b"request 7", bytes(range(256)) * 4096], ids=["none", "short", "1 MiB"])
def test_private_bytes_arrive_with_the_blocks(route, private):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(2)
        sent = fill(pair.a, addrs)
        pair.a.transfer(pair.to_b, addrs, private=private).wait()
        got = pair.b(
            "with pool.inbox.receive(60) as item:\n"
            "    found = item.peer, content(pool, item.addrs), item.private, item.inserted\n"
            "found"
        )
        assert got == (pair.to_a, sent, private, False)
        assert pair.b("pool.stats().hbm.active") == 0  # closing the item freed the blocks that were not taken


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_private_bytes_with_named_destinations_leave_them_lent(route):
    with pair_of(route) as pair:
        lent = pair.a.alloc(1, instance=pair.to_b)
        pair.a.transfer(pair.to_b, pair.a.alloc(1), to=lent, private=memoryview(b"look")).wait()
        assert pair.b("item = pool.inbox.receive(60)\n(item.private, item.addrs.tolist())") == (b"look", lent.tolist())
        assert pair.b("(item.lent, item.inserted, 'lent' in repr(item))") == (True, False, True)
        with pytest.raises(kvpool.StateError, match="lent to"):
            pair.b("item.take()")
        assert not pair.b("item.closed")
        pair.b("item.close()")
        assert pair.b("(pool.stats().hbm.lent, item.closed, item.addrs.tolist())") == (1, True, lent.tolist())
        pair.a.free(lent)


@pytest.mark.parametrize("named", [False, True])
def test_an_item_of_blocks_that_stay_here_is_not_lent(named):
    with pair_of(NEAR) as pair:
        lent = pair.a.alloc(1, instance=pair.to_b) if named else None
        pair.a.transfer_with_insert(pair.to_b, prompt(1), pair.a.alloc(1), to=lent, private=b"").wait()
        pair.a.transfer(pair.to_b, pair.a.alloc(1)).wait()
        assert pair.b("with pool.inbox.receive(60) as item: found = item.lent, item.inserted\nfound") == (False, True)
        assert pair.b("with pool.inbox.receive(60) as item: found = item.lent, item.inserted\nfound") == (False, False)


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_large_blocks_arrive_too(route):
    """Several MiB: cut into parts, and written by more than one thread."""
    layout = kvpool.RawLayout(block_bytes=1 << 20)
    with pair_of(route, a={"layout": layout, "audit": False}, b={"layout": layout, "audit": False}) as pair:
        addrs = pair.a.alloc(6)
        sent = fill(pair.a, addrs)
        done = pair.a.transfer(pair.to_b, addrs, checksum=can_checksum(route)).wait()
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_cached_blocks_can_be_sent_and_stay_cached(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(2)
        sent = fill(pair.a, addrs)
        tokens = np.arange(8)
        with pair.a.insert(tokens, addrs) as held:
            done = pair.a.transfer(pair.to_b, held.addrs).wait()
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent
        with pair.a.match(tokens) as hit:
            assert hit.tokens == 8
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_blocks_that_are_freed_while_they_are_sent_are_not_reused(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(8)
        sent = fill(pair.a, addrs)
        stream = pair.a.transfer(pair.to_b, addrs, layerwise=True)
        pair.a.free(addrs)
        with pytest.raises(kvpool.OutOfBlocks):
            pair.a.alloc(1)
        for layer in range(pair.a.kv_layout.layers):
            stream.send_layer(layer)
        done = stream.finish().wait()
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == sent
        assert pair.a.stats().hbm.free == 8
        pair.b("pool.inbox.receive(60).close()")


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_both_sides_send_at_once(route):
    with pair_of(route, a={"dram_blocks": 32}, b={"dram_blocks": 32}) as pair:
        ours = pair.a.alloc(4)
        sent = fill(pair.a, ours, 1)
        theirs = pair.b("mine = pool.alloc(4)\nwanted = fill(pool, mine, 2)\nwanted")
        for _ in range(5):
            to_b = pair.a.transfer(pair.to_b, ours, medium=DRAM)
            pair.b("to_a = pool.transfer(peer, mine, medium=kvpool.DRAM)\nNone", peer=pair.to_a)
            assert pair.b("content(pool, addrs)", addrs=to_b.wait().addrs) == sent
            assert content(pair.a, pair.b("to_a.wait().addrs")) == theirs
            pair.a.inbox.receive(60).close()
            pair.b("pool.inbox.receive(60).close()")


def test_a_route_can_be_chosen_for_each_transfer():
    both = {"routes": (NEAR, "sock")}
    with pair_of(NEAR, a=both, b=both) as pair:
        assert pair.a.peers.list()[0].routes == (NEAR, "sock")
        for route in ("sock", NEAR):
            done = pair.a.transfer(pair.to_b, pair.a.alloc(1), route=route).wait()
            assert done.stats.route == route
            pair.b("pool.inbox.receive(60).close()")


def test_aggregated_blocks_take_fewer_calls():
    """Figure 11 of MemServe, in small: 2 * layers pieces a block, or one run."""
    layout = small_layout(order="discrete", layers=4)
    with pair_of(NEAR, a={"layout": layout}, b={"layout": layout}) as pair:
        addrs = pair.a.alloc(4)
        lent = pair.a.alloc(4, instance=pair.to_b)
        discrete = pair.a.transfer(pair.to_b, addrs, to=lent, strategy="by_request").wait().stats
        pair.a.free(lent)
    with pair_of(NEAR) as pair:
        addrs = pair.a.alloc(4)
        lent = pair.a.alloc(4, instance=pair.to_b)
        aggregated = pair.a.transfer(pair.to_b, addrs, to=lent, strategy="by_request_agg").wait().stats
        pair.a.free(lent)
    assert discrete.calls == 4 * 2 * 4
    assert aggregated.calls == aggregated.runs == 1
