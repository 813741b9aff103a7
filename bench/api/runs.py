"""How contiguous allocations stay: the mean run length after a million random allocations and releases.

Beside it the simplest allocator, a stack of free block numbers, through the same requests.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "Contiguity after random alloc and free"
_CAPACITY = 65_536
_REQUEST_MAX = 256
_SAMPLES = 2000


class _Stack:
    """A stack of free block numbers."""

    def __init__(self) -> None:
        self._free = np.arange(_CAPACITY, dtype=np.int64)[::-1].copy()
        self._count = _CAPACITY

    def alloc(self, count: int) -> npt.NDArray[np.int64]:
        self._count -= count
        return self._free[self._count : self._count + count].copy()

    def free(self, blocks: npt.NDArray[np.int64]) -> None:
        self._free[self._count : self._count + len(blocks)] = blocks
        self._count += len(blocks)

    def ids(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.sort(blocks)  # a transfer may send them in any order, so order is not held against it


class _Pool:
    """kvpool."""

    def __init__(self) -> None:
        self._pool = kvpool.Pool(kvpool.RawLayout(block_bytes=64), hbm_blocks=_CAPACITY)
        self.alloc = self._pool.alloc
        self.free = self._pool.free

    def ids(self, addrs: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        return np.sort(kvpool.block_ids(addrs))


class Subject:
    """See bench/remote.py."""

    def churn(self, allocator: str, calls: int, occupancy: float) -> dict[str, float]:
        """Makes so many calls around an occupancy and returns what the last 2,000 allocations looked like."""
        blocks: Any = _Pool() if allocator == "kvpool" else _Stack()
        choose = random.Random(7)
        held: list[Any] = []
        used = made = 0
        requested: list[int] = []
        runs: list[int] = []
        while made < calls:
            count = choose.randint(1, _REQUEST_MAX)
            # Up to the occupancy it allocates, beyond it frees what is neither the newest nor the oldest.
            if used + count <= occupancy * _CAPACITY:
                taken = blocks.alloc(count)
                held.append(taken)
                used += count
                if calls - made <= 2 * _SAMPLES:
                    requested.append(count)
                    runs.append(1 + int(np.count_nonzero(np.diff(blocks.ids(taken)) != 1)))
            else:
                at = choose.randrange(len(held))
                held[at], held[-1] = held[-1], held[at]
                given = held.pop()
                used -= len(given)
                blocks.free(given)
            made += 1
        return {
            "mean_run_blocks": sum(requested) / sum(runs),
            "mean_request_blocks": sum(requested) / len(requested),
            "runs_a_request": sum(runs) / len(runs),
        }


def run(context: Context) -> Report:
    report = Report()
    calls = context.pick(100_000, 1_000_000)
    for occupancy in (0.5, 0.8, 0.95):
        with Remote(__name__) as subject:
            own = subject.ask("churn", allocator="kvpool", calls=calls, occupancy=occupancy)
            stack = subject.ask("churn", allocator="stack", calls=calls, occupancy=occupancy)
        report.rows.append(
            Row(
                what=f"mean run length, {occupancy:.0%} of {_CAPACITY:,} blocks in use, after {calls:,} calls",
                value=own["mean_run_blocks"],
                unit="blocks",
                better="higher",
                peers={"stack of free blocks": stack["mean_run_blocks"]},
                details={"kvpool": own, "stack": stack},
            )
        )
    report.notes.append(f"Requests of 1 to {_REQUEST_MAX} blocks; a request in a single run would give 128.5.")
    return report
