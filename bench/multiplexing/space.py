"""A space of several models: what sharing costs one model, how fast borrowed memory comes back, and how full it gets.

The churn counts places only. Blocks have as many layers and units as those of three Llamas would have of 32 KiB (16
tokens, fp16), and the space as many units as 5 GiB; a unit here is 4 KiB, so the memory is an eighth. Requests of
random models, whose popularity shifts, take blocks and end in the order in which they came; half of them leave a cached
prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

import kvpool
from bench.context import Context
from bench.measure import interleave, time_calls
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.space.units import Pieces

TITLE = "A space of several models: cost, reclaiming, and how full it gets"
PEERS: tuple[str, ...] = ()
_UNIT = 4 << 10
_BLOCKS = 256
_RATIO, _SCATTERED_RATIO, _METADATA, _DROP_MS, _SWAP_PART, _USED = 1.1, 10.0, 0.3, 10.0, 80.0, 97.0
_MIXES = {  # layers of each model, and units of a layer
    "7B, 13B, 33B": ((32, 8), (40, 10), (60, 13)),
    "7B, 13B, 70B with groups": ((32, 8), (40, 10), (80, 2)),
    "1B, 3B, 8B with groups": ((16, 1), (28, 2), (32, 2)),
}
_CHURN_UNITS = 5 * 2**30 // 2**15


class Subject:
    """The pools; see bench/remote.py."""

    def alloc(self, rounds: int) -> dict[str, float]:
        """Medians in microseconds of an alloc and a free of 256 blocks, of a plain pool and of the one in a space."""
        layout = kvpool.RawLayout(8 * _UNIT, 16)
        plain = kvpool.Pool(layout, 2048)
        space = kvpool.Space(2048 * 8 * _UNIT)
        combed = kvpool.Space(2 * _BLOCKS * 8 * _UNIT, unit=_UNIT)
        comb = combed.load("comb", kvpool.RawLayout(_UNIT, 16))
        units = comb.alloc(2 * _BLOCKS * 8)
        comb.free(units[kvpool.block_ids(units) % 2 == 0])  # not two next to each other are free
        cut = combed.load("cut", kvpool.KVLayout(8, 1, 64, "float16", 16), pieces="layer")
        pools = {"plain": plain, "space": space.load("only", layout), "scattered": cut}

        def both(pool: kvpool.Pool) -> Callable[[], list[float]]:
            return lambda: time_calls(lambda _: pool.free(pool.alloc(_BLOCKS)), range(20))

        found = interleave({name: both(pool) for name, pool in pools.items()}, rounds)
        plain.close()
        space.close()
        combed.close()
        return {name: sample.median_us for name, sample in found.items()}

    def metadata(self, units: int) -> float:
        """Metadata of a space with the smallest units, of a model with 8 units a block, per cent of the KV.

        Of two spaces the difference: what they take whatever their size does not count.
        """
        sizes = []
        for size in (units, 2 * units):
            with kvpool.Space(size * _UNIT, unit=_UNIT) as space:
                space.load("only", kvpool.RawLayout(8 * _UNIT, 16))
                sizes.append(space.stats().metadata_bytes)
        return 100 * (sizes[1] - sizes[0]) / (units * _UNIT)

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

    def churn(self, models: list[list[int]], pieces: Pieces, seed: int, steps: int) -> dict[str, Any]:
        """The mean share of the units that are active when an allocation fails, and how often places are missing.

        Where none does, the share is that when there are too few units.
        """
        dice = Random(seed)
        no_place: list[float] = []
        no_units: list[float] = []
        held: deque[tuple[int, Any]] = deque()
        asked = 0
        with kvpool.Space(_CHURN_UNITS * _UNIT, unit=_UNIT) as space:
            pools = [
                space.load(f"m{at}", kvpool.KVLayout(layers, units, 64, "float16", 16), pieces=pieces)
                for at, (layers, units) in enumerate(models)
            ]
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
                        tier = space.stats().hbm
                        reason = no_units if isinstance(error, kvpool.OutOfQuota) else no_place
                        reason.append(100 * tier.active / tier.capacity)
                        _end(pools, held.popleft(), dice, step)
                held.append((at, addrs))
        used = no_place or no_units or [100.0]
        return {"failures": len(no_place), "asked": asked, "used": float(np.mean(used))}


def _cache(pool: kvpool.Pool, blocks: int) -> None:
    addrs = pool.alloc(blocks)
    for at in range(0, blocks, 64):
        part = addrs[at : at + 64]
        pool.insert(np.arange(16 * len(part), dtype=np.int32) + (at << 20), part).close()


def _end(pools: Sequence[kvpool.Pool], request: tuple[int, Any], dice: Random, step: int) -> None:
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
        report.rows.append(
            Row(
                "alloc and free of 256 blocks in 8 pieces each, of a plain pool",
                times["scattered"] / times["plain"],
                "times",
                _SCATTERED_RATIO,
            )
        )
        report.rows.append(
            Row(
                "metadata of 4 KiB units and of one model with blocks of 8, of the KV",
                subject.ask("metadata", units=8192),
                "%",
                _METADATA,
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
        for name, models in _MIXES.items():
            for pieces in ("whole", "layer"):
                seeds = range(1, context.pick(2, 6))
                steps = context.pick(3000, 20_000)
                found = [subject.ask("churn", models=models, pieces=pieces, seed=seed, steps=steps) for seed in seeds]
                report.rows += [
                    Row(
                        f"{name}, pieces={pieces}: active when an allocation fails, least of the seeds",
                        min(each["used"] for each in found),
                        "%",
                        _USED if pieces == "layer" else None,
                        "higher",
                        details={"seeds": found},
                    ),
                    Row(
                        f"{name}, pieces={pieces}: failures for want of places, of 1,000 requests",
                        1000 * sum(each["failures"] for each in found) / sum(each["asked"] for each in found),
                        "",
                        0.0 if pieces == "layer" else None,
                    ),
                ]
    report.notes.append(
        "A block lies in any run of units (ADR 0067), and with pieces=layer in one run for each layer if it finds none."
    )
    return report
