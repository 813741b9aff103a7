"""transfer_with_insert: the receiver caches the prompt, and is not sent what it has."""

from __future__ import annotations

import numpy as np
import pytest
from transfer.kit import BLOCK_ROUTES, NEAR, content, fill, pair_of, prompt, store

import kvpool
from kvpool import DRAM


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_the_receiver_finds_the_prompt(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(3)
        sent = fill(pair.a, addrs)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(3), addrs, namespace="tenant").wait()
        got = pair.b(
            "with pool.match(prompt(3), namespace='tenant') as hit:\n"
            "    got = hit.addrs.tolist(), content(pool, hit.addrs)\n"
            "got"
        )
        assert got == (done.addrs.tolist(), sent)
        assert pair.b("pool.explain_match(prompt(3)).matched_tokens") == 0  # of another namespace
        assert pair.b("pool.inbox.receive(0)") is None  # no one needs to be told
        assert pair.b("pool.stats().hbm.pinned") == 0
        assert pair.a.stats().hbm.active == 3  # the sender keeps its blocks


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("theirs", ["", "tenant-b"])
def test_blocks_that_the_receiver_holds_in_another_namespace_are_sent_all_the_same(route, theirs):
    """The same prompt, with other content: an adapter's, say. Nothing of one tenant is answered with the other's."""
    with pair_of(route) as pair:
        before = pair.b(
            "addrs = pool.alloc(3)\nwritten = fill(pool, addrs, 9)\n"
            "pool.insert(prompt(3), addrs, namespace=theirs).close()\n(addrs.tolist(), written)",
            theirs=theirs,
        )
        addrs = pair.a.alloc(3)
        sent = fill(pair.a, addrs, 5)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(3), addrs, namespace="tenant-a").wait()
        assert done.stats.skipped_blocks == 0
        for whose, held in ((theirs, before), ("tenant-a", (done.addrs.tolist(), sent))):
            found = pair.b(
                "with pool.match(prompt(3), namespace=whose) as hit:\n"
                "    found = hit.addrs.tolist(), content(pool, hit.addrs)\n"
                "found",
                whose=whose,
            )
            assert found == held


@pytest.mark.parametrize("route", BLOCK_ROUTES)
@pytest.mark.parametrize("held", [0, 1, 2, 3])
def test_a_prefix_that_the_receiver_holds_is_not_sent(route, held):
    with pair_of(route) as pair:
        before = pair.b(
            "addrs = pool.alloc(held)\nwritten = fill(pool, addrs, 9)\n"
            "if held: pool.insert(prompt(4)[: 4 * held], addrs).close()\n(addrs.tolist(), written)",
            held=held,
        )
        addrs = pair.a.alloc(4)
        sent = fill(pair.a, addrs, 5)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(4), addrs).wait()
        assert done.stats.skipped_blocks == held
        assert done.stats.bytes == (4 - held) * pair.a.kv_layout.block_bytes
        assert done.addrs[:held].tolist() == before[0]
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == before[1] + sent[held:]
        assert pair.b("pool.stats().hbm.historical") == 4


def test_a_prompt_that_the_receiver_holds_is_not_sent_at_all():
    with pair_of(NEAR) as pair:
        where = pair.b("store(pool, prompt(3)).tolist()")
        done = pair.a.transfer_with_insert(pair.to_b, prompt(3), pair.a.alloc(3)).wait()
        assert done.addrs.tolist() == where
        assert (done.stats.skipped_blocks, done.stats.bytes, done.stats.calls) == (3, 0, 0)
        assert done.progress == (0, 0)


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_pages_that_arrived_in_another_way_meanwhile_are_duplicates(route):
    with pair_of(route) as pair:
        stream = pair.a.transfer_with_insert(pair.to_b, prompt(3), pair.a.alloc(3), layerwise=True)
        pair.b("wait_for(lambda: pool.stats().hbm.reserved == 3)")
        where = pair.b("store(pool, prompt(3)).tolist()")
        with stream:
            for layer in range(pair.a.kv_layout.layers):
                stream.send_layer(layer)
        assert stream.transfer.wait().addrs.tolist() == where
        assert pair.b("(pool.stats().hbm.historical, pool.stats().hbm.free)") == (3, 5)  # duplicates were freed


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_named_destinations_become_cached(route):
    with pair_of(route) as pair:
        lent = pair.a.alloc(2, instance=pair.to_b, medium=DRAM)
        addrs = pair.a.alloc(2)
        sent = fill(pair.a, addrs)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(2), addrs, to=lent).wait()
        assert done.addrs.tolist() == lent.tolist()
        assert pair.b("with pool.match(prompt(2)) as hit: got = content(pool, hit.addrs)\ngot") == sent
        with pytest.raises((kvpool.StaleAddress, kvpool.NotOwner)):
            pair.a.free(lent)  # they are the receiver's index's now
        assert pair.a.peers.list()[0].borrowed_blocks == 0


def test_the_application_is_notified_if_the_sender_wishes():
    with pair_of(NEAR) as pair:
        addrs = pair.a.alloc(2)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(2), addrs, namespace="n", private=b"id 4").wait()
        got = pair.b(
            "item = pool.inbox.receive(60)\n"
            "(item.inserted, item.namespace, item.private, item.tokens.tolist(), item.addrs.tolist(), item.closed)"
        )
        assert got == (True, "n", b"id 4", prompt(2).tolist(), done.addrs.tolist(), False)
        assert pair.b("pool.stats().hbm.pinned") == 2
        with pytest.raises(kvpool.StateError, match="index"):
            pair.b("item.take()")
        pair.b("item.close()")
        assert pair.b("(pool.stats().hbm.pinned, pool.stats().hbm.historical, item.closed)") == (0, 2, True)


def test_blocks_of_a_prompt_may_lie_anywhere_and_be_cached_here():
    with pair_of("sock-unix") as pair:
        first = store(pair.a, prompt(2))
        rest = pair.a.alloc(2, medium=DRAM)
        fill(pair.a, rest)
        addrs = np.concatenate([first, rest])
        done = pair.a.transfer_with_insert(pair.to_b, prompt(4), addrs).wait()
        assert pair.b("content(pool, addrs)", addrs=done.addrs) == content(pair.a, addrs)
