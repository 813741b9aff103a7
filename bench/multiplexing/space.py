"""A space of several models: what sharing costs one model, how fast borrowed memory comes back, and how full it gets.

The churn counts places only. Blocks have as many units as those of three Llamas would have of 64 KiB (16 tokens, fp16),
and the space as many units as 5 GiB; a unit here is 4 KiB, so the memory is a sixteenth. Requests of random models,
whose popularity shifts, take blocks and end in the order in which they came; half of them leave a cached prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

import kvpool
from bench.context import Context
from bench.measure import interleave, time_calls
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "A space of several models: cost, reclaiming, and how full it gets"
PEERS: tuple[str, ...] = ()
_UNIT = 4 << 10
_BLOCKS = 256
_RATIO, _DROP_MS, _SWAP_PART, _USED = 1.1, 10.0, 80.0, 97.0
_MIXES = {
    "7B, 13B, 33B": (128, 200, 390),
    "7B, 13B, 70B with groups": (128, 200, 80),
    "1B, 3B, 8B with groups": (8, 28, 32),
}
_CHURN_UNITS = 5 * 2**30 // 2**16


class Subject:
    """The pools; see bench/remote.py."""

    def alloc(self, rounds: int) -> dict[str, float]:
        """Medians in microseconds of an alloc and a free of 256 blocks, of a plain pool and of the one in a space."""
        layout = kvpool.RawLayout(8 * _UNIT, 16)
        plain = kvpool.Pool(layout, 2048)
        space = kvpool.Space(2048 * 8 * _UNIT)
        pools = {"plain": plain, "space": space.load("only", layout)}

        def both(pool: kvpool.Pool) -> Callable[[], list[float]]:
            return lambda: time_calls(lambda _: pool.free(pool.alloc(_BLOCKS)), range(20))

        found = interleave({name: both(pool) for name, pool in pools.items()}, rounds)
        plain.close()
        space.close()
        return {name: sample.median_us for name, sample in found.items()}

    def reclaim(self, mebibytes: int, swap: bool) -> dict[str, float]:
        """Seconds in which a model gets memory that another has cached, and of a swap of as much in a plain pool."""
        block = 64 * _UNIT
        layout, blocks = kvpool.RawLayout(block, 16), (mebibytes << 20) // block
        with (
            kvpool.Pool(layout, blocks, blocks) as plain,
            kvpool.Space(blocks * block, blocks * block if swap else 0) as space,
        ):
            _cache(plain, blocks)
            begun = perf_counter()
            plain.swap_out(blocks)
            copied = perf_counter() - begun
            rich, starved = space.load("rich", layout), space.load("starved", layout, dram_limit=block)
            _cache(rich, blocks)
            begun = perf_counter()
            starved.alloc(blocks)
            reclaimed = perf_counter() - begun
            moved = rich.stats().swapped_out_blocks
        return {"reclaim_s": reclaimed, "copy_s": copied, "moved": moved / blocks}

    def churn(self, sizes: list[int], seed: int, steps: int) -> dict[str, Any]:
        """Shares of the units that are not free when an allocation finds no place though memory suffices."""
        dice = Random(seed)
        used: list[float] = []
        held: deque[tuple[int, Any]] = deque()
        asked = 0
        with kvpool.Space(_CHURN_UNITS * _UNIT, unit=_UNIT) as space:
            pools = [space.load(f"m{at}", kvpool.RawLayout(size * _UNIT, 16)) for at, size in enumerate(sizes)]
            weights = [1.0] * len(pools)
            for step in range(steps):
                if step % 500 == 0:
                    weights = [dice.random() ** 3 + 0.01 for _ in pools]
                at = dice.choices(range(len(pools)), weights)[0]
                n = dice.randrange(1, 5)
                asked += 1
                addrs = None
                while addrs is None:
                    try:
                        addrs = pools[at].alloc(n)
                    except kvpool.OutOfBlocks as error:
                        if not isinstance(error, kvpool.OutOfQuota):
                            tier = space.stats().hbm
                            used.append(100 * tier.active / tier.capacity)
                        _end(pools, held.popleft(), dice, step)
                held.append((at, addrs))
        return {"failures": len(used), "asked": asked, "used": float(np.mean(used)) if used else 100.0}


def _cache(pool: kvpool.Pool, blocks: int) -> None:
    addrs = pool.alloc(blocks)
    for at in range(0, blocks, 64):
        part = addrs[at : at + 64]
        pool.insert(np.arange(16 * len(part), dtype=np.int32) + (at << 20), part).close()


def _end(pools: list[kvpool.Pool], request: tuple[int, Any], dice: Random, step: int) -> None:
    at, addrs = request
    if dice.random() < 0.5:
        tokens = np.full(16 * len(addrs), step, np.int32)
        pools[at].insert(tokens, addrs, free_duplicates=True).close()
    else:
        pools[at].free(addrs)


def best_of(subject: Remote, mebibytes: int, swap: bool) -> dict[str, float]:
    """The shortest of five times each: the first touch of the memory, and other processes, take longer."""
    found = [subject.ask("reclaim", mebibytes=mebibytes, swap=swap) for _ in range(5)]
    return {what: min(each[what] for each in found) for what in found[0]}


def run(context: Context) -> Report:
    report = Report()
    with Remote(__name__) as subject:
        times = subject.ask("alloc", rounds=context.pick(20, 100))
        report.rows.append(
            Row(
                "alloc and free of 256 blocks, one model in a space, of a plain pool",
                times["space"] / times["plain"],
                "times",
                _RATIO,
                details=times,
            )
        )
        size = context.pick(128, 1024)
        dropped = best_of(subject, size, swap=False)
        swapped = best_of(subject, size, swap=True)
        scale = 1024 / size
        report.rows += [
            Row("1 GiB of a neighbour's cache dropped", 1000 * scale * dropped["reclaim_s"], "ms", _DROP_MS),
            Row(
                "a neighbour's cache swapped out, of the rate of a plain swap",
                100 * swapped["copy_s"] / swapped["reclaim_s"] * swapped["moved"],
                "%",
                _SWAP_PART,
                "higher",
                details=swapped,
            ),
        ]
        for name, sizes in _MIXES.items():
            seeds = range(1, context.pick(2, 6))
            found = [
                subject.ask("churn", sizes=list(sizes), seed=seed, steps=context.pick(3000, 20_000)) for seed in seeds
            ]
            report.rows += [
                Row(
                    f"{name}: active when a block finds no place, least of the seeds",
                    min(each["used"] for each in found),
                    "%",
                    _USED,
                    "higher",
                    details={"seeds": found},
                ),
                Row(
                    f"{name}: tries without a place, of 1,000 requests",
                    1000 * sum(each["failures"] for each in found) / sum(each["asked"] for each in found),
                    "",
                ),
            ]
    report.notes.append(
        "Blocks lie at multiples of their size (ADR 0059); pieces that may lie apart are not built yet."
    )
    return report
