"""Blocks whose content is still to come do not leave their pool, and peers are not told that it has them."""

from __future__ import annotations

import pytest
from transfer.kit import NEAR, content, fill, pair_of, prompt

import kvpool

ROUTES = ["loopback", NEAR]


@pytest.mark.parametrize("route", ROUTES)
def test_a_peer_cannot_fetch_a_block_before_its_content_is_there(route):
    with pair_of(route) as pair:
        addrs = pair.b(
            "addrs = pool.alloc(2, medium=kvpool.DRAM)\npool.insert(prompt(2), addrs, filled=False).close()\n"
            "addrs.tolist()"
        )
        with pytest.raises(kvpool.Busy, match="to come"):
            pair.a.fetch(pair.to_b, addrs, timeout=60).wait(60)
        assert pair.a.stats().hbm.free == pair.a.stats().hbm.capacity
        written = pair.b("written = fill(pool, addrs, 9)\npool.filled(addrs)\nwritten")
        fetched = pair.a.fetch(pair.to_b, addrs, timeout=60).wait(60)
        assert content(pair.a, fetched.addrs) == written
        assert pair.b("pool.evict(8)") == 2


@pytest.mark.parametrize("route", ROUTES)
def test_a_block_cannot_be_sent_before_its_content_is_there(route):
    with pair_of(route) as pair:
        addrs = pair.a.alloc(2)
        pair.a.insert(prompt(2), addrs, filled=False).close()
        with pytest.raises(kvpool.Busy, match="to come"):
            pair.a.transfer_with_insert(pair.to_b, prompt(2), addrs, timeout=60).wait(60)
        sent = fill(pair.a, addrs, 3)
        pair.a.filled(addrs)
        done = pair.a.transfer_with_insert(pair.to_b, prompt(2), addrs, timeout=60).wait(60)
        assert pair.b("content(pool, addrs)", addrs=done.addrs.tolist()) == sent


@pytest.mark.parametrize("route", ROUTES)
def test_a_receiver_that_is_still_filling_a_prompt_refuses_it_until_then(route):
    with pair_of(route) as pair:
        pair.b(
            "addrs = pool.alloc(3)\nfill(pool, addrs[:1], 5)\npool.insert(prompt(1), addrs[:1]).close()\n"
            "pool.insert(prompt(3), addrs, filled=False).close()"
        )
        addrs = pair.a.alloc(4)
        sent = fill(pair.a, addrs, 5)
        with pytest.raises(kvpool.Busy, match="to come"):
            pair.a.transfer_with_insert(pair.to_b, prompt(4), addrs, timeout=60).wait(60)
        # What its own insertion named stays cached, and what was sent for the same tokens is free again.
        assert pair.b("pool.match(prompt(4)).addrs.tolist() == addrs.tolist()")
        assert pair.b("(stats := pool.stats().hbm).free == stats.capacity - 3")
        pair.b("fill(pool, addrs[1:], 5)\npool.filled(addrs[1:])")
        again = pair.a.transfer_with_insert(pair.to_b, prompt(4), addrs, timeout=60).wait(60)
        assert again.stats.skipped_blocks == 3
        assert len(sent) == 4
