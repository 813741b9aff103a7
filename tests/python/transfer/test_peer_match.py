"""Matches at peers: what they have cached of a prompt, held until it is closed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading

import numpy as np
import pytest
from attach_kit import two, url
from kit import refused
from transfer.kit import (
    BLOCK_ROUTES,
    NEAR,
    NEAR_ROUTES,
    Child,
    address_of,
    content,
    eventually,
    fill,
    local_settings,
    pair_of,
    prompt,
    small_pool,
    stop_process,
    store,
)

import kvpool
from kvpool import DRAM, ArgumentError, ArgumentTypeError, Busy, Cancelled, ClosedError, PeerLost, StateError

__all__ = ["url"]

SETTINGS = local_settings("sock-unix")
BRIEF = SETTINGS | {"lease_s": 3.0}  # a peer that is stopped is lost soon
PATIENT = SETTINGS | {"lease_s": 60.0}  # and here not while the test runs
LISTEN = "pool = small_pool(name='c', **settings)\npool.peers.listen(address_of('sock-unix'))"
EVICT = "pool.evict(100, kvpool.MIXED)"


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_peer_keeps_what_it_has_found_until_the_match_is_closed(route):
    with pair_of(route) as pair:
        sent = pair.b(
            "addrs = np.concatenate([pool.alloc(2), pool.alloc(1, medium=kvpool.DRAM)])\n"
            "written = fill(pool, addrs, 5)\npool.insert(prompt(3), addrs, namespace='tenant').close()\nwritten"
        )
        assert pair.a.peers.match(pair.to_b, prompt(4)).tokens == 0  # of another namespace
        with pair.a.peers.match(pair.to_b, prompt(4), "tenant") as found:
            assert (found.peer, found.tokens, found.closed) == (pair.to_b, 12, False)
            assert pair.b(EVICT) == 0
            mine = pair.a.fetch(pair.to_b, found.addrs).wait().addrs
            assert content(pair.a, mine) == sent
            with pytest.raises(StateError, match="pinned"):
                pair.b("pool.delete(prompt(3), namespace='tenant')")
        assert found.closed
        assert found.tokens == 12  # what was found remains known
        pair.b("wait_for(lambda: " + EVICT + ")")
        pair.a.free(mine)


def test_a_match_is_a_use_at_the_peer_and_does_not_count_there():
    with pair_of(NEAR) as pair:
        pair.b("for at in range(3): store(pool, prompt(1, at))")
        pair.a.peers.match(pair.to_b, prompt(1, 0)).close()
        pair.b("wait_for(lambda: pool.stats().hbm.pinned == 0)\npool.evict(2, kvpool.HBM)")
        assert pair.b("[pool.explain_match(prompt(1, at)).matched_tokens for at in range(3)]") == [4, 0, 0]
        assert pair.b("pool.stats().match_calls") == 0


def test_a_hold_ends_at_its_deadline_and_is_closed_here_no_later():
    with pair_of("sock-unix") as pair:
        pair.b("store(pool, prompt(3))")
        found = pair.a.peers.match(pair.to_b, prompt(3), hold=0.05)
        assert found.tokens == 12
        pair.b("wait_for(lambda: pool.evict(3, kvpool.HBM) == 3)")
        assert found.closed
        with pytest.raises(ClosedError), found:
            pass


def test_a_dropped_handle_lets_go():
    with pair_of(NEAR) as pair:
        pair.b("store(pool, prompt(3))")
        found = pair.a.peers.match(pair.to_b, prompt(3))
        assert pair.b("pool.evict(3, kvpool.HBM)") == 0
        del found
        pair.b("wait_for(lambda: pool.evict(3, kvpool.HBM) == 3)")


@pytest.mark.parametrize("how", ["killed", "stopped", "disconnected"])
def test_a_peer_that_is_gone_holds_nothing(how):
    child = Child()
    with small_pool(name="owner", **BRIEF) as pool:
        address = pool.peers.listen(address_of("sock-unix"))
        child(
            "pool = small_pool(name='asker', **settings)\npeer = pool.peers.connect(address)",
            settings=BRIEF,
            address=address,
        )
        store(pool, prompt(3))
        assert child("found = pool.peers.match(peer, prompt(3), hold=600)\nfound.tokens") == 12
        assert pool.evict(3, kvpool.HBM) == 0
        if how == "killed":
            child.kill()
        elif how == "stopped":
            stop_process(child.process.pid)
        else:
            pool.peers.disconnect("asker")
        eventually(lambda: pool.evict(3, kvpool.HBM) == 3)
        if how == "stopped":
            child.kill(signal.SIGCONT)
    child.close()


def test_what_is_not_found_there_is_no_error():
    with pair_of(NEAR) as pair:
        for tokens in (prompt(2), [], [1]):
            with pair.a.peers.match(pair.to_b, tokens) as found:
                assert (found.tokens, found.addrs.tolist(), found.closed) == (0, [], False)


# ---- several peers


def test_several_peers_are_asked_at_once_and_each_has_its_own_answer():
    with small_pool(name="a", **SETTINGS) as a:
        others = [small_pool(name=f"p{n}", **SETTINGS) for n in range(4)]
        names = [a.peers.connect(one.peers.listen(address_of("sock-unix"))) for one in others]
        for n, one in enumerate(others):
            if n:
                store(one, prompt(n))
        found = a.peers.match([*names, "nobody"], prompt(4))
        assert [one.peer for one in found] == [*names, "nobody"]
        assert all(one.done() for one in found)
        assert [one.tokens for one in found[:4]] == [0, 4, 8, 12]
        assert isinstance(found[4].exception(), PeerLost)
        with pytest.raises(PeerLost, match="nobody"):
            assert found[4].tokens
        with pytest.raises(PeerLost):
            a.peers.match("nobody", prompt(4))
        assert a.peers.match([], prompt(4)) == []
        for one in found:
            one.close()
        for one in others:
            eventually(lambda one=one: one.stats().hbm.pinned == 0)
            one.close()


def test_a_silent_peer_delays_no_other(url):
    """One that is stopped answers nothing; the others have answered long before its deadline."""
    child = Child()
    with small_pool(name="a", **PATIENT) as a, small_pool(name="b", **SETTINGS) as b:
        near = a.peers.connect(b.peers.listen(address_of("sock-unix")))
        address = child(
            "pool = small_pool(name='c', **settings)\npool.peers.listen(address_of('sock-unix'))", settings=PATIENT
        )
        far = a.peers.connect(address)
        store(b, prompt(2))
        child.kill(signal.SIGSTOP)
        asked = a.peers.match([far, near], prompt(2), timeout=600, wait=False)
        assert asked[1].wait(60).tokens == 8
        assert not asked[0].done()
        asked[0].close()
        with pytest.raises(kvpool.DeadlineExceeded):
            a.peers.match(far, prompt(2), timeout=0.1)
        child.kill(signal.SIGCONT)
        child("pool.close()")
    child.close()


def test_members_of_a_cluster_are_asked_by_name(url):
    with two(url) as (a, b):
        store(b, prompt(2))
        asked = a.peers.match(["b", "nobody"], prompt(2), wait=False)  # connects, in another thread
        assert asked[0].wait().tokens == 8
        assert isinstance(asked[1].exception(), PeerLost)
        assert [peer.name for peer in a.peers.list()] == ["b"]


# ---- without waiting


def test_a_match_that_was_not_waited_for_can_be_awaited_polled_and_closed():
    with pair_of("sock-unix") as pair:
        pair.b("store(pool, prompt(3))")

        async def ask():
            found = await pair.a.peers.match(pair.to_b, prompt(3), wait=False)
            return (await found).tokens

        assert asyncio.run(ask()) == 12
        found = pair.a.peers.match(pair.to_b, prompt(3), wait=False)
        assert select.select([found], [], [], 60)[0] == [found]
        assert found.done()
        assert found.exception() is None
        early = pair.a.peers.match(pair.to_b, prompt(3), wait=False)
        early.close()  # before the answer, or behind it
        assert early.closed
        assert early.exception() is None or isinstance(early.exception(), Cancelled)
        found.close()
        pair.b("wait_for(lambda: pool.evict(3, kvpool.HBM) == 3)")


def test_a_question_that_is_open_says_so():
    child = Child()
    with small_pool(name="a", **PATIENT) as a:
        address = child(
            "pool = small_pool(name='c', **settings)\npool.peers.listen(address_of('sock-unix'))", settings=PATIENT
        )
        peer = a.peers.connect(address)
        child("store(pool, prompt(2))")
        child.kill(signal.SIGSTOP)
        asked = a.peers.match(peer, prompt(2), wait=False)
        assert not asked.done()
        assert "under way" in repr(asked)
        for name in ("tokens", "addrs"):
            with pytest.raises(StateError, match="under way"):
                getattr(asked, name)
        with pytest.raises(TimeoutError, match="under way"):
            asked.wait(0.01)
        asked.close()
        with pytest.raises(Cancelled):
            asked.wait()
        child.kill(signal.SIGCONT)
        child("wait_for(lambda: pool.evict(2, kvpool.HBM) == 2)")  # the late answer was for nobody
        child("pool.close()")
    child.close()


# ---- limits and bad arguments


def test_the_owner_bounds_how_long_and_how_much_a_peer_holds():
    with pair_of("sock-unix", b={"reserve_max_s": 3.0, "viewed_max": 5}) as pair:
        pair.b("store(pool, prompt(3))")
        found = pair.a.peers.match(pair.to_b, prompt(3), hold=600)
        with pytest.raises(Busy) as busy:
            pair.a.peers.match(pair.to_b, prompt(3), hold=600)
        assert busy.value.limit == 5
        pair.b("wait_for(lambda: pool.evict(3, kvpool.HBM) == 3)")
        assert found.closed


def test_bad_arguments_are_typed_errors_and_nobody_is_asked():
    with pair_of(NEAR) as pair:
        a, b = pair.a, pair.to_b
        for error, call in [
            (ArgumentTypeError, lambda: a.peers.match(7, prompt(1))),
            (ArgumentTypeError, lambda: a.peers.match([7], prompt(1))),
            (ArgumentTypeError, lambda: a.peers.match({b}, prompt(1))),
            (ArgumentTypeError, lambda: a.peers.match(b, object())),
            (ArgumentTypeError, lambda: a.peers.match(b, prompt(1), namespace=1)),
            (ArgumentTypeError, lambda: a.peers.match(b, prompt(1), wait=1)),
            (ArgumentTypeError, lambda: a.peers.match(b, prompt(1), hold="1")),
            (ArgumentError, lambda: a.peers.match(b, prompt(1), hold=-1)),
            (ArgumentError, lambda: a.peers.match(b, prompt(1), timeout=-1)),
            (ArgumentError, lambda: a.peers.match(b, np.zeros((1 << 20) + 4, np.int32))),
            (ArgumentError, lambda: a.peers.match(b, prompt(1), "n" * 65537)),
        ]:
            with refused(a, error):
                call()
    with small_pool() as alone, refused(alone, StateError, "no peers"):
        alone.peers.match("b", prompt(1))


def test_closing_the_pool_ends_what_is_open():
    with pair_of(NEAR, clean=False) as pair:
        pair.b("store(pool, prompt(3))")
        found = pair.a.peers.match(pair.to_b, prompt(3))
        pair.a.close()
        assert found.closed
        found.close()
        with pytest.raises(ClosedError):
            pair.a.peers.match(pair.to_b, prompt(3))
        pair.b("wait_for(lambda: pool.evict(3, kvpool.HBM) == 3)")


def test_a_forked_child_leaves_the_hold_to_its_parent():
    with pair_of("sock-unix") as pair:
        pair.b("store(pool, prompt(3))")
        found = pair.a.peers.match(pair.to_b, prompt(3))
        child = os.fork()
        if child == 0:
            found.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert pair.b("pool.evict(3, kvpool.HBM)") == 0
        assert not found.closed
        found.close()


def test_many_threads_match_and_fetch_and_read_no_wrong_byte():
    with small_pool(32, 0, name="a", **SETTINGS) as a, small_pool(16, 0, name="b", **SETTINGS) as b:
        peer = a.peers.connect(b.peers.listen(address_of("sock-unix")))
        stamps: dict[int, object] = {}
        for at in range(6):
            addrs = b.alloc(2)
            stamps[at] = fill(b, addrs, 10 * at)
            b.insert(prompt(2, at), addrs).close()
        wrong: list[object] = []

        def work(first: int) -> None:
            for turn in range(60):
                at = (first + turn) % 6
                with a.peers.match(peer, prompt(2, at)) as found:
                    if found.tokens == 0:
                        continue  # evicted
                    mine = a.fetch(peer, found.addrs).wait().addrs
                    if content(a, mine) != stamps[at][: len(mine)]:
                        wrong.append(at)
                    a.free(mine)

        def evict() -> None:
            for _ in range(40):
                b.evict(1, kvpool.HBM)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)] + [threading.Thread(target=evict)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        eventually(lambda: b.stats().hbm.pinned == 0)


def test_blocks_in_dram_are_found_too():
    with pair_of(NEAR_ROUTES[-1]) as pair:
        pair.b("store(pool, prompt(2), medium=kvpool.DRAM)")
        with pair.a.peers.match(pair.to_b, prompt(2)) as found:
            assert {int(kvpool.decode_address(int(one)).medium) for one in found.addrs} == {int(DRAM)}
