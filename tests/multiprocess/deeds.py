"""What victims and survivors do with their pools: stamp blocks, send, receive, come back, count.

A stamp is a number and a position in every word of a block, so whatever lands in a wrong place, or half, is seen.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kit import small_layout
from transfer.kit import blocks_at_peers, eventually

import kvpool

__all__ = [
    "LEASE",
    "Reader",
    "await_no_peers",
    "big_pool",
    "call",
    "check",
    "dropped",
    "receive_for_ever",
    "send_and_come_back",
    "send_for_ever",
    "send_some",
    "stamp",
    "things",
]  # fmt: skip

LEASE = 2.0  # a busy machine stops a process for a good part of a second, and that ends none
BLOCKS = 48
_PAGE = 16


def big_pool(blocks: int = BLOCKS, dram_blocks: int = 0, **settings: Any) -> kvpool.Pool:
    """Blocks of 128 KiB: a transfer of some takes long enough to be hit in its middle."""
    layout = small_layout(layers=4, kv_heads=4, head_dim=64, block_tokens=_PAGE)
    settings = {"huge_pages": "never", "audit": True, "lease_s": LEASE} | settings
    return kvpool.Pool(layout, blocks, dram_blocks, **settings)


def _view(pool: kvpool.Pool) -> np.ndarray:
    return pool.tensor(kvpool.HBM).numpy().view(np.uint32)


def stamp(pool: kvpool.Pool, addrs: Any, number: int) -> None:
    """Writes the number and the position into every word of each block."""
    view = _view(pool)
    for position, addr in enumerate(addrs):
        view[kvpool.decode_address(int(addr)).block] = number * 256 + position


def check(pool: kvpool.Pool, addrs: Any, number: int) -> list[str]:
    """The errors in stamped blocks; [] when every word is right."""
    view = _view(pool)
    wrong = []
    for position, addr in enumerate(addrs):
        content = view[kvpool.decode_address(int(addr)).block]
        bad = content != number * 256 + position
        if bad.any():
            found = [hex(value) for value in np.unique(content[bad])[:4]]
            wrong.append(f"block {position} of {number:#x}: {bad.sum()} of {bad.size} words are wrong: {found}")
    return wrong


def _tokens(number: int, blocks: int) -> np.ndarray:
    tokens = np.arange(blocks * _PAGE, dtype=np.int32)
    tokens[0] = number
    return tokens


def send_some(pool: kvpool.Pool, peer: str, addrs: Any, lent: Any, number: int, dice: random.Random) -> None:
    """One request of a random kind, with random options; returns when it is done, raises how it failed."""
    own = addrs[: dice.randint(1, len(addrs))]
    stamp(pool, own, number)
    options = {"private": number.to_bytes(4, "little"), "checksum": dice.random() < 0.3, "timeout": 20.0}
    kind = dice.choice(["plain", "plain", "insert", "stream", "named", "several", "fetch", "freed"])
    if kind == "plain":
        pool.transfer(peer, own, **options).wait()
    elif kind == "insert":
        pool.transfer_with_insert(peer, _tokens(number, len(own)), own, **options).wait()
    elif kind == "stream":
        with pool.transfer(peer, own, **options, layerwise=True) as stream:
            for layer in dice.sample(range(4), 4):
                stream.send_layer(layer)
        stream.transfer.wait()
    elif kind == "named":
        named = own[: len(lent)]
        pool.transfer(peer, named, to=lent[: len(named)], timeout=20.0).wait()
        mine = pool.fetch(peer, lent[: len(named)], timeout=20.0).wait().addrs
        wrong = check(pool, mine, number)
        pool.free(mine)
        assert not wrong, wrong
    elif kind == "freed":  # a block that is being sent is not given away before it has been read
        sent = pool.alloc(8)
        stamp(pool, sent, number)
        try:
            handle = pool.transfer(peer, sent, **options)
        finally:
            pool.free(sent)
        other = pool.alloc(8)
        stamp(pool, other, number ^ 0xFF)
        pool.free(other)
        handle.wait()
    elif kind == "several":
        handles: list[Any] = []
        try:
            handles += (pool.transfer(peer, own[:2], **options) for _ in range(4))
        finally:  # of all: one that has failed says nothing of the others, which still read the blocks
            ends = [handle.exception(60) for handle in handles]
        for error in filter(None, ends):
            raise error
    else:
        mine = pool.fetch(peer, lent, timeout=20.0).wait().addrs
        pool.free(mine)


def send_for_ever(pool: kvpool.Pool, peer: str, seed: int, first: int, counts: Any = None) -> None:
    """Sends until the peer is lost, which it raises."""
    dice = random.Random(seed)
    addrs = pool.alloc(8)
    lent: Any = []
    number = first
    try:
        while True:
            number += 1
            try:
                if len(lent) == 0:
                    lent = pool.alloc(4, instance=peer)
                send_some(pool, peer, addrs, lent, number, dice)
            except (kvpool.Busy, kvpool.OutOfBlocks):
                time.sleep(0.001)
            if counts is not None:
                counts.append(number)
    finally:
        pool.free(addrs)


def receive_for_ever(pool: kvpool.Pool, tell: Callable[[str], None]) -> None:
    """Receives items and checks every word; reports errors."""
    while True:
        item = pool.inbox.receive(1.0)
        if item is None:
            continue
        with item:
            for text in check(pool, item.addrs, int.from_bytes(item.private, "little")):
                tell(text)


class Reader:
    """A thread that receives a pool's items, and checks every word."""

    def __init__(self, pool: kvpool.Pool) -> None:
        self.items = 0
        self.wrong: list[str] = []
        self._pool = pool
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(kvpool.ClosedError):
            while not self._over.is_set():
                item = self._pool.inbox.receive(0.02)
                if item is None:
                    continue
                with item:
                    self.wrong += check(self._pool, item.addrs, int.from_bytes(item.private or b"", "little"))
                self.items += 1

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


