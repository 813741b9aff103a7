"""Full receivers, idle applications, cancelling, and a thousand transfers at once.

Bugs these tests are there to find: a refusal that is no error of a kind, or costs the sender its blocks (1); an abort
that never reaches the other side and holds its blocks there (2, 3); a request that ends twice or never.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest
from crew import far_nursery, near_nursery, reading, survivor_of, unix_address
from transfer.kit import SECRET, fill, small_pool
from victims import blocks_at_peers, check, eventually, repeats, seed_of, stamp

import kvpool

__all__ = ["far_nursery", "near_nursery"]

ROUTES = ["shm", "sock-unix", "sock-tcp"]
LEASE = 20.0  # a peer that is silent for one, on a busy machine, is lost before it can say that it writes no more


@pytest.fixture
def nursery(route, near_nursery, far_nursery):
    return far_nursery if route == "sock-tcp" else near_nursery


@pytest.mark.parametrize("route", ROUTES)
def test_a_full_receiver_refuses_and_the_sender_keeps_what_it_has(route, nursery):
    with survivor_of(route, nursery, lease_s=LEASE) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        addrs = pool.alloc(8)
        stamp(pool, addrs, 6)
        victim("mine = pool.alloc(41)\nNone")
        with pytest.raises(kvpool.OutOfBlocks) as caught:
            pool.transfer("victim", addrs).wait()
        assert (caught.value.requested, caught.value.free, caught.value.capacity) == (8, 7, 48)
        assert check(pool, addrs, 6) == []
        assert pool.audit().hbm.active == 8
        # Cached prompts make room, unless they must not.
        victim("pool.insert(list(range(41 * 16)), mine).close()")
        with pytest.raises(kvpool.OutOfBlocks):
            pool.transfer("victim", addrs, evict=False).wait()
        sent = pool.transfer("victim", addrs, evict=True).wait().addrs.tolist()
        assert victim("check(pool, sent, 6)", sent=sent) == []
        assert victim("stats = pool.audit().hbm\n(stats.active, stats.historical < 41)") == (8, True)
        victim("item = pool.inbox.receive(60)\nitem.close()")
        pool.free(addrs)


@pytest.mark.parametrize("route", ROUTES)
def test_an_application_that_never_receives_makes_its_peers_wait_not_fail(route, nursery):
    with survivor_of(route, nursery, received_max=5, lease_s=LEASE) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        addrs = pool.alloc(2)
        for number in range(5):
            pool.transfer("victim", addrs, private=b"%d" % number).wait()
        for _ in range(3):
            with pytest.raises(kvpool.Busy) as caught:
                pool.transfer("victim", addrs, private=b"too many").wait()
            assert caught.value.retry_after_us > 0
        assert pool.audit().hbm.active == 2
        assert victim("pool.audit().hbm.active, blocks_at_peers(pool)") == (10, 0)
        assert victim("item = pool.inbox.receive(60)\nwith item: said = item.private\nsaid") == b"0"
        pool.transfer("victim", addrs, private=b"5").wait()
        # The application gets an item after the sender's confirmation: the last one may not be there yet.
        said = victim(
            "said = []\nfor _ in range(5):\n    with pool.inbox.receive(60) as item: said.append(item.private)\nsaid"
        )
        assert said == [b"1", b"2", b"3", b"4", b"5"]
        pool.free(addrs)


@pytest.mark.parametrize("route", ROUTES)
def test_a_transfer_can_be_cancelled_at_any_moment_and_ends_once(route, nursery, request):
    dice = random.Random(seed_of(request))
    with survivor_of(route, nursery, lease_s=LEASE) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        victim.send("receive_for_ever(pool, tell)")
        pool = survivor.pool
        addrs = pool.alloc(24)
        theirs = pool.alloc(8, instance="victim")
        ends = dict.fromkeys(["done", "cancelled", "full"], 0)
        for number in range(1, repeats(150, long=3000)):
            # By a socket only what it takes at once: a frame that is cut short ends the link, which is tested below.
            own = addrs[: 1 if route.startswith("sock") else dice.choice([1, 8, 24])]
            stamp(pool, own, number)
            ends[cancel_one(pool, own, theirs, number, dice)] += 1
            assert victim.told() == []
        assert ends["cancelled"] > 10, ends
        pool.free(theirs)
        eventually(lambda: blocks_at_peers(pool) == 0 and pool.stats().hbm.active == 24)
        pool.free(addrs)
        victim.kill()


def cancel_one(pool, own, theirs, number, dice) -> str:
    """Starts a transfer of a random kind, and cancels it a random time later; how it ended."""
    kind = dice.choice(["plain", "stream", "fetch", "named", "insert"])
    handle = start_one(kind, pool, own, theirs, number, dice)
    until = time.monotonic() + dice.choice([0, 0, 1e-4, 1e-3]) * dice.random()
    while time.monotonic() < until:
        pass
    handle.cancel()
    error = handle.exception(60)
    assert handle.done()
    assert handle.cancel() is False
    assert repr(handle.exception(0)) == repr(error)
    if error is None:
        assert kind != "stream"
        if kind == "fetch":
            pool.free(handle.addrs)
        return "done"
    assert isinstance(error, (kvpool.Cancelled, kvpool.OutOfBlocks)), error
    return "cancelled" if isinstance(error, kvpool.Cancelled) else "full"


def start_one(kind, pool, own, theirs, number, dice):
    private = number.to_bytes(4, "little")
    if kind == "plain":
        return pool.transfer("victim", own, private=private, checksum=dice.random() < 0.5)
    if kind == "named":
        return pool.transfer("victim", own[:8], to=theirs[: len(own[:8])])
    if kind == "insert":
        return pool.transfer_with_insert("victim", [number, *range(len(own) * 16 - 1)], own, private=private)
    if kind == "fetch":
        return pool.fetch("victim", theirs)
    stream = pool.transfer("victim", own, private=private, layerwise=True)
    for layer in range(dice.randrange(5)):
        stream.send_layer(layer)
    return stream.transfer


@pytest.mark.parametrize("route", ["sock-unix", "sock-tcp"])
def test_cancelling_within_a_frame_keeps_the_connection(route, nursery, request):
    """It is finished for the sake of all others: lent blocks stay lent, and other transfers go on."""
    dice = random.Random(seed_of(request))
    rounds = repeats(200, long=1000)
    lost = 0
    with survivor_of(route, nursery, lease_s=LEASE) as survivor, nursery.victim() as victim:
        survivor.greet(victim)
        pool = survivor.pool
        addrs = pool.alloc(24)

        def met() -> tuple[Any, Any]:
            """The lent blocks, and the transfers that go on."""
            victim("call(pool, where)", where=survivor.address)
            eventually(lambda: pool.peers.list() != [])
            return pool.alloc(24, instance="victim"), pool.transfer("victim", addrs[:1], timeout=600, layerwise=True)

        lent, other = met()
        for _ in range(rounds):
            try:
                handle = pool.transfer("victim", addrs, to=lent)
                time.sleep(0.001 * dice.random())
                handle.cancel()
                with contextlib.suppress(kvpool.Cancelled):
                    handle.wait(60)
            except kvpool.PeerLost:  # a peer that reads nothing for 40 ms is dropped; a busy machine may be the reason
                lost += 1
                lent, other = met()
        assert lost < rounds / 10
        with other:
            for layer in range(4):
                other.send_layer(layer)
        assert other.transfer.wait(60).done()
        pool.free(lent)
        pool.free(addrs)
        victim("pool.inbox.receive(60).close()")
        victim.kill()
        del handle, other


@pytest.mark.parametrize("route", ROUTES)
def test_a_thousand_transfers_at_once_all_end(route, nursery):
    count = 1000
    options = {"routes": (route.partition("-")[0],), "secret": SECRET}
    with small_pool(count, 0, name="a", **options) as pool, nursery.victim() as victim:
        where = pool.peers.listen("tcp:127.0.0.1:0" if route == "sock-tcp" else unix_address())
        victim(
            "pool = small_pool(1000, 0, name='b', **options)\npool.peers.connect(where, timeout=60)",
            options=options,
            where=where,
        )
        addrs = pool.alloc(count)
        sent = fill(pool, addrs)
        handles = [pool.transfer("b", addrs[i : i + 1], private=b"%d" % i) for i in range(count)]
        there = [int(handle.wait(60).addrs[0]) for handle in handles]
        assert victim("content(pool, there)", there=there) == sent
        # The application gets an item after the sender's confirmation: the last one may not be there yet.
        said = victim(
            "said = []\nfor _ in range(count):\n"
            "    with pool.inbox.receive(60) as item: said.append(int(item.private))\nsaid",
            count=count,
        )
        assert sorted(said) == list(range(count))
        assert victim("pool.inbox.receive(0)") is None
        # One more at once than may be, both ways and none lost.
        waiting = [pool.fetch("b", there[:1], to=addrs[i : i + 1]) for i in range(100)]
        ends = [handle.exception(60) for handle in waiting]
        assert all(isinstance(end, kvpool.StaleAddress) for end in ends), ends[:3]
        eventually(lambda: blocks_at_peers(pool) == 0)
        assert pool.audit().hbm.active == count


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_pool_may_be_closed_at_any_moment(route, who, nursery, request):
    """The other one is informed, and keeps nothing of it."""
    dice = random.Random(seed_of(request))
    with survivor_of(route, nursery, lease_s=LEASE) as survivor, reading(survivor.pool) as reader:
        pool = survivor.pool
        for life in range(1, repeats(5, long=50)):
            with nursery.victim() as victim:
                survivor.greet(victim)
                if who == "sender":
                    victim.send(
                        "threading.Timer(after, pool.close).start()\n"
                        "try:\n    send_for_ever(pool, 'survivor', seed, first)\n"
                        "except kvpool.Error as error:\n    ended = type(error).__name__\nended",
                        seed=life, first=life << 16, after=0.03 * dice.random(),
                    )  # fmt: skip
                    assert victim.answer() == "ClosedError"
                else:
                    victim.send("time.sleep(after)\npool.close()", after=0.01 * dice.random())
                    with pytest.raises(kvpool.PeerLost):
                        send_until_lost(pool)
                    victim.answer()
                eventually(lambda: pool.peers.list() == [])
                eventually(lambda: blocks_at_peers(pool) == 0)  # it took its leave: no need to wait for its end
        assert reader.wrong == []


def send_until_lost(pool) -> None:
    addrs = pool.alloc(24)
    try:
        while True:
            for handle in [pool.transfer("victim", addrs[i : i + 8]) for i in (0, 8, 16)]:
                with contextlib.suppress(kvpool.OutOfBlocks):
                    handle.wait(60)
    finally:
        pool.free(addrs)
