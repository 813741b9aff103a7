"""An engine lends blocks to a peer, which pushes straight into them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, refused, small_layout, small_pool
from transfer.kit import SECRET, Child, address_of, eventually, not_on_gpu, route_or_skip

import kvpool
from kvpool import DRAM, Pool

pytestmark = not_on_gpu("the engine's tensors are NumPy's")

BLOCKS = 6


@dataclass
class Made:
    engine: Pool
    tensors: list[np.ndarray]
    prefill: Child

    def content(self, blocks: Any) -> list[bytes]:
        return [b"".join(tensor[block].tobytes() for tensor in self.tensors) for block in blocks]


@contextlib.contextmanager
def made(*routes: str, lease_s: float = 60, **more: Any) -> Iterator[Made]:
    tensors = [np.zeros((BLOCKS, 2, 2, BLOCK, 4), np.float32) for _ in range(2)]
    settings: dict[str, Any] = {"routes": routes, "secret": SECRET, "lease_s": lease_s}
    with contextlib.closing(Child()) as prefill:
        prefill("pool = small_pool(name='prefill', **settings)", settings=settings)
        where = prefill("pool.peers.listen(where)", where=address_of("sock-unix"))
        options = {"huge_pages": "never", "audit": True, "name": "decode", **settings, **more}
        with Pool(small_layout(), hbm=tensors, engine_allocates=True, dram_blocks=2, **options) as engine:
            engine.peers.connect(where)
            prefill("wait_for(lambda: pool.peers.list())\nmine = pool.alloc(3)\nwritten = fill(pool, mine)")
            yield Made(engine, tensors, prefill)


def lent(one: Made, addrs: Any) -> bool:
    """Lends them, unless something is left of the loans before."""
    try:
        one.engine.peers.lend("prefill", addrs, timeout=20)
    except (kvpool.Busy, kvpool.StateError):
        return False
    return True


def lend_when_free(one: Made, addrs: Any) -> None:
    eventually(lambda: lent(one, addrs))


def borrowed(one: Made) -> int:
    return int(one.prefill("pool.peers.list()[0].borrowed_blocks"))


@pytest.fixture(params=[("shm", "sock"), ("sock",), ("cma",)], ids=["near", "link", "direct"])
def one(request):
    for name in request.param:
        route_or_skip(name)
    with made(*request.param) as made_one:
        yield made_one


def test_a_peer_pushes_straight_into_the_engines_blocks(one):
    addrs = one.engine.adopt([4, 1])
    one.engine.peers.lend("prefill", addrs)
    with refused(one.engine, kvpool.StateError, "lent"):
        one.engine.free(addrs)
    told = one.engine.peers.addresses(addrs).tolist()
    written = one.prefill("pool.transfer('decode', mine[:2], to=told, private=b'seven').wait()\nwritten[:2]", told=told)
    with one.engine.inbox.receive(timeout=20) as item:
        assert (item.private, item.lent) == (b"seven", True)
        assert kvpool.block_ids(item.addrs).tolist() == [4, 1]
        assert one.content([4, 1]) == written
    one.prefill("pool.free(np.array(told, np.uint64))", told=told)
    assert one.engine.audit().hbm.active == 2
    one.engine.free(addrs)
    with pytest.raises((kvpool.NotOwner, kvpool.StaleAddress)):
        one.prefill("pool.transfer('decode', mine[:2], to=told).wait()", told=told)


def test_the_engine_can_lend_the_same_blocks_again_and_again(one):
    addrs = one.engine.adopt([2])
    told = one.engine.peers.addresses(addrs).tolist()
    for at in range(3):
        lend_when_free(one, addrs)
        code = "pool.transfer('decode', mine[at : at + 1], to=told).wait()\nwritten[at]"
        assert one.prefill(code, told=told, at=at) == one.content([2])[0]
        result = one.engine.peers.recall("prefill", addrs, timeout=0.01)
        assert result.returned + result.freed + result.quarantined == 1  # whichever way it ends
        eventually(lambda: one.engine.stats().hbm.active == 1)
        lend_when_free(one, addrs)
        one.prefill("pool.free(np.array(told, np.uint64))", told=told)
        assert one.engine.stats().hbm.active == 1
    one.engine.free(addrs)


RETURN = """
def on(event):
    if event.kind == "recalled":
        try:
            pool.free(np.array(event.addrs, np.uint64))
        except kvpool.Error:
            pass
