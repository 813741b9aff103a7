"""Transfers of blocks in pieces that end early, and blocks that are freed meanwhile: nobody's units are touched."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from space_kit import comb, layered, layout, space_of
from transfer.kit import Child, address_of, blocks_at_peers, eventually
from transfer.test_space_pieces import CHILD, LAYERS, ROUTES, SETTINGS, SIDES, contents, pool_of, two_of, write

import kvpool
from kvpool import DRAM, HBM


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_sources_that_are_freed_while_they_are_sent_keep_their_pieces_until_all_has_arrived(route, sides):
    with two_of(route, sides) as (a, b, to_b):
        for at in range(12):
            addrs = a.alloc(3)
            sent = write(a, addrs, at)
            transfer = a.transfer(to_b, addrs, private=b"")
            a.free(addrs)
            others = a.alloc(3)
            write(a, others, 100 + at)
            transfer.wait()
            with b.inbox.receive(60) as item:
                assert contents(b, item.addrs) == sent
            a.free(others)
            eventually(lambda: a.stats().hbm.free == 6)


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("route", ROUTES)
def test_a_cancel_in_the_middle_leaves_nothing_reserved_and_the_next_transfer_is_whole(route, sides):
    with two_of(route, sides) as (a, b, to_b):
        addrs = a.alloc(6)
        sent = write(a, addrs, 1)
        for at in range(12):
            transfer = a.transfer(to_b, addrs, private=b"")
            time.sleep(at % 4 * 0.0003)
            transfer.cancel()
            with contextlib.suppress(kvpool.Cancelled):
                transfer.wait()
                with b.inbox.receive(60) as item:
                    assert contents(b, item.addrs) == sent
            eventually(lambda: blocks_at_peers(a) == blocks_at_peers(b) == 0)
            eventually(lambda: b.stats().hbm.free == 6)
        a.transfer(to_b, addrs, private=b"").wait()
        with b.inbox.receive(60) as item:
            assert contents(b, item.addrs) == sent


@pytest.mark.parametrize("closes", ["sender", "receiver"])
@pytest.mark.parametrize("route", ROUTES)
def test_units_of_a_pool_that_closes_in_the_middle_are_another_models_and_are_not_written(route, closes):
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(space_of(12 * LAYERS, 12 * LAYERS)) for _ in range(2)]
        for space in spaces:
            small = space.load("small", layout(1))
            comb(small, 12 * LAYERS, HBM)
            comb(small, 12 * LAYERS, DRAM)
        a, b = (space.load("a", layered(LAYERS), pieces="layer", routes=(route,), **SETTINGS) for space in spaces)
        to_b = a.peers.connect(b.peers.listen(address_of("sock")), timeout=60)
        addrs = a.alloc(2)
        under_way = threading.Event()

        def send() -> None:
            with contextlib.suppress(kvpool.Error):
                while True:
                    a.transfer(to_b, addrs, private=b"").wait(30)
                    under_way.set()
                    b.inbox.receive(30).close()

        sender = threading.Thread(target=send)
        sender.start()
        assert under_way.wait(60)
        space = spaces[closes == "receiver"]
        (b if closes == "receiver" else a).close()
        again = space.load("again", layered(LAYERS), pieces="layer")
        mine = again.alloc(int(again.stats().hbm.free))
        assert len(mine) >= 2
        held = write(again, mine, 3)
        sender.join(60)
        assert not sender.is_alive()
        assert contents(again, mine) == held
        for one in spaces:
            one.audit()


def test_a_receiver_that_is_killed_leaves_the_sender_its_blocks():
    with pool_of("cut") as pool:
        for _ in range(3):
            child = Child()
            try:
                child(CHILD, side="cut")
                to_b = pool.peers.connect(child("pool.peers.listen(address)", address=address_of("sock")), timeout=60)
                addrs = pool.alloc(6)
                sent = write(pool, addrs, 8)
                child.send("while True:\n    pool.inbox.receive(60).close()")
                pool.transfer(to_b, addrs, private=b"").wait()
                transfer = pool.transfer(to_b, addrs, private=b"")
                child.kill()
                with contextlib.suppress(kvpool.PeerLost):  # it may have been faster
                    transfer.wait()
                assert contents(pool, addrs) == sent
            finally:
                child.close()
            eventually(lambda: pool.peers.list() == [])
            pool.free(addrs)
            eventually(lambda: pool.stats().hbm.free == 6)
