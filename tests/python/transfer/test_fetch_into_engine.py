"""Fetches into blocks of an engine, which uses them for something else as soon as the fetch has settled.

Where the owner cannot write into the engine's memory by itself, a fetch is settled at its deadline, whatever the owner
does. A late write would be seen: the engine fills the blocks at once, and the owner goes on afterwards.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kit import small_layout
from transfer.kit import SECRET, Child, address_of, eventually, not_on_gpu, route_or_skip

import kvpool
from kvpool import Pool

pytestmark = not_on_gpu("the engine's tensors are NumPy's")

BLOCKS = 8
READS = ("shm", "sock")  # the engine reads the owner's memory by a mapping
LINK = ("sock",)  # the engine's process places what comes
DIRECT = ("cma",)  # the owner writes into the engine's process
POISON = 7.25


@dataclass
class Made:
    engine: Pool
    tensors: list[np.ndarray]
    owner: Child
    source: list[int]
    written: list[bytes]  # by the owner

    def content(self, blocks: list[int]) -> list[bytes]:
        return [b"".join(tensor[block].tobytes() for tensor in self.tensors) for block in blocks]

    def reuse(self, blocks: list[int]) -> None:
        for tensor in self.tensors:
            tensor[blocks] = POISON

    def check_reused(self, blocks: list[int]) -> None:
        assert all((tensor[blocks] == POISON).all() for tensor in self.tensors)


@contextlib.contextmanager
def made(
    routes: tuple[str, ...],
    *,
    blocks: int = BLOCKS,
    layout: Any = None,
    lease_s: float = 60,
    owner: Any = None,
    **options: Any,
) -> Iterator[Made]:
    layout = layout or small_layout()
    tensors = [
        np.zeros((blocks, 2, layout.kv_heads, layout.block_tokens, layout.head_dim), np.float32)
        for _ in range(layout.layers)
    ]
    settings: dict[str, Any] = {"routes": routes, "secret": SECRET, "lease_s": lease_s, "huge_pages": "never"}
    own = owner or {}
    with contextlib.closing(Child()) as owner:
        owner(
            "pool = kvpool.Pool(layout, dram_blocks=blocks, name='owner', **settings)",
            layout=layout, blocks=blocks, settings=settings | own,
        )  # fmt: skip
        where = owner("pool.peers.listen(where)", where=address_of("sock-unix"))
        written = owner("addrs = pool.alloc(blocks, medium=kvpool.DRAM)\nfill(pool, addrs)")
        owner("pool.insert(np.arange(blocks * pool.kv_layout.block_tokens), addrs).close()")
        source = owner("pool.peers.addresses(addrs).tolist()")
        with Pool(
            layout, hbm=tensors, engine_allocates=True, dram_blocks=2, audit=True, **settings, **options
        ) as engine:
            engine.peers.connect(where)
            yield Made(engine, tensors, owner, source, written)


@pytest.mark.parametrize("routes", [READS, LINK, DIRECT], ids=["read", "link", "direct"])
def test_the_content_comes_and_the_blocks_are_the_engines(routes):
    for name in routes:
        route_or_skip(name)
    with made(routes) as one:
        addrs = one.engine.adopt([5, 0, 3])
        fetch = one.engine.fetch("owner", one.source[1:4], to=addrs).wait()
        assert fetch.settled()
        assert fetch.addrs.tolist() == addrs.tolist()
        assert one.content([5, 0, 3]) == one.written[1:4]
        assert (fetch.stats.blocks, fetch.stats.bytes) == (3, 3 * one.engine.kv_layout.block_bytes)
        assert one.engine.stats().hbm.active == 3
        one.engine.free(addrs)
        assert one.owner("wait_for(lambda: pool.stats().dram.pinned == 0)\npool.audit().dram.historical") == BLOCKS


def test_with_a_checksum_the_owner_writes_what_could_be_read_from_here():
    with made(READS) as one:
        addrs = one.engine.adopt([5, 0])
        assert one.engine.fetch("owner", one.source[:2], to=addrs).wait().stats.route == "fetch"
        compared = one.engine.fetch("owner", one.source[1:3], to=addrs, checksum=True).wait()
        assert compared.stats.route == "sock"
        assert one.content([5, 0]) == one.written[1:3]


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
def test_with_a_stopped_owner_the_blocks_are_the_engines_at_the_deadline(routes):
    with made(routes) as one:
        addrs = one.engine.adopt([1, 2])
        one.owner.kill(signal.SIGSTOP)
        fetch = one.engine.fetch("owner", one.source[:2], to=addrs, timeout=0.2)
        with pytest.raises(kvpool.DeadlineExceeded):
            fetch.wait()
        assert fetch.settled()
        assert one.engine.audit().hbm.active == 2
        one.reuse([1, 2])
        one.owner.kill(signal.SIGCONT)
        again = one.engine.adopt([4])
        one.engine.fetch("owner", one.source[7:], to=again).wait()  # all that came before it has been read
        one.check_reused([1, 2])
        assert one.content([4]) == one.written[7:]


def test_an_owner_that_can_write_here_is_waited_for():
    route_or_skip("cma")
    with made(DIRECT) as one:
        addrs = one.engine.adopt([1, 2])
        one.owner.kill(signal.SIGSTOP)
        fetch = one.engine.fetch("owner", one.source[:2], to=addrs, timeout=0.2)
        with pytest.raises(kvpool.DeadlineExceeded):
            fetch.wait()
        assert not fetch.settled()
        assert one.engine.stats().hbm.quarantined == 2
        one.owner.kill(signal.SIGCONT)
        eventually(fetch.settled)
        assert one.engine.stats().hbm.active == 2


LARGE = kvpool.KVLayout(layers=2, kv_heads=8, head_dim=64, dtype="float32", block_tokens=64)


def begun(one: Made) -> Any:
    """A fetch of all blocks into all blocks, of which something has come."""
    addrs = one.engine.adopt(list(range(len(one.source))))
    fetch = one.engine.fetch("owner", one.source, to=addrs, timeout=3)
    eventually(lambda: fetch.done() or bool(one.tensors[0].any()))
    return fetch


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_owner_that_ends_in_the_middle_writes_nothing_later(routes, how):
    """Stopped in the middle of a frame it holds up the blocks of this frame until its lease is over."""
    blocks = list(range(64))
    with made(routes, blocks=64, layout=LARGE, lease_s=2) as one:
        fetch = begun(one)
        one.owner.kill(how)
        error = fetch.exception()
        assert error is None or isinstance(error, kvpool.DeadlineExceeded | kvpool.PeerLost)
        if error is None:
            assert one.content(blocks) == one.written
        eventually(fetch.settled)
        assert one.engine.audit().hbm.active == 64
        one.reuse(blocks)
        if how == signal.SIGSTOP:
            one.owner.kill(signal.SIGCONT)
            one.owner("1")
        one.check_reused(blocks)
        one.engine.close()
        one.check_reused(blocks)


REUSE = """
def taken():
    try:
        return [pool.alloc(32, medium=kvpool.DRAM)]
    except kvpool.OutOfBlocks:
        return []


