"""Attention over sequences that lie in the pools of two processes, against one process that has it all.

The other process computes its part (`there`), or its memory is read from here (`here`), or its blocks are fetched in
each step and then read here (`fetch`). One process with two threads is the reference; the two processes have one thread
each. All take turns. A block has one layer, so a fetch moves nothing that the step does not need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import kvpool
from bench.attention.shapes import BLOCK_TOKENS, HEADS, LAYOUT, TOKEN_BYTES, filled_pool, query
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "Attention between two processes: the query to the blocks, the blocks read from here, or fetched"
PEERS: tuple[str, ...] = ()
_FETCH_GOAL = 1.8  # times as fast as fetching each step, 64k tokens
_TWO_GOALS = {65536: 1.03, 8192: 1.05}  # of one process's time


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report()
    with Remote("bench.attention.creditor") as creditor:
        blocks = context.pick(16384, 65536) // BLOCK_TOKENS
        address = creditor.ask("listen", name="creditor", layout=LAYOUT, blocks=3 * blocks + 64, threads=1)
        layout = kvpool.KVLayout(**LAYOUT)
        with (
            filled_pool(layout, 2 * blocks + 64, name="borrower", attend_threads=1) as here,
            filled_pool(layout, 2 * blocks + 64, name="whole", attend_threads=2) as whole,
        ):
            here.peers.connect(address)
            rounds = context.pick(15, 60)
            for tokens in (16384,) if context.quick else (8192, 65536):
                with report.guarded(f"{tokens:,} tokens"):
                    report.rows.extend(_two_processes(here, whole, tokens, rounds))
            with report.guarded("small calls"):
                report.rows.extend(_small_calls(here, context.pick(200, 2000)))
            with report.guarded("a creditor's own decode"):
                report.rows.append(_own_decode(here, creditor, blocks))
        creditor.ask("close")
    report.notes.append(f"bfloat16, {HEADS} query heads, {LAYOUT['kv_heads']} KV heads x {LAYOUT['head_dim']}.")
    return report


class Split:
    """A sequence of which the first half lies with the creditor."""

    def __init__(self, pool: kvpool.Pool, tokens: int) -> None:
        n = tokens // BLOCK_TOKENS
        self.pool = pool
        self.lent = pool.alloc(n // 2, kvpool.DRAM, instance="creditor")
        self.own = pool.alloc(n - n // 2, kvpool.DRAM)
        self.seq = pool.sequence(np.concatenate([self.lent, self.own]))
        self.q = query(pool, HEADS)

    def step(self, where: Any) -> float:
        start = perf_counter()
        self.pool.attend(0, self.q, [self.seq], where=where).wait()
        return perf_counter() - start

    def fetch_step(self) -> float:
        start = perf_counter()
        fetch = self.pool.fetch("creditor", self.lent, medium=kvpool.DRAM).wait()
        with self.pool.sequence(np.concatenate([fetch.addrs, self.own])) as seq:
            self.pool.attend(0, self.q, [seq]).wait()
        self.pool.free(fetch.addrs)
        return perf_counter() - start

    def close(self) -> None:
        self.seq.close()
        self.pool.free(np.concatenate([self.lent, self.own]))


def _two_processes(here: kvpool.Pool, whole: kvpool.Pool, tokens: int, rounds: int) -> list[Row]:
    split = Split(here, tokens)
    addrs = whole.alloc(tokens // BLOCK_TOKENS, kvpool.DRAM)
    with whole.sequence(addrs) as seq:
        q = query(whole, HEADS)

        def one_process() -> float:
            start = perf_counter()
            whole.attend(0, q, [seq]).wait()
            return perf_counter() - start

        ways: dict[str, Callable[[], float]] = {
            "one process": one_process,
            "there": lambda: split.step("there"),
            "here": lambda: split.step("here"),
            "auto": lambda: split.step("auto"),
            "fetch": split.fetch_step,
        }
        times = in_turns(ways, rounds)
    whole.free(addrs)
    split.close()
    best = min(times["there"], times["here"])
    text = f"{tokens:,} tokens, half with a peer"
    return [
        Row(f"{text}: there, of one process's time", times["there"] / times["one process"], "x",
            _TWO_GOALS.get(tokens), details={"seconds": times, "kv_bytes": tokens * TOKEN_BYTES}),
        Row(f"{text}: there, times as fast as fetching", times["fetch"] / times["there"], "x",
            _FETCH_GOAL if tokens == 65536 else None, "higher"),
        Row(f"{text}: auto, of the best way's time", times["auto"] / best, "x", 1.1),
    ]  # fmt: skip


def in_turns(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        for name, way in ways.items():
            took = way()
            if turn >= 3:
                times[name].append(took)
    return {name: median(took) for name, took in times.items()}


def _small_calls(here: kvpool.Pool, rounds: int) -> list[Row]:
    lent = here.alloc(32, kvpool.DRAM, instance="creditor")
    seqs = [here.sequence(lent[i : i + 1], tokens=1) for i in range(32)]
    rows = []
    for batch, target, pause in ((1, 20.0, 0.0), (32, 150.0, 0.0), (1, 100.0, 1e-3)):
        q = query(here, HEADS, batch)
        took = []
        for _ in range(rounds):
            if pause:
                time.sleep(pause)
            start = perf_counter()
            here.attend(0, q, seqs[:batch], where="there").wait()
            took.append(perf_counter() - start)
        after = " after 1 ms of sleep" if pause else ""
        what = f"one token with a peer, batch of {batch}{after}"
        rows.append(Row(what, median(took) * 1e6, target=target, p99=float(np.percentile(took, 99)) * 1e6))
    for seq in seqs:
        seq.close()
    here.free(lent)
    return rows


def _own_decode(here: kvpool.Pool, creditor: Remote, blocks: int) -> Row:
    """The creditor decodes over its blocks, alone and while a fifth of its time is lent."""
    creditor.ask("decode", blocks=blocks // 2)
    time.sleep(2)
    alone = creditor.ask("decoded")
    lent = here.alloc(blocks // 2, kvpool.DRAM, instance="creditor")
    with here.sequence(lent) as seq:
        q = query(here, HEADS)
        creditor.ask("decode", blocks=blocks // 2)
        until = perf_counter() + 3
        while perf_counter() < until:
            start = perf_counter()
            here.attend(0, q, [seq], where="there").wait()
            time.sleep(4 * (perf_counter() - start))  # a fifth of the time
        shared = creditor.ask("decoded")
    here.free(lent)
    return Row("a creditor's own step while it lends a fifth, of its step alone", shared / alone, "x", 1.1 / 0.8)
