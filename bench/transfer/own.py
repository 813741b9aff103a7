"""kvpool's two sides: borrowed blocks, written by one call of transfer() and its wait."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import kvpool
from bench.transfer.side import Side, buffer, region, scattered


def settings(*routes: str, trusted: bool = True) -> dict[str, Any]:
    """Of every pool of a bench that has peers.

    Args:
        *routes: Those that may be used.
        trusted: Frames on TCP carry a checksum and no MAC, as none of the peers has one.
    """
    return {
        "routes": routes,
        "secret": "of the bench",
        "name": f"bench-{os.getpid()}",
        "trusted_network": trusted,
        "prefer_unix_socket": False,  # the TCP benchmarks must stay on TCP
    }


def listen(pool: kvpool.Pool, link: str) -> str:
    """Lets a peer connect over "tcp", and nothing else, or "unix". One pool a process."""
    if link == "unix":
        return pool.peers.listen(f"unix:@kvpool-bench-{os.getpid()}")
    return pool.peers.listen("tcp:127.0.0.1:0")


class Subject(Side):
    """See bench/transfer/side.py. Sender and receiver; a block is one slot."""

    def version(self) -> str:
        return f"kvpool {kvpool._core.__version__}"

    def receive(self, count: int, size: int, **options: Any) -> dict[str, Any]:
        self._make(2 * count, size, **options)
        return {"address": listen(self._pool, options["link"])}

    def send(self, count: int, size: int, target: dict[str, Any], **options: Any) -> list[int]:
        self._make(2 * count, size, **options)
        peer = self._pool.peers.connect(target["address"])
        self._order = scattered(count, 1)
        own = _by_block(self._pool.alloc(2 * count, medium=self._medium))[self._order]
        lent = _by_block(self._pool.alloc(2 * count, medium=self._medium, instance=peer))[scattered(count, 2)]
        pool, route = self._pool, options["route"]

        def write() -> kvpool.Transfer:
            return pool.transfer(peer, own, to=lent, route=route).wait()

        self._calls = {"transfer": write}
        return [int(block) for block in kvpool.block_ids(lent)]

    def facts(self) -> dict[str, Any]:
        """What it ran over: asked of the sender, for the notes."""
        peer = self._pool.peers.list()[0]
        stats = self._calls["transfer"]().stats
        arena = self._pool.arena(self._medium)
        return {
            "link": peer.link,
            "route": stats.route,
            "calls": stats.calls,
            "huge_page_bytes": arena.huge_page_bytes,
        }

    def end(self) -> None:
        self._calls = {}
        self._region = np.empty((0, 1), np.uint64)
        self._pool.close()
        del self._pool

    def _make(self, blocks: int, size: int, *, route: str, adopted: bool, trusted: bool, **_: Any) -> None:
        """Makes a pool for each configuration; with `adopted` over NumPy's memory."""
        layout = kvpool.RawLayout(block_bytes=size)
        if adopted:
            memory = buffer(blocks * size)
            self._medium: kvpool.Medium = kvpool.HBM
            self._pool = kvpool.Pool(layout, hbm=[memory.reshape(blocks, size)], **settings(route, trusted=trusted))
        else:
            self._medium = kvpool.DRAM
            self._pool = kvpool.Pool(layout, dram_blocks=blocks, **settings(route, trusted=trusted))
            memory = self._pool.tensor(kvpool.DRAM).numpy()
        self._region = region(memory, size)


def _by_block(addrs: Any) -> Any:
    """Addresses so that address i is that of block i: REQUIRES all blocks of the pool."""
    return addrs[np.argsort(kvpool.block_ids(addrs))]
