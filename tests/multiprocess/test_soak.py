"""Hours of work leave a process as large as minutes did.

Bugs these tests are there to find: a descriptor, a mapping or a few bytes that each request, or each meeting, leaves
behind (3, 10).

KVPOOL_SOAK_SECONDS says how long all routes together take, in place of the usual half a minute or of the eight hours
of KVPOOL_LONG=1.
"""

from __future__ import annotations

import os

import pytest
from crew import near_nursery, unix_address
from transfer.kit import SECRET, route_or_skip
from victims import LONG, Nursery, eventually, seed_of

__all__ = ["near_nursery"]

ROUTES = ("shm", "sock")
SECONDS = float(os.environ.get("KVPOOL_SOAK_SECONDS") or (8 * 3600 if LONG else 30)) / len(ROUTES)
WARM = 10  # samples of forty: until then caches fill, and every page of the pools is touched for the first time
SPARE = {"resident": 2 << 20, "descriptors": 4, "threads": 2, "mappings": 4, "shm": 4}


@pytest.mark.timeout(0 if LONG else 300 + SECONDS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_soak_leaves_memory_and_descriptors_flat(route, near_nursery: Nursery, request):
    seed = seed_of(request) % 1000
    options = {"routes": (route_or_skip(route),), "secret": SECRET, "dram_blocks": 32}
    with near_nursery.victim() as a, near_nursery.victim() as b:
        b("pool = big_pool(**options)\naddrs = pool.alloc(8)", options=options | {"name": "b"})
        where = b("pool.peers.listen(where)", where=unix_address())
        a("pool = big_pool(**options)\naddrs = pool.alloc(8)", options=options | {"name": "a"})
        for one, to, number in ((a, where, 1), (b, None, 2)):
            one.send("soak(pool, addrs, where, seconds, seed)", where=to, seconds=SECONDS, seed=seed * 2 + number)
        for one in (a, b):
            samples = one.answer(SECONDS + 100)
            assert len(samples) == 40
            for what, spare in SPARE.items():
                counts = [sample[what] for sample in samples]
                assert max(counts[-WARM:]) <= max(counts[WARM:-WARM]) + spare, (what, counts)
        for one in (a, b):
            one(
                "import contextlib\nfor peer in pool.peers.list():\n"
                "    with contextlib.suppress(kvpool.PeerLost):  # the other one has just disconnected\n"
                "        pool.peers.disconnect(peer.name)"
            )
        for one in (a, b):
            eventually(lambda one=one: one("blocks_at_peers(pool)") == 0)
            eventually(lambda one=one: one("dropped(pool)"))
            one("pool.audit()\nNone")
