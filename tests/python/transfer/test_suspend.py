"""Peers of a pool whose engine sleeps: they hear Busy, reach what is in DRAM, and write nothing to unmapped memory."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, cached_tokens, prompt, refused, small_layout, small_pool
from suspend_kit import Adopted, Unmappable
from transfer.kit import SECRET, Child, address_of, eventually, not_on_gpu, route_or_skip

import kvpool
from kvpool import DRAM, HBM, Pool

pytestmark = not_on_gpu("the engine's tensors are NumPy's")


@contextlib.contextmanager
def made(route: str, **more: Any) -> Iterator[tuple[Adopted, Child]]:
    memory = Unmappable()
    settings: dict[str, Any] = {"routes": (route,), "secret": SECRET, "lease_s": 60}
    with contextlib.closing(Child()) as peer:
        peer("pool = small_pool(name='peer', **settings)", settings=settings)
        where = peer("pool.peers.listen(where)", where=address_of("sock-unix"))
        options = {"huge_pages": "never", "audit": True, "name": "sleeper", **settings, **more}
        with Pool(small_layout(), hbm=memory.tensors, dram_blocks=8, **options) as pool:
            pool.peers.connect(where)
            peer("wait_for(lambda: pool.peers.list())\nmine = pool.alloc(2)\nwritten = fill(pool, mine)")
            yield Adopted(pool, memory), peer


@pytest.fixture(params=["sock", "cma"])
def pair(request):
    route_or_skip(request.param)
    with made(request.param) as pair:
        yield pair


def sends(peer: Child, medium: int, name: int) -> None:
    peer(
        "pool.transfer_with_insert('sleeper', tokens, mine, medium=medium).wait().stats.bytes",
        tokens=prompt(2, name), medium=medium,
    )  # fmt: skip


def test_peers_hear_busy_where_they_want_hbm_and_reach_dram_as_before(pair):
    one, peer = pair
    one.store(2, name=1)
    one.sleep()
    with pytest.raises(kvpool.Busy, match="suspended"):
        sends(peer, HBM, name=3)
    with pytest.raises(kvpool.Busy, match="suspended") as caught:
        peer("pool.alloc(1, instance='sleeper')")
    assert caught.value.retry_after_us > 0
    sends(peer, DRAM, name=4)
    assert cached_tokens(one.pool, prompt(2, 4)) == 2 * BLOCK
    found = peer(
        "with pool.peers.match('sleeper', tokens) as hit:\n"
        "    got = pool.fetch('sleeper', hit.wait().addrs).wait()\n"
        "got.addrs.size, bool((pool.tensor().numpy()[kvpool.block_ids(got.addrs)] == 1).all())",
        tokens=prompt(2, 1),
    )
    assert found == (2, True)
    one.wake()
    sends(peer, HBM, name=3)
    with one.pool.match(prompt(2, 3)) as hit:
        assert {kvpool.decode_address(addr).medium for addr in hit.addrs} == {HBM}
    one.pool.audit()


def test_what_a_peer_has_borrowed_keeps_it_awake_until_it_is_given_back(pair):
    one, peer = pair
    peer("lent = pool.alloc(2, instance='sleeper')")
    with refused(one.pool, kvpool.Busy, "2 lent", lent=2):
        one.sleep()
    peer("pool.free(lent)")
    one.sleep()
    with pytest.raises(kvpool.StaleAddress):  # an address from before names nothing, also when it is awake
        one.pool.sequence(peer("lent"))
    one.wake()


def test_what_a_lost_peer_may_still_write_keeps_it_awake():
    """A stopped process may be in the middle of a write. Only its end proves that nothing comes any more."""
    route_or_skip("cma")
    with made("cma", lease_s=3) as (one, peer):
        peer("lent = pool.alloc(1, instance='sleeper')")
        peer.kill(signal.SIGSTOP)
        eventually(lambda: one.pool.stats().hbm.quarantined == 1)
        with refused(one.pool, kvpool.Busy, quarantined=1):
            one.sleep()
        peer.kill(signal.SIGKILL)
        eventually(lambda: one.pool.stats().hbm.quarantined == 0)
        one.sleep()
        one.wake()


def test_a_fetch_into_hbm_is_refused_and_one_into_dram_arrives(pair):
    one, peer = pair
    one.sleep()
    addrs = np.asarray(peer("pool.peers.addresses(mine)"))
    with pytest.raises(kvpool.Suspended):
        one.pool.fetch("peer", addrs, timeout=20)
    got = one.pool.fetch("peer", addrs, medium=DRAM, timeout=20).wait()
    one.pool.free(got.addrs)
    one.wake()
    got = one.pool.fetch("peer", addrs, timeout=20).wait()
    assert kvpool.decode_address(got.addrs[0]).medium == HBM


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_transfer_that_has_ended_early_writes_nothing_to_memory_that_sleeps_or_has_woken(pair, how):
    one, peer = pair
    peer(
        "stream = pool.transfer('sleeper', mine, layerwise=True, timeout=timeout)\nstream.send_layer(0)",
        timeout=60 if how == "cancelled" else 1,
    )
    if how == "cancelled":
        eventually(lambda: one.pool.stats().hbm.reserved == 2)
        with refused(one.pool, kvpool.Busy, reserved=2):
            one.sleep()
        peer("stream.transfer.cancel()")
    eventually(lambda: one.pool.stats().hbm.free == 8)
    one.sleep()
    late = "try: stream.send_layer(1)\nexcept kvpool.Error as error: told = type(error).__name__\nelse: told = ''"
    peer(late)
    peer("stream.transfer.exception(60)")
    one.wake()
    peer(late)
    assert all(np.isnan(tensor).all() for tensor in one.memory.tensors)


def test_a_write_to_a_block_that_was_given_back_does_not_land(pair):
    one, peer = pair
    peer("lent = pool.alloc(2, instance='sleeper')\npool.free(lent)")
    one.sleep()
    with pytest.raises(kvpool.Error):
        peer("pool.transfer('sleeper', mine, to=lent).wait()")
    one.wake()
    with pytest.raises(kvpool.Error):
        peer("pool.transfer('sleeper', mine, to=lent).wait()")
    assert all(np.isnan(tensor).all() for tensor in one.memory.tensors)


def test_by_shared_memory_a_late_write_changes_nothing_in_memory_that_the_pool_keeps():
    """Such memory stays mapped at the peer, so a write there could not crash; its content would be another's."""
    route_or_skip("shm")
    settings: dict[str, Any] = {"routes": ("shm",), "secret": SECRET, "lease_s": 60}
    with contextlib.closing(Child()) as peer:
        peer("pool = small_pool(name='peer', **settings)", settings=settings)
        where = peer("pool.peers.listen(where)", where=address_of("sock-unix"))
        with small_pool(name="sleeper", **settings) as pool:
            pool.peers.connect(where)
            peer("wait_for(lambda: pool.peers.list())\nmine = pool.alloc(2)\nwritten = fill(pool, mine)")
            peer("stream = pool.transfer('sleeper', mine, layerwise=True)\nstream.send_layer(0)")
            eventually(lambda: pool.stats().hbm.reserved == 2)
            with refused(pool, kvpool.Busy, reserved=2):
                pool.suspend(timeout=0)
            peer("lent = pool.alloc(1, instance='sleeper')\npool.free(lent)\nstream.transfer.cancel()")
            eventually(lambda: pool.stats().hbm.reserved == 0)
            pool.suspend(timeout=0)
            before = pool.tensor().numpy().copy()
            for _ in range(2):  # asleep, and awake
                for late in ("stream.send_layer(1)", "pool.transfer('sleeper', mine[:1], to=lent).wait()"):
                    with pytest.raises(kvpool.Error):
                        peer(late)
                assert (pool.tensor().numpy() == before).all()
                if pool.suspended:
                    pool.resume()