fill(pool, wait_for(taken)[0], 9)
"""


def test_reading_holds_the_blocks_at_the_owner():
    """It evicts nothing that is being read, and everything when that is over."""
    with made(READS, blocks=32, layout=LARGE) as one:
        addrs = one.engine.adopt(list(range(32)))
        fetch = one.engine.fetch("owner", one.source, to=addrs)
        one.owner(REUSE)
        error = fetch.exception()
        if error is None:
            assert one.content(list(range(32))) == one.written
        else:
            assert isinstance(error, kvpool.StaleAddress)
        one.owner("wait_for(lambda: not pool.peers.list()[0].transfers)\npool.audit()")


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
def test_what_has_left_its_address_is_not_fetched(routes):
    with made(routes) as one:
        addrs = one.engine.adopt([1, 2])
        one.owner("pool.free(pool.alloc(blocks, medium=kvpool.DRAM))")
        one.reuse([1, 2])
        fetch = one.engine.fetch("owner", one.source[:2], to=addrs)
        with pytest.raises(kvpool.StaleAddress):
            fetch.wait()
        assert fetch.settled()
        one.check_reused([1, 2])
        one.engine.free(addrs)


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
def test_a_fetch_that_is_cancelled_ends(routes):
    with made(routes) as one:
        addrs = one.engine.adopt([1, 2])
        one.owner.kill(signal.SIGSTOP)
        fetch = one.engine.fetch("owner", one.source[:2], to=addrs, timeout=30)
        assert fetch.cancel()
        one.owner.kill(signal.SIGCONT)
        error = fetch.exception()
        assert error is None or isinstance(error, kvpool.Cancelled)
        eventually(fetch.settled)
        one.engine.free(addrs)


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
def test_a_fetch_that_is_cancelled_waits_for_no_stopped_owner(routes):
    with made(routes) as one:
        addrs = one.engine.adopt([1, 2])
        one.owner.kill(signal.SIGSTOP)
        fetch = one.engine.fetch("owner", one.source[:2], to=addrs, timeout=3600)
        assert fetch.cancel()
        assert isinstance(fetch.exception(0), kvpool.Cancelled)
        assert fetch.settled()
        one.reuse([1, 2])
        one.engine.free(addrs)
        one.owner.kill(signal.SIGCONT)
        one.engine.fetch("owner", one.source[7:], to=one.engine.adopt([4])).wait()
        one.check_reused([1, 2])


def test_an_owner_that_has_too_many_views_writes_instead():
    with made(READS, owner={"viewed_max": 4}) as one:
        addrs = one.engine.adopt(list(range(BLOCKS)))
        fetch = one.engine.fetch("owner", one.source, to=addrs).wait()
        assert fetch.settled()
        assert fetch.stats.bytes == BLOCKS * one.engine.kv_layout.block_bytes
        assert one.content(list(range(BLOCKS))) == one.written
        with pytest.raises(kvpool.StaleAddress):  # by the other way as well
            one.engine.fetch("owner", [at + (1 << 24) for at in one.source], to=addrs).wait()
        one.engine.free(addrs)


@pytest.mark.parametrize("routes", [READS, LINK], ids=["read", "link"])
def test_a_pool_that_is_closed_meanwhile_writes_no_more(routes):
    blocks = list(range(64))
    with made(routes, blocks=64, layout=LARGE) as one:
        fetch = begun(one)
        one.engine.close()
        one.reuse(blocks)
        with contextlib.suppress(kvpool.Error):
            fetch.wait()
        assert fetch.settled()
        one.owner("pool.audit()")
        one.check_reused(blocks)
