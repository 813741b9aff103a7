"""swap_out and swap_in of 1,024 aggregated blocks of 256 KiB, beside a memcpy of the same bytes.

The memcpy is as good as it gets: one contiguous range a thread, by as many threads, between the arenas of a pool of the
same shape. So both sides have the same kind of memory, shared mappings in huge pages where the machine gives them, all
of it touched before. And it is measured twice: as it comes, and told to write past the caches from 1 MiB on, which the
C library does of itself only above a size that depends on the machine. The target is held against the faster one.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from time import perf_counter_ns

import numpy as np

import kvpool
from bench.context import Context
from bench.measure import no_collections, summarize
from bench.remote import Remote
from bench.result import Report, Row
from bench.workload import BLOCK_TOKENS, random_tokens

TITLE = "Swap: 1,024 blocks of 256 KiB (256 MiB) between the tiers, beside a memcpy by as many threads"
_BLOCKS = 1024
_BLOCK_BYTES = 256 << 10
_BYTES = _BLOCKS * _BLOCK_BYTES
_PROMPT_BLOCKS = 256
_TARGET = 0.9  # of the faster memcpy
_STREAMING = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000"}
_MEMCPY = {"memcpy": {}, "memcpy past the caches": _STREAMING}
_WAYS = ("out", "in")

_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.CDLL(None))
)  # called through ctypes it runs without the GIL


class Subject:
    """A process that swaps, or one that copies; see bench/remote.py."""

    def start(self, threads: int) -> int:
        """Makes a pool and returns how many bytes of an arena are in huge pages."""
        layout = kvpool.RawLayout(block_bytes=_BLOCK_BYTES)
        self._pool = kvpool.Pool(layout, hbm_blocks=_BLOCKS, dram_blocks=_BLOCKS, copy_threads=threads)
        self._threads = threads
        self._workers = ThreadPoolExecutor(threads)
        views = [self._pool.tensor(medium).numpy() for medium in (kvpool.HBM, kvpool.DRAM)]
        for view in views:
            view[:] = 1  # committed by the pool; here, also written once
        self._hbm, self._dram = (view.ctypes.data for view in views)
        return min(self._pool.arena(medium).huge_page_bytes for medium in (kvpool.HBM, kvpool.DRAM))

    def fill(self, scattered: bool) -> None:
        """Caches prompts in all of HBM."""
        self._pool.evict(_BLOCKS, kvpool.HBM)
        self._pool.evict(_BLOCKS, kvpool.DRAM)
        addrs = self._pool.alloc(_BLOCKS)
        if scattered:
            np.random.default_rng(1).shuffle(addrs)
        for number, part in enumerate(np.split(addrs, _BLOCKS // _PROMPT_BLOCKS)):
            self._pool.insert(random_tokens(number, _PROMPT_BLOCKS * BLOCK_TOKENS), part).close()

    def swap(self) -> list[float]:
        """Swaps everything out and in again; microseconds."""
        with no_collections():
            start = perf_counter_ns()
            moved = self._pool.swap_out(_BLOCKS)
            out_us = (perf_counter_ns() - start) / 1000
            if len(moved) != _BLOCKS:
                raise AssertionError(f"{len(moved)} blocks swapped out")
            start = perf_counter_ns()
            held = self._pool.swap_in(moved)
            in_us = (perf_counter_ns() - start) / 1000
            held.close()
        return [out_us, in_us]

    def copy(self) -> list[float]:
        """Copies everything there and back; microseconds."""
        return [self._copy(self._dram, self._hbm), self._copy(self._hbm, self._dram)]

    def _copy(self, to: int, source: int) -> float:
        """An equal share a thread, the caller among them."""
        share = _BYTES // self._threads
        start = perf_counter_ns()
        others = [
            self._workers.submit(_memmove, to + number * share, source + number * share, share)
            for number in range(1, self._threads)
        ]
        _memmove(to, source, share)
        for other in others:
            other.result()
        return (perf_counter_ns() - start) / 1000


def run(context: Context) -> Report:
    report = Report()
    huge = 0
    for threads in (2,) if context.quick else (1, 2):
        with ExitStack() as processes:
            subjects = {"kvpool": processes.enter_context(Remote(__name__))}
            for name, variables in _MEMCPY.items():
                subjects[name] = processes.enter_context(Remote(__name__, environment=variables))
            huge = min(remote.ask("start", threads=threads) for remote in subjects.values())
            for scattered in (False, True):
                subjects["kvpool"].ask("fill", scattered=scattered)
                report.rows += _measure(subjects, threads, scattered, context.pick(5, 25))
    report.notes.append(
        f"{huge >> 20} MiB of each arena are in huge pages, on both sides. A swap includes the work of index and "
        f"allocator. The target is {_TARGET} of the faster memcpy."
    )
    return report


def _measure(subjects: dict[str, Remote], threads: int, scattered: bool, rounds: int) -> list[Row]:
    times: dict[str, dict[str, list[float]]] = {way: {name: [] for name in subjects} for way in _WAYS}
    for number in range(rounds + 1):
        for name, remote in subjects.items():  # in turns
            both = remote.ask("swap" if name == "kvpool" else "copy")
            for way, time_us in zip(_WAYS, both, strict=True):
                if number:  # the first round warms up
                    times[way][name].append(time_us)
    where = "scattered" if scattered else "contiguous"
    return [_row(f"swap_{way}, {where} blocks, {threads} thread{'s' * (threads > 1)}", times[way]) for way in _WAYS]


def _row(what: str, times: dict[str, list[float]]) -> Row:
    speed = {name: _BYTES / median(values) / 1000 for name, values in times.items()}
    own = speed.pop("kvpool")
    best = max(speed.values())
    memcpy = [values for name, values in times.items() if name != "kvpool"]
    return Row(
        what=what,
        value=own,
        unit="GB/s",
        target=_TARGET * best,
        better="higher",
        peers=speed,
        details={
            "of_the_faster_memcpy": own / best,
            "of_the_faster_memcpy_at_their_best": min(map(min, memcpy)) / min(times["kvpool"]),
            "samples": {name: asdict(summarize(values)) for name, values in times.items()},
        },
    )
