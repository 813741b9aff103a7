"""alloc and free of 256 blocks, from a pool that is new and from one that has been churned."""

from __future__ import annotations

import random

import kvpool
from bench.context import Context
from bench.measure import summarize
from bench.result import Report, timed_row
from kvpool.cli.quick_bench import time_alloc_free

TITLE = "Allocator: 256 blocks"
BLOCKS = 256
CAPACITY = 200_000
TARGET_US = 2.0
_STATES = ("new", "churned")
_ROUNDS = 5


class Subject:
    """kvpool's answers; see bench/remote.py."""

    def __init__(self) -> None:
        self._pools = {state: self._pool() for state in _STATES}
        _churn(self._pools["churned"])

    def _pool(self) -> kvpool.Pool:
        return kvpool.Pool(kvpool.RawLayout(block_bytes=64), hbm_blocks=CAPACITY)

    def alloc_free(self, blocks: int, n: int, capacity: int, state: str = "new") -> list[list[float]]:
        """Times of n allocations of so many blocks, and of giving them back."""
        pool = self._pools[state]
        if capacity != pool.stats().hbm.capacity:
            raise ValueError("one capacity only")
        return list(time_alloc_free(pool, blocks, n))


def _churn(pool: kvpool.Pool) -> None:
    """Leaves half of the pool allocated, with the free blocks spread over it."""
    choose = random.Random(1)
    held = [pool.alloc(choose.randint(1, BLOCKS)) for _ in range(CAPACITY // BLOCKS)]
    for _ in range(20_000):
        at = choose.randrange(len(held))
        pool.free(held[at])
        held[at] = pool.alloc(choose.randint(1, BLOCKS))


def run(context: Context) -> Report:
    report = Report()
    n = context.pick(200, 2000)
    with context.subjects(__name__, "vLLM") as subjects:
        for state in _STATES:
            times: dict[str, list[list[float]]] = {name: [[], []] for name in subjects}
            for _ in range(_ROUNDS):
                for name, remote in subjects.items():  # in turns
                    own = {"state": state} if name == "kvpool" else {}
                    alloc_us, free_us = remote.ask("alloc_free", blocks=BLOCKS, n=n, capacity=CAPACITY, **own)
                    times[name][0] += alloc_us
                    times[name][1] += free_us
            for which, what in enumerate(("alloc", "free")):
                samples = {name: summarize(both[which]) for name, both in times.items()}
                report.rows.append(timed_row(f"{what}({BLOCKS}), {state} pool", samples, TARGET_US, blocks=BLOCKS))
    report.notes.append(
        "vLLM's BlockPool is new in both rows: it is a queue, and the order of its blocks costs nothing."
    )
    return report
