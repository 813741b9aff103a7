"""Blocks on disk: flush and bring of a pool, beside a plain reader and writer of the same device with O_DIRECT.

All sides move the same bytes in turns, scattered over the file, `_DEPTH` blocks at a time: the plain ones by as many
threads with pread and pwrite into aligned memory, without checksums and without a journal; writes end with fdatasync.
What the pool adds is a checksum of all bytes, the journal, the index, and a copy between its memory and the store's.
Processor time is that of the whole process.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kvpool
from bench.context import Context
from bench.measure import no_collections
from bench.result import Report, Row

TITLE = "Blocks on disk: 256 KiB to 2 MiB, written by flush and read by swap_in, beside O_DIRECT on the same device"
_SIZES = (256 << 10, 1 << 20, 2 << 20)
_BYTES = 64 << 20  # of all blocks of a round
_DEPTH = 32
_TARGETS = {"write": 0.85, "read": 0.9}  # of the plain side
_TOKENS = 4  # of a block


def run(context: Context) -> Report:
    report = Report()
    context.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=context.out, prefix="kvpool-bench-") as folder:
        if shutil.disk_usage(folder).free < 8 * _BYTES:
            report.notes.append(f"{context.out} has too little room.")
            return report
        for size in _SIZES:
            report.rows += _measured(Path(folder), size, context.pick(3, 9), report)
    return report


def _measured(folder: Path, size: int, rounds: int, report: Report) -> list[Row]:
    count = _BYTES // size
    times: dict[str, dict[str, list[_Times]]] = {way: {"kvpool": [], "plain": []} for way in _TARGETS}
    plain = _Plain(folder / f"plain-{size}", size, count)
    with kvpool.Pool(
        kvpool.RawLayout(size, _TOKENS), dram_blocks=count, disk_blocks=2 * count, disk_path=folder / f"kv-{size}"
    ) as pool:
        view = pool.tensor(kvpool.DRAM).numpy()
        view[:] = np.random.default_rng(1).integers(0, 256, view.shape, np.uint8)
        for number in range(rounds + 1):
            # Prompts of one block each lie anywhere, and are read in another order.
            prompts = [np.arange(_TOKENS, dtype=np.int32) + _TOKENS * (count * number + one) for one in range(count)]
            for prompt in prompts:
                pool.insert(prompt, pool.alloc(1, medium=kvpool.DRAM)).close()
            timed = [
                ("write", "kvpool", _timed(lambda: pool.flush(everything=True, timeout=600))),
                ("write", "plain", _timed(plain.write)),
            ]
            pool.evict(count)
            matches = [pool.match(prompt) for prompt in random.Random(number).sample(prompts, count)]
            addrs = np.concatenate([match.addrs for match in matches])
            timed += [
                ("read", "kvpool", _timed(partial(_bring, pool, addrs))),
                ("read", "plain", _timed(plain.read)),
            ]
            for match in matches:
                match.close()
            pool.evict(count)
            pool.evict(count, kvpool.DISK)
            if number:  # the first round warms up
                for way, side, both in timed:
                    times[way][side].append(both)
        disk = pool.stats().disk
        if disk is not None:
            report.notes.append(f"{size >> 10} KiB: by {disk.engine}, O_DIRECT {'on' if disk.direct else 'refused'}.")
    plain.close()
    return [_row(way, size, times[way]) for way in times]


def _bring(pool: kvpool.Pool, addrs: npt.NDArray[np.uint64]) -> None:
    pool.swap_in(addrs, medium=kvpool.DRAM).close()


class _Times(NamedTuple):
    """Microseconds by the clock, and of the processor."""

    wall_us: float
    cpu_us: float


def _timed(call: Callable[[], object]) -> _Times:
    with no_collections():
        start, cpu = perf_counter_ns(), process_time()
        call()
        return _Times((perf_counter_ns() - start) / 1000, (process_time() - cpu) * 1e6)


def _row(way: str, size: int, times: dict[str, list[_Times]]) -> Row:
    speed = {side: _BYTES / median(both.wall_us for both in values) / 1000 for side, values in times.items()}
    cpu = {side: median(both.cpu_us for both in values) / _BYTES * 1000 for side, values in times.items()}
    return Row(
        what=f"{way}, blocks of {size >> 10} KiB",
        value=speed["kvpool"],
        unit="GB/s",
        target=_TARGETS[way] * speed["plain"],
        better="higher",
        peers={"plain O_DIRECT": speed["plain"]},
        details={
            "cpu_s_per_gb": cpu,
            "times_us": {side: [both.wall_us for both in values] for side, values in times.items()},
        },
    )


class _Plain:
    """The blocks in one file, each read and written by a thread of its number modulo `_DEPTH`."""

    def __init__(self, path: Path, size: int, count: int) -> None:
        flags = os.O_RDWR | os.O_CREAT
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:  # the file system has none
            self._file = os.open(path, flags, 0o600)
        os.posix_fallocate(self._file, 0, size * count)
        self._places = random.Random(7).sample([size * block for block in range(count)], count)
        self._memory = mmap.mmap(-1, size * count)
        self._memory[:] = os.urandom(1 << 20) * (size * count >> 20)
        whole = memoryview(self._memory)
        self._buffers = [whole[size * block : size * (block + 1)] for block in range(count)]
        self._threads = ThreadPoolExecutor(_DEPTH)

    def write(self) -> None:
        self._all(lambda buffer, place: os.pwritev(self._file, [buffer], place))
        os.fdatasync(self._file)

    def read(self) -> None:
        self._all(lambda buffer, place: os.preadv(self._file, [buffer], place))

    def close(self) -> None:
        self._threads.shutdown()
        for buffer in self._buffers:
            buffer.release()
        os.close(self._file)

    def _all(self, call: Callable[[memoryview, int], int]) -> None:
        for done, buffer in zip(self._threads.map(call, self._buffers, self._places), self._buffers, strict=True):
            if done != buffer.nbytes:
                raise AssertionError("a block was moved in part")
