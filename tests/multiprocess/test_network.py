"""A connection that breaks, stalls, or works in one direction only: through a proxy of the test.

Bugs these tests are there to find (the numbers are those of docs/how-to/failures.md): a caller who waits for an answer
that cannot come (2); blocks that stay with a link that is gone (3); a pair that stays apart (4); half a transfer that
counts as a whole one (1); one slow peer that holds up the others (12).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from crew import Survivor, far_nursery, near_nursery, reading, survivor_of
from proxy import Proxy
from victims import LEASE, Nursery, Victim, blocks_at_peers, check, eventually, repeats, seed_of, stamp

import kvpool

__all__ = ["far_nursery", "near_nursery"]

ROUTES = ["sock-unix", "sock-tcp"]
NOTICED_SECONDS = 10 * (LEASE + 1)
HEALED_SECONDS = 30.0  # promised: two leases


@dataclass
class Wired:
    """A victim that reaches the survivor through a proxy only."""

    survivor: Survivor
    victim: Victim
    proxy: Proxy

    @property
    def pool(self) -> kvpool.Pool:
        return self.survivor.pool

    def meet(self) -> None:
        """Connects until both see each other: a peer that one side has lost may still seem present to the other."""

        def met() -> bool:
            here = self.victim("call(pool, where)", where=self.proxy.address)
            return here == "survivor" and [peer.name for peer in self.pool.peers.list()] == ["victim"]

        eventually(met)


@pytest.fixture
def lease() -> float:
    """A test that is not about it takes a longer one."""
    return LEASE


@pytest.fixture(params=ROUTES)
def wired(request: Any, lease: float, near_nursery: Nursery, far_nursery: Nursery) -> Iterator[Wired]:
    nursery = far_nursery if request.param == "sock-tcp" else near_nursery
    with (
        survivor_of(request.param, nursery, lease_s=lease) as survivor,
        Proxy(survivor.address) as proxy,
        nursery.victim() as victim,
    ):
        victim("pool = big_pool(name='victim', **options)\nNone", options=survivor.options)
        wired = Wired(survivor, victim, proxy)
        wired.meet()
        yield wired


@pytest.mark.parametrize("lease", [20.0])
def test_both_sides_notice_a_reset_within_a_transfer_and_reconnect(wired, request):
    dice = random.Random(seed_of(request))
    pool = wired.pool
    with reading(pool) as reader:
        for round_ in range(1, repeats(8, long=200)):
            assert wired.victim("len(pool.alloc(3, instance='survivor'))") == 3
            wired.proxy.limit(dice.randrange(24 * 128 * 1024 + 500))  # anywhere in its bytes
            wired.victim.send(
                "addrs = pool.alloc(24)\nstamp(pool, addrs, number)\n"
                "error = pool.transfer('survivor', addrs, private=number.to_bytes(4, 'little')).exception(60)\n"
                "intact = check(pool, addrs, number)\npool.free(addrs)\n(type(error).__name__, intact)",
                number=round_,
            )
            assert wired.victim.answer() in (("PeerLost", []), ("NoneType", []))
            eventually(lambda: pool.peers.list() == [], NOTICED_SECONDS)
            eventually(lambda: blocks_at_peers(pool) == 0)
            eventually(lambda: pool.stats().hbm.active == 0)  # the reader is done, and there is room for the next
            assert reader.wrong == []
            wired.meet()
        assert wired.victim("pool.audit().hbm.active") == 0


@pytest.mark.parametrize("lease", [20.0])
def test_a_reset_while_both_wait_ends_every_request(wired):
    pool = wired.pool
    theirs = wired.victim("addrs = pool.alloc(16)\nstamp(pool, addrs, 3)\naddrs.tolist()")
    addrs = pool.alloc(8)
    wired.proxy.hold(up=True, down=True)
    stream = pool.transfer("victim", addrs, layerwise=True)
    waiting = [pool.transfer("victim", addrs), pool.fetch("victim", theirs), stream.transfer]
    wired.proxy.reset()
    for one in waiting:
        assert isinstance(one.exception(60), kvpool.PeerLost)
    wired.proxy.hold(up=False, down=False)
    wired.meet()
    eventually(lambda: blocks_at_peers(pool) == 0)
    assert pool.stats().hbm.active == 8
    pool.free(addrs)
    mine = pool.fetch("victim", theirs).wait().addrs
    assert check(pool, mine, 3) == []
    pool.free(mine)


@pytest.mark.parametrize("way", ["both", "up", "down"])
def test_both_sides_notice_a_silent_cable_and_reconnect_when_it_works_again(wired, way):
    pool = wired.pool
    held = wired.victim("len(pool.alloc(5, instance='survivor'))")
    assert held == pool.audit().hbm.lent == 5
    addrs = pool.alloc(8)
    stamp(pool, addrs, 4)
    begin = time.monotonic()
    wired.proxy.hold(up=way != "down", down=way != "up")
    wired.victim.send(
        "addrs = pool.alloc(8)\n"
        "try:\n    error = pool.transfer('survivor', addrs, private=b'0', timeout=60).exception(60)\n"
        "except kvpool.PeerLost as lost:  # on a busy machine before it was begun\n    error = lost\n"
        "pool.free(addrs)\nerror"
    )
    try:
        ended = pool.transfer("victim", addrs, timeout=60).exception(60)
    except kvpool.PeerLost as lost:
        ended = lost
    assert ended is None or isinstance(ended, kvpool.PeerLost)
    # Bytes in one direction may still arrive: then the peer is not lost until the lease is over.
    assert isinstance(wired.victim.answer(), (kvpool.PeerLost, type(None)))
    eventually(lambda: pool.peers.list() == [], NOTICED_SECONDS)
    wired.victim("eventually(lambda: pool.peers.list() == [])")
    assert time.monotonic() - begin < NOTICED_SECONDS
    eventually(lambda: blocks_at_peers(pool) == 0)
    wired.proxy.hold(up=False, down=False)
    healed = time.monotonic()
    wired.meet()
    assert time.monotonic() - healed < HEALED_SECONDS
    wired.victim("while item := pool.inbox.receive(0): item.close()")
    while item := pool.inbox.receive(0):
        item.close()
    sent = pool.transfer("victim", addrs).wait().addrs.tolist()
    assert (
        wired.victim("item = pool.inbox.receive(60)\nwith item: wrong = check(pool, sent, 4)\nwrong", sent=sent) == []
    )
    pool.free(addrs)


def test_peers_reconnect_after_a_flapping_cable(wired, request):
    dice = random.Random(seed_of(request))
    pool = wired.pool
    addrs = pool.alloc(4)
    for flap in range(1, repeats(12, long=500)):
        wired.proxy.hold(up=dice.random() < 0.7, down=dice.random() < 0.7)
        time.sleep(LEASE * dice.choice([0.1, 0.1, 0.4, 1.3]))
        wired.proxy.hold(up=False, down=False)
        if dice.random() < 0.3:
            wired.proxy.reset()
        wired.meet()
        stamp(pool, addrs, flap)
        while True:
            with contextlib.suppress(kvpool.PeerLost):
                sent = pool.transfer("victim", addrs, timeout=5).wait().addrs.tolist()
                break
            wired.meet()
        assert wired.victim("wrong = check(pool, sent, number)\nwrong", sent=sent, number=flap) == []
        wired.victim("while item := pool.inbox.receive(0): item.close()")
    pool.free(addrs)


@pytest.mark.parametrize("route", ROUTES)
def test_connect_does_not_trust_a_connection_that_the_peer_has_lost(route, near_nursery, far_nursery):
    """The peer's goodbye is late: this side still has a connection, of which nothing will come."""
    nursery = far_nursery if route == "sock-tcp" else near_nursery
    with survivor_of(route, nursery) as survivor, Proxy(survivor.address) as proxy, nursery.victim() as victim:
        pool = survivor.pool
        options = survivor.options | {"name": "victim", "lease_s": 60.0}
        victim("pool = big_pool(**options)\naddrs = pool.alloc(4)", options=options)
        assert victim("pool.peers.connect(where, timeout=60)", where=proxy.address) == "survivor"
        eventually(lambda: [peer.name for peer in pool.peers.list()] == ["victim"])
        proxy.hold(up=True, down=True)
        eventually(lambda: pool.peers.list() == [], NOTICED_SECONDS)
        assert victim("[peer.name for peer in pool.peers.list()]") == ["survivor"]
        assert victim("pool.peers.connect(where, timeout=60)", where=survivor.address) == "survivor"
        sent = victim("stamp(pool, addrs, 7)\npool.transfer('survivor', addrs, timeout=20).wait().addrs.tolist()")
        assert check(pool, sent, 7) == []
        assert [peer.name for peer in pool.peers.list()] == ["victim"]
        with pool.inbox.receive(60):
            pass
        assert blocks_at_peers(pool) == 0


