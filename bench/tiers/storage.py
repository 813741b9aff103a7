"""Blocks through a DirectoryStore, beside plain files of the same sizes, on memory (tmpfs) and on this machine's disk.

All sides read and write the same bytes, in turns, in one thread, each block a file. Plain files are read with one
readinto, and written beside and renamed: without that, a reader may meet half a file. Those that are "checked" have a
CRC-32 of all bytes computed, as kvpool does; what kvpool adds then is the header, the folders and the time of last use.
The page cache holds all of it, so this measures the CPU's work, and not a drive: nothing is flushed, and reads come
from memory. That is the hard case for the ratio.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time
from typing import NamedTuple

import numpy as np

from bench.context import Context
from bench.measure import no_collections
from bench.result import Report, Row
from kvpool.storage import Content, DirectoryStore

TITLE = "Shared storage: blocks of 256 KiB to 2 MiB through a DirectoryStore, beside plain files"
_SIZES = (256 << 10, 1 << 20, 2 << 20)
_BYTES = 32 << 20  # of all blocks of a round
_TARGET = 0.85  # of checked files
_SIDES = ("kvpool", "files", "checked files")
_MEMORY = Path("/dev/shm")


def run(context: Context) -> Report:
    report = Report()
    context.out.mkdir(parents=True, exist_ok=True)
    for name, where in (("tmpfs", _MEMORY), ("disk", context.out)):
        if not os.access(where, os.W_OK):
            report.notes.append(f"{name}: {where} cannot be written to, and was left out.")
            continue
        with tempfile.TemporaryDirectory(dir=where, prefix="kvpool-bench-") as folder:
            if shutil.disk_usage(folder).free < 8 * _BYTES:
                report.notes.append(f"{name}: {where} has too little room, and was left out.")
                continue
            for size in _SIZES:
                report.rows += _measured(Path(folder), name, size, context.pick(3, 9))
    report.notes.append("Reads come from the page cache, and nothing is flushed: this is the CPU's work for each byte.")
    return report


def _measured(folder: Path, where: str, size: int, rounds: int) -> list[Row]:
    count = _BYTES // size
    blocks = np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)
    into = np.empty_like(blocks)
    keys = [bytes([number]) + number.to_bytes(31, "little") for number in range(count)]  # each in another folder
    contents: list[Content] = [[block.data] for block in blocks]
    targets: list[Content] = [[block.data] for block in into]
    plain = folder / f"plain-{size}"
    plain.mkdir()
    times: dict[str, dict[str, list[_Times]]] = {way: {side: [] for side in _SIDES} for way in ("write", "read")}
    with ExitStack() as stack:
        store = stack.enter_context(DirectoryStore(folder / f"store-{size}"))
        for number in range(rounds + 1):
            into[:] = 0
            timed = [
                ("write", "kvpool", _timed(lambda: store.put(keys, contents))),
                ("read", "kvpool", _timed(lambda: _all_there(store.get(keys, targets)))),
            ]
            if not np.array_equal(into, blocks):
                raise AssertionError("other bytes came back")
            timed += []
            for side, check in (("files", False), ("checked files", True)):
                timed.append(("write", side, _timed(partial(_write_files, plain, contents, check))))
                timed.append(("read", side, _timed(partial(_read_files, plain, targets, check))))
                for file in plain.iterdir():
                    file.unlink()
            store.delete(keys)
            if number:  # the first round warms up
                for way, side, both in timed:
                    times[way][side].append(both)
    return [_row(way, where, size, times[way]) for way in times]


def _row(way: str, where: str, size: int, times: dict[str, list[_Times]]) -> Row:
    speed = {side: _BYTES / median(both.wall_us for both in values) / 1000 for side, values in times.items()}
    cpu = {side: median(both.cpu_us for both in values) / _BYTES * 1000 for side, values in times.items()}
    return Row(
        what=f"{way}, {where}, blocks of {size >> 10} KiB",
        value=speed["kvpool"],
        unit="GB/s",
        target=_TARGET * speed["checked files"],
        better="higher",
        peers={side: speed[side] for side in _SIDES[1:]},
        details={
            "of_checked_files_in_processor_time": cpu["checked files"] / cpu["kvpool"],
            "cpu_s_per_gb": cpu,
            "times_us": {side: [both.wall_us for both in values] for side, values in times.items()},
        },
    )


class _Times(NamedTuple):
    """Microseconds by the clock, and of the processor, which others on the machine change less."""

    wall_us: float
    cpu_us: float


def _timed(call: Callable[[], object]) -> _Times:
    with no_collections():
        start, cpu = perf_counter_ns(), thread_time()
        call()
        return _Times((perf_counter_ns() - start) / 1000, (thread_time() - cpu) * 1e6)


def _all_there(found: list[bool]) -> None:
    if not all(found):
        raise AssertionError("a block was not found")


def _write_files(folder: Path, contents: list[Content], check: bool) -> None:
    for number, (block,) in enumerate(contents):
        if check:
            zlib.crc32(block)
        name = f"{folder}/{number}"
        with open(f"{name}.new", "xb", buffering=0) as file:
            file.write(block)
        os.rename(f"{name}.new", name)


def _read_files(folder: Path, targets: list[Content], check: bool) -> None:
    for number, (block,) in enumerate(targets):
        with open(f"{folder}/{number}", "rb", buffering=0) as file:
            if file.readinto(block) != block.nbytes:
                raise AssertionError("a file is short")
        if check:
            zlib.crc32(block)
