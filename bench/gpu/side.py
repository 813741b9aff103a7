"""kvpool's two sides with HBM on a GPU: two processes that share the first one, as on a machine with one GPU.

Options: `route`, `tokens_a_block` and `layers` of the layout, `order` "discrete" or "aggregated".
"""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import Any

import numpy as np

import kvpool
from bench.gpu.device import Device
from bench.gpu.region import OnDevice
from bench.measure import no_collections
from bench.transfer.own import listen, settings
from bench.transfer.side import scattered
from kvpool.types import Strategy

_HEADS, _DIM = 40, 128  # of Llama-2-13B


def layout(layers: int, order: Any) -> kvpool.KVLayout:
    """Llama-2-13B's with so many layers: 160 KiB a layer, K or V, in a block of 16 tokens."""
    return kvpool.KVLayout(layers, _HEADS, _DIM, "float16", 16, order=order)


class Subject(OnDevice):
    """See bench/transfer/side.py. The region is all HBM."""

    def __init__(self) -> None:
        # Two ranks of NCCL on one GPU have to look like two hosts. Before NCCL is loaded.
        os.environ["NCCL_HOSTID"] = f"kvpool-bench-{os.getpid()}"
        self._device = Device()

    def version(self) -> str:
        return f"kvpool {kvpool._core.__version__}"

    def receive(self, count: int, size: int, **options: Any) -> dict[str, Any]:
        self._make(2 * count, **options)
        return {"address": listen(self._pool, "unix")}

    def send(self, count: int, size: int, target: dict[str, Any], **options: Any) -> list[int]:
        self._make(2 * count, **options)
        pool, route = self._pool, options["route"]
        peer = pool.peers.connect(target["address"])
        self._order = scattered(count, 1)
        own = _by_block(pool.alloc(2 * count, medium=kvpool.HBM))[self._order]
        lent = _by_block(pool.alloc(2 * count, medium=kvpool.HBM, instance=peer))[scattered(count, 2)]
        # As the paper does: a discrete block is a call a piece, an aggregated one a call.
        strategy: Strategy = "by_request" if options["order"] == "discrete" else "by_request_agg"

        def begin() -> kvpool.Transfer:
            return pool.transfer(peer, own, to=lent, strategy=strategy, route=route)

        self._begin = begin
        self._calls = {"transfer": lambda: begin().wait()}
        return [int(block) for block in kvpool.block_ids(lent)]

    def begin_times(self, calls: int) -> list[float]:
        """What transfer() takes of the thread that calls it, which then waits for each; microseconds."""
        times = []
        with no_collections():
            for _ in range(calls):
                started = perf_counter_ns()
                handle = self._begin()
                times.append((perf_counter_ns() - started) / 1000)
                handle.wait()
        return times

    def copy_rate(self, nbytes: int, rounds: int) -> float:
        """Of the device, read and written; GB/s."""
        return self._device.copy_rate(nbytes, rounds)

    def facts(self) -> dict[str, Any]:
        stats = self._calls["transfer"]().stats
        return {"route": stats.route, "calls": stats.calls}

    def end(self) -> None:
        self._calls = {}
        self._region = np.empty((0, 1), np.uint64)
        self._host = np.empty(0, np.uint8)
        self._pool.close()
        del self._pool

    def _make(self, blocks: int, *, route: str, layers: int, order: str, **_: Any) -> None:
        shape = layout(layers, order)
        self._pool = kvpool.Pool(shape, hbm_blocks=blocks, device="cuda:0", **settings(route))
        array = self._pool.tensor(kvpool.HBM).__cuda_array_interface__
        self._base = int(array["data"][0])
        self._host = np.zeros(blocks * shape.block_bytes, np.uint8)
        view = np.ndarray(array["shape"], np.dtype(array["typestr"]), self._host, strides=array["strides"])
        self._region = view.view(np.uint64)
        self._device.write(self._base, self._host)  # memory of a GPU comes as the last owner left it


def _by_block(addrs: Any) -> Any:
    """Addresses so that address i is that of block i: REQUIRES all blocks of the pool."""
    return addrs[np.argsort(kvpool.block_ids(addrs))]