@pytest.mark.parametrize("lease", [60.0])
def test_a_reader_that_reads_nothing_delays_no_other(wired, near_nursery, far_nursery):
    """A zero window: buffers fill up, and sending to the others goes on."""
    nursery = far_nursery if wired.survivor.route == "sock-tcp" else near_nursery
    pool = wired.pool
    with nursery.victim() as quick:
        wired.survivor.greet(quick, "quick")
        quick.send("receive_for_ever(pool, tell)")
        addrs = pool.alloc(24)
        stamp(pool, addrs, 1)
        stuck = [pool.alloc(8, instance="victim"), pool.alloc(8, instance="victim")]
        wired.proxy.hold(up=False, down=True)
        handles = [pool.transfer("victim", addrs[:8], to=to, private=b"0", timeout=600) for to in stuck]
        for _ in range(100):
            with contextlib.suppress(kvpool.OutOfBlocks):
                pool.transfer("quick", addrs[:2], private=(1).to_bytes(4, "little"), priority="decode").wait(30)
        assert not any(handle.done() for handle in handles)  # all of that was before a lease could have ended them
        wired.victim.kill()
        for handle in handles:
            assert isinstance(handle.exception(60), kvpool.PeerLost)
        assert quick.told() == []
        wired.proxy.hold(up=False, down=False)
        quick.kill()
        pool.free(addrs)