# ---- what must not grow


def things() -> dict[str, int]:
    """Counts of everything that a process may leak."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mappings = [line for line in lines if "memfd" in line or "/dev/shm" in line]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(mappings),
        "shm": sum(name.startswith(("kvpool", "ucx")) for name in os.listdir("/dev/shm")),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def dropped(pool: kvpool.Pool) -> bool:
    """Lets go of what peers have sent; whether nothing is left in use here. The application is told after the sender:
    what was sent last may still be on its way."""
    while item := pool.inbox.receive(0):
        item.close()
    return pool.stats().hbm.active == 0


def await_no_peers(pool: kvpool.Pool) -> None:
    """Waits until nothing of any peer is left in a pool, and checks that its blocks add up."""
    eventually(lambda: pool.peers.list() == [])
    eventually(lambda: blocks_at_peers(pool) == 0)
    pool.audit()


def send_and_come_back(pool: kvpool.Pool, where: str, tell: Callable[[str], None], seed: int, first: int) -> None:
    """Sends forever, and reconnects whenever the peer is lost; reports each time that it is back."""
    dice = random.Random(seed)
    addrs = pool.alloc(24)
    number = first
    stamp(pool, addrs, number)
    while True:
        try:
            peer = call(pool, where)
            tell("back")
            lent = pool.alloc(8, instance=peer)
            while True:
                private = number.to_bytes(4, "little")
                with contextlib.suppress(kvpool.Busy, kvpool.OutOfBlocks, kvpool.DeadlineExceeded):
                    pool.transfer(peer, addrs, private=private, timeout=dice.choice([0.05, 20.0])).wait()
                with contextlib.suppress(kvpool.Busy, kvpool.DeadlineExceeded):
                    pool.transfer(peer, addrs[:8], to=lent).wait()
        except (kvpool.PeerLost, kvpool.NotOwner, kvpool.OutOfBlocks, kvpool.Busy, kvpool.DeadlineExceeded):
            time.sleep(0.002)


def soak(pool: kvpool.Pool, addrs: Any, where: str | None, seconds: float, seed: int) -> list[dict[str, int]]:
    """Does everything that a pool can do for so long; what the process is made of, at forty moments of it.

    Sends from `addrs`, which it frees: they were allocated before anybody could fill the pool.
    The side that is told where the other one listens parts from it now and then, and calls again. Raises for a wrong
    word in anything that comes.
    """
    dice = random.Random(seed)
    began = time.monotonic()
    samples: list[dict[str, int]] = []
    lent: Any = []
    number = seed * 1_000_000
    while (passed := time.monotonic() - began) < seconds or len(samples) < 40:
        number += 1
        try:
            peers = [peer.name for peer in pool.peers.list()]
            if where is not None and (not peers or number % 1000 == 0):
                lent = []
                pool.peers.disconnect(peers[0]) if peers else call(pool, where)
            elif peers:
                if len(lent) == 0:
                    lent = pool.alloc(4, instance=peers[0])
                send_some(pool, peers[0], addrs, lent, number % (1 << 24), dice)
            _use_the_index(pool, number % (1 << 24), dice)
        except (kvpool.Busy, kvpool.OutOfBlocks):
            time.sleep(0.001)
        except (kvpool.PeerLost, kvpool.NotOwner, kvpool.StaleAddress):  # the other side has disconnected
            lent = []
        while item := pool.inbox.receive(0):
            with item:
                wrong = check(pool, item.addrs, int.from_bytes(item.private or b"", "little"))
            assert not wrong, wrong
        if passed > seconds * len(samples) / 40:
            samples.append(things() | {"resident": resident_bytes()})
    pool.free(addrs)
    pool.audit()
    return samples


def _use_the_index(pool: kvpool.Pool, number: int, dice: random.Random) -> None:
    prompt = _tokens(number, dice.randint(1, 6))
    pool.insert(prompt, pool.alloc(len(prompt) // _PAGE)).close()
    with pool.match(_tokens(number - dice.randrange(9), 4)) as hit:
        if len(hit.addrs) and dice.random() < 0.5:
            with pool.swap_in(hit.addrs):
                pass
    pool.swap_out(dice.randrange(3))
    if dice.random() < 0.1:
        pool.evict(dice.randrange(4))


def call(pool: kvpool.Pool, where: str, seconds: float = 60) -> str:
    """Connects, and tries again while the other side is not ready for it.

    Each try has twice the time of the one before: the first ones may fall into a moment in which nobody can answer, and
    on a busy machine a second may be too short.
    """
    until = time.monotonic() + seconds
    timeout = 0.5
    while True:
        timeout = min(2 * timeout, 8.0)
        try:
            return pool.peers.connect(where, timeout=timeout)
        except (kvpool.Busy, kvpool.PeerLost, kvpool.DeadlineExceeded, kvpool.StateError):
            if [peer.name for peer in pool.peers.list()]:
                return pool.peers.list()[0].name
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
