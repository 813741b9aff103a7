"""What a fetch says of itself, the route that it is told to take, and the checksum of what it has brought."""

from __future__ import annotations

import pytest
from transfer.kit import BLOCK_ROUTES, can_checksum, content, pair_of

import kvpool

SHOW = "shown = pool.alloc(n)\nsent = fill(pool, shown, 7)\n(shown.tolist(), sent)"


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_the_owner_says_how_it_has_written(route):
    with pair_of(route) as pair:
        shown, sent = pair.b(SHOW, n=3)
        name = pair.a.peers.list()[0].routes[0]
        done = pair.a.fetch(pair.to_b, shown, checksum=can_checksum(route)).wait()
        assert content(pair.a, done.addrs) == sent
        assert (done.stats.route, done.stats.blocks) == (name, 3)
        assert done.stats.bytes == 3 * pair.a.kv_layout.block_bytes
        assert done.stats.calls >= done.stats.runs > 0
        assert 0 <= done.stats.write_us <= done.stats.total_us
        again = pair.a.fetch(pair.to_b, shown, route=name).wait()
        assert again.stats.route == name
        assert content(pair.a, again.addrs) == sent


def test_a_route_that_the_owner_has_not_is_refused_and_costs_nothing():
    with pair_of("sock-unix") as pair:
        shown, _ = pair.b(SHOW, n=2)
        free = pair.a.stats().hbm.free
        with pytest.raises(kvpool.Unsupported, match="no route shm from these blocks"):
            pair.a.fetch(pair.to_b, shown, route="shm").wait()
        with pytest.raises(kvpool.ArgumentError, match="32 bytes"):
            pair.a.fetch(pair.to_b, shown, route="x" * 33)
        assert pair.a.stats().hbm.free == free
        assert pair.a.audit().hbm.reserved == 0
