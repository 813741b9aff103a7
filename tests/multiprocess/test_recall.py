"""Blocks that are recalled from a process that frees them, ignores it, is stopped or is killed.

Bugs these tests are there to find: lent blocks that never come back (a borrower that does not care); blocks that are
used again while somebody may still write to them (leave out the quarantine); an owner that waits for a borrower that
is stopped; a borrower that goes on to use what is not its own any more.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from transfer.kit import NEAR, Child, Pair, address_of, content, eventually, fill, pair_of

import kvpool

ROUTES = [NEAR, "sock-unix", "sock-tcp"]
SHORT = {"lease_s": 3.0}
LONG = {"lease_s": 300.0}

HEAR = """
heard = []
watching = pool.peers.on_change(lambda event: heard.append(event) if event.kind == "recalled" else None)
None
"""
LATE = """
def error_of(call):
    try:
        call()
    except kvpool.Error as error:
        return type(error).__name__
    return ""
errors = [error_of(call) for call in (
    lambda: pool.free(lent),
    lambda: pool.transfer(peer, pool.alloc(1), to=lent[:1], timeout=20).wait(),
    lambda: pool.fetch(peer, lent[:1], timeout=20).wait(),
)]
errors
"""


@pytest.fixture
def borrower() -> Iterator[Child]:
    child = Child()
    yield child
    if child.process.poll() is None:
        child.kill(signal.SIGCONT)
        child.close()


def borrow(pair: Pair, blocks: int) -> list[int]:
    lent = pair.b("lent = pool.alloc(n, instance=peer)\nlent.tolist()", n=blocks, peer=pair.to_a)
    pair.b(HEAR)
    assert pair.a.audit().hbm.lent == blocks
    return lent


def states(pool: kvpool.Pool) -> tuple[int, int, int]:
    hbm = pool.audit().hbm
    return hbm.lent, hbm.quarantined, hbm.free


@pytest.mark.parametrize("route", ROUTES)
def test_a_borrower_that_frees_them_ends_the_recall_at_once(route, borrower):
    with pair_of(route, child=borrower) as pair:
        lent = borrow(pair, 3)
        pair.b(
            "watching.close()\n"
            "give_back = lambda event: pool.free(event.addrs) if event.kind == 'recalled' else None\n"
            "watching = pool.peers.on_change(give_back)\n"
            "None"
        )
        began = time.monotonic()
        assert pair.a.peers.recall(pair.to_b, lent, timeout=60) == kvpool.RecallResult(3, 0, 0)
        assert time.monotonic() - began < 50
        assert states(pair.a) == (0, 0, 8)
        assert pair.b("pool.peers.list()[0].borrowed_blocks") == 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_borrower_may_fetch_what_they_hold_before_it_frees_them(route, borrower):
    with pair_of(route, child=borrower) as pair:
        borrow(pair, 2)
        sent = pair.b(
            "own = pool.alloc(2)\nsent = fill(pool, own, 5)\npool.transfer(peer, own, to=lent).wait()\nsent",
            peer=pair.to_a,
        )
        pair.b(
            """
def move(event):
    if event.kind == "recalled":
        kept.extend(content(pool, pool.fetch(peer, event.addrs).wait().addrs))
        pool.free(event.addrs)