callback = pool.peers.on_change(on)
"""


def test_a_recall_of_an_earlier_loan_does_not_end_the_next(one):
    """Another thread lends the blocks again while the answer to the recall is on its way."""
    one.prefill(RETURN)
    addrs = one.engine.adopt([2])
    one.engine.peers.lend("prefill", addrs)
    told = one.engine.peers.addresses(addrs).tolist()
    for _ in range(300):
        recall = threading.Thread(target=one.engine.peers.recall, args=("prefill", addrs), kwargs={"timeout": 20})
        recall.start()
        while not lent(one, addrs):  # without a pause
            pass
        recall.join()
        assert (one.engine.stats().hbm.lent, borrowed(one)) == (1, 1)
    one.prefill("callback.close()\npool.free(np.array(told, np.uint64))", told=told)
    one.engine.free(addrs)


@pytest.mark.parametrize("routes", [("shm", "sock"), ("sock",)], ids=["near", "link"])
def test_blocks_are_lent_again_when_the_peer_has_let_go_of_them(routes):
    """A return of the loan that the deadline has ended may still be on its way."""
    with made(*routes) as one:
        addrs = one.engine.adopt([2, 3])
        one.engine.peers.lend("prefill", addrs)
        one.prefill.kill(signal.SIGSTOP)
        assert one.engine.peers.recall("prefill", addrs, timeout=0.05).freed == 2
        with refused(one.engine, kvpool.Busy, "has not answered yet"):
            one.engine.peers.lend("prefill", addrs[1:])
        one.prefill.kill(signal.SIGCONT)
        lend_when_free(one, addrs)
        assert (one.engine.stats().hbm.lent, borrowed(one)) == (2, 2)


def test_blocks_that_no_call_can_offer_stay_the_engines():
    with made("shm", "sock", transfers_max=1) as one:
        addrs = one.engine.adopt([2, 3])
        one.prefill.kill(signal.SIGSTOP)
        asked = one.engine.peers.match(["prefill"], np.arange(8), hold=5, timeout=30, wait=False)
        with refused(one.engine, kvpool.Busy):
            one.engine.peers.lend("prefill", addrs)
        assert one.engine.stats().hbm.active == 2
        one.prefill.kill(signal.SIGCONT)
        eventually(asked[0].done)
        lend_when_free(one, addrs)


def test_an_engines_loans_leave_peers_what_they_may_borrow():
    with made("shm", "sock", lend_max=1) as one:
        one.engine.peers.lend("prefill", one.engine.adopt([2, 3]))
        one.prefill("pool.alloc(1, instance='decode', medium=kvpool.DRAM)")
        with pytest.raises(kvpool.Busy):
            one.prefill("pool.alloc(1, instance='decode', medium=kvpool.DRAM)")


def test_an_insertion_is_refused_and_the_loan_goes_on(one):
    """The index must not have blocks that the engine reuses."""
    addrs = one.engine.adopt([2])
    one.engine.peers.lend("prefill", addrs)
    told = one.engine.peers.addresses(addrs).tolist()
    with pytest.raises(kvpool.StateError):
        one.prefill("pool.transfer_with_insert('decode', [1, 2, 3, 4], mine[:1], to=told).wait()", told=told)
    assert one.engine.stats().hbm.lent == 1
    one.prefill("pool.free(np.array(told, np.uint64))", told=told)
    one.engine.free(addrs)


@pytest.mark.parametrize("routes", [("shm", "sock"), ("sock",)], ids=["near", "link"])
def test_a_stopped_peer_loses_its_loan_and_writes_nothing_later(routes):
    with made(*routes) as one:
        addrs = one.engine.adopt([2, 3])
        one.engine.peers.lend("prefill", addrs)
        told = one.engine.peers.addresses(addrs).tolist()
        one.prefill.kill(signal.SIGSTOP)
        result = one.engine.peers.recall("prefill", addrs, timeout=0.1)
        assert (result.freed, result.quarantined) == (2, 0)
        one.engine.free(addrs)
        for tensor in one.tensors:
            tensor[:] = 7.25
        one.prefill.kill(signal.SIGCONT)
        with pytest.raises((kvpool.NotOwner, kvpool.StaleAddress)):
            one.prefill("pool.transfer('decode', mine[:2], to=told).wait()", told=told)
        assert all((tensor == 7.25).all() for tensor in one.tensors)


def test_of_a_peer_that_can_write_here_the_proof_is_awaited():
    route_or_skip("cma")
    with made("cma") as one:
        addrs = one.engine.adopt([2])
        one.engine.peers.lend("prefill", addrs)
        one.prefill.kill(signal.SIGSTOP)
        assert one.engine.peers.recall("prefill", addrs, timeout=0.1).quarantined == 1
        one.prefill.kill()
        eventually(lambda: one.engine.stats().hbm.active == 1)
        one.engine.free(addrs)


def test_a_peer_that_dies_gives_all_back(one):
    addrs = one.engine.adopt([2, 3, 5])
    one.engine.peers.lend("prefill", addrs)
    one.prefill.kill()
    eventually(lambda: one.engine.stats().hbm.active == 3)
    one.engine.free(addrs)


def test_a_peer_that_does_not_answer_gets_nothing(one):
    addrs = one.engine.adopt([2])
    one.prefill.kill(signal.SIGSTOP)
    with pytest.raises(kvpool.DeadlineExceeded):
        one.engine.peers.lend("prefill", addrs, timeout=0.1)
    one.prefill.kill(signal.SIGCONT)
    eventually(lambda: one.engine.stats().hbm.active == 1)
    eventually(lambda: one.prefill("pool.peers.list()[0].borrowed_blocks") == 0)
    one.engine.free(addrs)


def test_what_cannot_be_lent_is_refused_and_nothing_changes(one):
    engine = one.engine
    addrs = engine.adopt([1, 2])
    dram = engine.alloc(1, medium=DRAM)
    for wrong, error in [
        ([], kvpool.ArgumentError), (dram, kvpool.StateError), ([*addrs, *dram], kvpool.StateError),
        ([addrs[0], addrs[0]], kvpool.ArgumentError), ([int(addrs[0]) + (1 << 24)], kvpool.StaleAddress),
    ]:  # fmt: skip
        with refused(engine, error):
            engine.peers.lend("prefill", np.array(wrong, np.uint64))
    with refused(engine, kvpool.PeerLost):
        engine.peers.lend("nobody", addrs)
    engine.peers.lend("prefill", addrs[:1])
    with refused(engine, kvpool.StateError, "lent"):
        engine.peers.lend("prefill", addrs)


def test_a_pool_that_allocates_by_itself_has_nothing_to_lend_in_this_way():
    with small_pool(name="a", secret=SECRET) as a, small_pool(name="b", secret=SECRET) as b:
        a.peers.connect(b.peers.listen(address_of("loopback")))
        mine = a.alloc(1)
        with refused(a, kvpool.StateError, "alloc"):
            a.peers.lend("b", mine)
