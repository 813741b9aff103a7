"""Logical instances for tests: a scheduler and its ranks, all in this process, and the check that nothing is left.

Their HBM is where KVPOOL_TEST_DEVICE says: the same tests run on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kit import DEVICE, content

import kvpool
from kvpool import HBM, KVLayout, ParallelConfig, RankArena

__all__ = [
    "LAYOUT",
    "SETTINGS",
    "Instance",
    "contents",
    "grown",
    "instances_of",
    "label",
    "left",
    "left_in",
    "same",
    "things",
]

LAYOUT = KVLayout(layers=6, kv_heads=4, head_dim=8, dtype="float16", block_tokens=4)
SETTINGS: dict[str, Any] = {"check_memory": False, "lease_s": 10.0, "secret": "ranks", "huge_pages": "never"}
SETTLED_SECONDS = 60.0  # after anything, nothing of a peer is left so much later, however busy the machine
_numbers = itertools.count(1)


class Instance:
    """A scheduler and its ranks; or one pool, without `parallel`."""

    def __init__(
        self,
        name: str,
        parallel: ParallelConfig | None,
        *,
        device: str = DEVICE,
        layout: KVLayout = LAYOUT,
        blocks: int = 12,
        dram: int = 6,
        listen: str | None = None,
        **settings: Any,
    ) -> None:
        self.layout = layout
        self.device = device
        self.settings = SETTINGS | settings
        self.pool = kvpool.Pool(
            layout, hbm_blocks=blocks, dram_blocks=dram, device="cpu" if parallel else device, parallel=parallel,
            audit=True, name=name, **self.settings,
        )  # fmt: skip
        self.ranks: list[RankArena] = []
        if parallel is not None:
            for part in parallel.slices(layout):
                if part.layout is not None:
                    self.ranks.append(self.join(self.pool.ranks.export(part.rank), listen=listen))
            self.pool.ranks.wait(60)
        self.address = self.pool.peers.listen(listen or f"unix:@kvpool-test-{name}-{os.getpid()}-{next(_numbers)}")

    def join(self, ticket: str, **options: Any) -> RankArena:
        return RankArena.join(ticket, **{"device": self.device} | self.settings | options)

    @property
    def name(self) -> str:
        return self.pool.peers.name or ""

    def parts(self, medium: int = HBM) -> Iterator[tuple[Any, npt.NDArray[Any]]]:
        if not self.ranks:
            yield (..., slice(None)), content(self.pool, medium)
        for rank in self.ranks:
            yield rank.slice.index, content(rank, medium)

    def write(self, addrs: Any, kv: npt.NDArray[Any]) -> None:
        for i, addr in enumerate(addrs):
            for index, memory in self.parts(int(kvpool.decode_address(int(addr)).medium)):
                memory[kvpool.block_ids([int(addr)])[0]] = kv[i] if not self.ranks else kv[i][index]

    def read(self, addrs: Any) -> npt.NDArray[Any]:
        """The content of blocks, put together from the ranks; heads that several hold must be the same in all."""
        kv = np.zeros((len(addrs), *self.layout.shape), self.layout.numpy_dtype)
        for i, addr in enumerate(addrs):
            written = np.zeros(self.layout.shape, bool)
            for index, memory in self.parts(int(kvpool.decode_address(int(addr)).medium)):
                part = memory[kvpool.block_ids([int(addr)])[0]]
                whole = slice(None) if not self.ranks else index
                again = written[whole]
                assert (kv[i][whole].view(np.uint16)[again] == part.view(np.uint16)[again]).all(), "replicas differ"
                kv[i][whole] = part
                written[whole] = True
            assert written.all()
        return kv

    def filled(self, blocks: int, seed: int = 0, medium: int = HBM) -> tuple[Any, npt.NDArray[Any]]:
        addrs = self.pool.alloc(blocks, medium=medium)
        kv = contents(blocks, self.layout, seed)
        self.write(addrs, kv)
        return addrs, kv

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.pool.close()


@contextmanager
def instances_of(**common: Any) -> Iterator[Any]:
    """A maker of instances. When it is over they are closed, and nothing of theirs may be left in the process."""
    before = things()
    made: list[Instance] = []

    def make(name: str, parallel: ParallelConfig | None, **options: Any) -> Instance:
        made.append(Instance(name, parallel, **common | options))
        return made[-1]

    try:
        yield make
    finally:
        while made:
            made.pop().close()
    assert not (more := grown(before)), more


def grown(before: dict[str, int]) -> dict[str, str]:
    """What there is more of than before, with all that is there; objects that end by themselves may take a moment."""
    until = time.monotonic() + SETTLED_SECONDS
    while True:
        gc.collect()  # errors keep the frames that they came through
        now = names()
        more = {what: there for what, there in now.items() if len(there) > before[what]}
        if not more or time.monotonic() > until:
            return {what: f"{before[what]} before, now {there}" for what, there in more.items()}
        time.sleep(0.01)


def contents(blocks: int, layout: KVLayout = LAYOUT, seed: int = 0) -> npt.NDArray[Any]:
    raw = np.random.default_rng(seed).integers(0, 1 << 16, (blocks, *layout.shape), np.uint16)
    return raw.view(layout.numpy_dtype)


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return bool((a.view(np.uint16) == b.view(np.uint16)).all())


def label(pair: tuple[ParallelConfig | None, ParallelConfig | None]) -> str:
    return "-".join("one" if side is None else f"{side.tp}x{side.pp}" for side in pair)


def things() -> dict[str, int]:
    """Counts of everything that a process may leak."""
    return {what: len(there) for what, there in names().items()}


def names() -> dict[str, list[str]]:
    """What a process may leak, by name: the target of each descriptor, and the name of each thread."""
    threads, descriptors = Path("/proc/self/task"), Path("/proc/self/fd")
    return {
        "descriptors": [name for one in descriptors.iterdir() if (name := read(one.readlink))],
        "threads": [name for one in threads.iterdir() if (name := read((one / "comm").read_text))],
    }


def read(call: Callable[[], object]) -> str | None:
    """The answer; None: it has gone meanwhile, like the descriptor that lists the others."""
    try:
        return str(call()).strip()
    except OSError:
        return None


def left_in(pool: kvpool.Pool) -> dict[str, int]:
    """Blocks that are neither free, nor anybody's here, by state."""
    stats = pool.audit()
    return {
        state: getattr(stats.hbm, state) + getattr(stats.dram, state) for state in ("reserved", "lent", "quarantined")
    }


def left(*pools: kvpool.Pool, seconds: float = SETTLED_SECONDS) -> list[dict[str, int]]:
    """What pools still hold of their peers: [] as soon as that is nothing, or the rest after a time."""
    until = time.monotonic() + seconds
    while True:
        rest = [counts for pool in pools if any((counts := left_in(pool)).values())]
        if not rest or time.monotonic() > until:
            return rest
        time.sleep(0.005)