kept = []
watching.close()
watching = pool.peers.on_change(move)
None
""",
            peer=pair.to_a,
        )
        assert pair.a.peers.recall(pair.to_b, timeout=60) == kvpool.RecallResult(2, 0, 0)
        assert sorted(pair.b("kept")) == sorted(sent)
        assert states(pair.a) == (0, 0, 8)


@pytest.mark.parametrize("route", ROUTES)
def test_a_borrower_that_ignores_the_recall_loses_them_at_the_deadline(route, borrower):
    with pair_of(route, child=borrower) as pair:
        borrow(pair, 3)
        result = pair.a.peers.recall(pair.to_b, 2, timeout=0.5)
        assert result.returned == 0
        assert result.freed + result.quarantined == 2
        if route != NEAR:
            assert result.quarantined == 0
        eventually(lambda: states(pair.a) == (1, 0, 7))
        eventually(lambda: pair.b("len(heard)") == 1)  # the callback's thread
        addrs, left = pair.b("(heard[0].addrs, heard[0].deadline - time.monotonic())")
        assert len(set(addrs)) == 2
        assert left < 0.5
        eventually(lambda: pair.b("pool.peers.list()[0].borrowed_blocks") == 1)
        errors = pair.b("lent = np.array(addrs, dtype=np.uint64)\n" + LATE, addrs=addrs, peer=pair.to_a)
        assert set(errors) == {"StaleAddress"}
        assert pair.a.peers.recall(pair.to_b, timeout=0.2).returned == 0
        eventually(lambda: states(pair.a) == (0, 0, 8))


@pytest.mark.parametrize("route", ROUTES)
def test_a_stopped_borrower_delays_no_one_and_wakes_up_without_them(route, borrower):
    """It is still connected when it wakes up: its lease is long."""
    with pair_of(route, child=borrower, a=LONG, b=LONG) as pair:
        borrow(pair, 2)
        borrower.kill(signal.SIGSTOP)
        began = time.monotonic()
        result = pair.a.peers.recall(pair.to_b, timeout=0.5)
        assert time.monotonic() - began < 120
        assert result == kvpool.RecallResult(0, *((0, 2) if route == NEAR else (2, 0)))
        assert states(pair.a) == ((0, 2, 6) if route == NEAR else (0, 0, 8))
        mine = pair.a.alloc(6)
        sent = fill(pair.a, mine, 3)
        borrower.kill(signal.SIGCONT)
        eventually(lambda: states(pair.a)[1] == 0)
        eventually(lambda: pair.b("pool.peers.list()[0].borrowed_blocks") == 0)
        assert set(pair.b(LATE, peer=pair.to_a)) == {"StaleAddress"}
        eventually(lambda: pair.b("[event.kind for event in heard]") == ["recalled"])  # by the callback's thread
        assert content(pair.a, mine) == sent
        pair.a.free(mine)


@pytest.mark.parametrize("route", ROUTES)
def test_a_borrower_that_is_killed_in_a_recall_leaves_nothing(route, borrower):
    with pair_of(route, child=borrower, a=LONG, b=LONG, clean=False) as pair:
        borrow(pair, 3)
        borrower.kill(signal.SIGSTOP)
        taken = pair.a.peers.recall(pair.to_b, 1, timeout=0.2)
        assert taken.returned == 0
        borrower.kill()
        with pytest.raises(kvpool.PeerLost):
            pair.a.peers.recall(pair.to_b, timeout=60)
        eventually(lambda: states(pair.a) == (0, 0, 8))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("route", ROUTES)
def test_an_owner_that_dies_in_a_recall_ends_its_loans(route, end, borrower):
    """The owner is the child here: it is killed, or stopped for longer than the lease, while the recall goes on."""
    with pair_of(route, child=borrower, a=SHORT, b=SHORT, clean=False) as pair:
        lent = pair.a.alloc(2, instance=pair.to_b)
        heard = []
        with pair.a.peers.on_change(lambda event: heard.append(event.kind)):
            pair.b(
                "threading.Thread(target=lambda: pool.peers.recall(peer, timeout=60), daemon=True).start()",
                peer=pair.to_a,
            )
            eventually(lambda: "recalled" in heard)
            if end == signal.SIGKILL:
                borrower.kill()
            else:
                borrower.kill(signal.SIGSTOP)
            eventually(lambda: "lost" in heard)
        pair.a.free(lent)  # the blocks that it had lent are gone with it
        with pytest.raises(kvpool.PeerLost):
            pair.a.transfer(pair.to_b, pair.a.alloc(1), to=lent[:1])
        pair.a.audit()
        if end == signal.SIGSTOP:  # it owns the lent blocks again: by shm, once they have reconnected
            borrower.kill(signal.SIGCONT)
            eventually(lambda: pair.b("pool.peers.list()") == [])
            pair.b("pool.peers.connect(where, timeout=60)", where=pair.a.peers.listen(address_of(route)))
            eventually(lambda: pair.b("(lambda hbm: hbm.lent + hbm.quarantined)(pool.audit().hbm)") == 0)


def test_blocks_that_are_not_lent_cannot_be_recalled(borrower):
    with pair_of(NEAR, child=borrower) as pair:
        lent = borrow(pair, 1)
        own = pair.a.alloc(1)
        with pytest.raises(kvpool.NotOwner):
            pair.a.peers.recall(pair.to_b, own)
        with pytest.raises(kvpool.ArgumentError):
            pair.a.peers.recall(pair.to_b, lent * 2)
        with pytest.raises(kvpool.PeerLost):
            pair.a.peers.recall("nobody", lent)
        with pytest.raises(kvpool.ArgumentTypeError):
            pair.a.peers.recall(pair.to_b, "all")
        assert states(pair.a)[0] == 1
        assert pair.a.peers.recall(pair.to_b, 0) == kvpool.RecallResult(0, 0, 0)
        pair.a.free(own)
        pair.b("pool.free(lent)")
