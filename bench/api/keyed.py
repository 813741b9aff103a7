"""128 keys of 32 bytes at once, in an index of 200,000: in each form that engines have them in; and blocks by key."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np

import kvpool
from bench.context import Context
from bench.measure import no_collections, summarize
from bench.result import Report, Row, timed_row

TITLE = "Keyed index: 128 keys"
BATCH = 128
KEY_BYTES = 32
TARGET_US = 50.0
TARGET_BYTES = 115.0
_FORMS: dict[str, Callable[[list[bytes]], Any]] = {
    "bytes": list,
    "hex": lambda keys: [key.hex() for key in keys],
    "array": lambda keys: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES),
}
_VERBS = ("exists", "match", "put")
_BLOCK_BYTES = 256 << 10


class Subject:
    """kvpool's answers; see bench/remote.py."""

    def fill(self, keys: int) -> float:
        """Bytes a key of an index of so many."""
        self._keys = [os.urandom(KEY_BYTES) for _ in range(keys)]
        self._index = kvpool.KeyedIndex(KEY_BYTES)
        for start in range(0, keys, 1000):
            chunk = self._keys[start : start + 1000]
            self._index.put(chunk, list(range(start, start + len(chunk))))
        return self._index.stats()["bytes"] / keys

    def verbs(self, form: str, n: int) -> list[list[float]]:
        """Times of n calls of each verb, with other keys in each."""
        make = _FORMS[form]
        known = random.Random(7).sample(self._keys, n * BATCH)  # not in the order in which they were put
        batches = [make(known[start : start + BATCH]) for start in range(0, n * BATCH, BATCH)]
        new = [make([os.urandom(KEY_BYTES) for _ in range(BATCH)]) for _ in range(n)]
        values = np.arange(BATCH, dtype=np.uint64)
        calls: list[tuple[Callable[[Any], object], list[Any]]] = [
            (self._index.exists, batches),
            (lambda keys: self._index.match(keys).close(), batches),
            (lambda keys: self._index.put(keys, values), new),
        ]
        times: list[list[float]] = []
        with no_collections():
            for call, asked in calls:
                own = []
                for keys in asked:
                    start = perf_counter_ns()
                    call(keys)
                    own.append((perf_counter_ns() - start) / 1000)
                times.append(own)
        return times

    def blocks(self, n: int) -> list[float]:
        """GB/s of put and get of 128 blocks in a keyed cache, and of a copy by NumPy."""
        rows = np.ones((BATCH, _BLOCK_BYTES), np.uint8)
        into = np.zeros_like(rows)
        keys = self._keys[:BATCH]
        times: list[list[float]] = [[], [], []]
        pool = kvpool.Pool(kvpool.RawLayout(_BLOCK_BYTES), dram_blocks=2 * BATCH)
        with pool, kvpool.KeyedCache(pool, BATCH, KEY_BYTES) as cache:
            steps: list[Callable[[], object]] = [
                lambda: cache.put(keys, rows),
                lambda: cache.get(keys, into),
                lambda: np.copyto(into, rows),
            ]
            for _ in range(n):
                for step, own in zip(steps, times, strict=True):
                    start = perf_counter_ns()
                    step()
                    own.append((perf_counter_ns() - start) / 1000)
                cache.forget(keys)
        return [rows.nbytes / summarize(own).median_us / 1000 for own in times]


def run(context: Context) -> Report:
    report = Report()
    with context.subjects(__name__) as subjects:
        own = subjects["kvpool"]
        keys = context.pick(100_000, 200_000)
        size = own.ask("fill", keys=keys)
        for form in _FORMS:
            for verb, times in zip(_VERBS, own.ask("verbs", form=form, n=context.pick(100, 400)), strict=True):
                samples = {"kvpool": summarize(times)}
                report.rows.append(timed_row(f"{verb}, keys as {form}", samples, TARGET_US, keys=keys))
        report.rows.append(Row("memory of the index", size, "bytes a key", TARGET_BYTES, details={"keys": keys}))
        rates = own.ask("blocks", n=context.pick(10, 40))
        for what, rate in zip(("put of 128 blocks of 256 KiB", "get of them", "NumPy's copy"), rates, strict=True):
            report.rows.append(Row(what, rate, "GB/s"))
    report.notes.append("put: of keys that are new. match: with the release of its pins.")
    return report
