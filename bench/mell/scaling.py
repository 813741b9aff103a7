"""Everything scales: an operation of MELL up to 10,000 GPUs, a routing decision up to 10,000 instances.

MELL: arrivals, departures and growth by turns, one by one, on fleets of so many GPUs whose requests are mostly small;
processor time. Moves that wait: an epoch of a `Backlog` with a move for each GPU, whose links carry some of them.
Routing: bench/memserve/decision.py, which says how it keeps other processes out of wall time.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from math import log
from time import thread_time
from typing import Any

import numpy as np

from bench import plots
from bench.context import Context
from bench.measure import no_collections, summarize
from bench.mell.cells import A100
from bench.memserve import decision
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.policy import mell

TITLE = "Scaling: MELL's operations against GPUs, routing decisions against instances"
PEERS: tuple[str, ...] = ()
_GPUS = (10, 100, 1_000, 10_000)
_INSTANCES = (1, 10, 100, 1_000, 10_000)
_PROMPTS = 10_000
_KINDS = ("arrival", "departure", "growth")
_TURNS = 300  # of all kinds, in a round
_ROUNDS = 5
_EPOCHS = 5


class Subject:
    """A scheduler in its process; see bench/remote.py."""

    def build(self, gpus: int) -> int:
        """A fleet that has come to so many GPUs; returns how many requests it has."""
        self._dice = np.random.default_rng(1)
        capacity = A100.capacity
        self._scheduler = scheduler = mell.Mell(capacity, mell.Settings(slack=capacity // 48))
        self._alive: list[int] = []
        self._next = 0
        while scheduler.gpu_count < gpus:
            scheduler.allocate(self._next, self._size())
            self._alive.append(self._next)
            self._next += 1
        return len(self._alive)

    def operations(self, turns: int) -> dict[str, list[float]]:
        """Processor times of single operations by turns, by kind; microseconds. The fleet keeps its size."""
        scheduler, alive, capacity = self._scheduler, self._alive, A100.capacity
        times: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        with no_collections():
            for turn in range(turns):
                at, size = int(self._dice.integers(len(alive))), self._size()
                victim, kind = alive[at], _KINDS[turn % len(_KINDS)]
                grown = min(capacity, scheduler.sizes[victim] + 200)
                started = thread_time()
                if kind == "arrival":
                    scheduler.allocate(self._next, size)
                elif kind == "departure":
                    scheduler.depart(victim)
                else:
                    scheduler.grow(victim, grown)
                times[kind].append(1e6 * (thread_time() - started))
                if kind == "arrival":
                    alive.append(self._next)
                    self._next += 1
                elif kind == "departure":
                    alive[at] = alive[-1]
                    alive.pop()
        return times

    def _size(self) -> int:
        return min(A100.capacity, max(1, int(self._dice.lognormal(np.log(1_200), 1.0))))

    def waiting(self, gpus: int) -> dict[str, float]:
        """Processor time of an epoch of a backlog, for each move that waits; microseconds."""
        dice = np.random.default_rng(2)
        moves = [mell.Move((number,), number, int(at), 1000) for number, at in enumerate(dice.integers(0, gpus, gpus))]
        moves = [move for move in moves if move.source != move.destination]
        sizes = {move.requests[0]: move.tokens for move in moves}
        free = dict.fromkeys(range(gpus), 10**6)
        limits = mell.Boundaries(lambda *ends: ends, dict.fromkeys(range(gpus), 1100), {})
        backlog = mell.Backlog()
        backlog.divide(moves, mell.Boundaries(lambda *ends: ends, {}, {}), {}, sizes, free)
        taken = []
        with no_collections():
            for _ in range(_EPOCHS):
                count = len(backlog)
                if not count:
                    break
                started = thread_time()
                backlog.divide([], limits, {}, sizes, free)
                taken.append(1e6 * (thread_time() - started) / count)
        return {"gpus": gpus, "moves": len(moves), "us_a_move": float(np.median(taken))}


def run(context: Context) -> Report:
    report = Report()
    operations, waiting = _operations(context)
    for entry in operations:
        what = f"MELL, an operation on {entry['gpus']:,} GPUs, {entry['requests']:,} requests"
        report.rows.append(Row(what, entry["mean_us"], p99=entry["p99_us"], details=entry))
    least, most = operations[0], operations[-1]
    what = f"MELL, an operation on {most['gpus']:,} GPUs, of one on {least['gpus']:,}"
    logarithm = log(most["gpus"]) / log(least["gpus"])
    report.rows.append(Row(what, most["mean_us"] / least["mean_us"], "x", logarithm))
    for entry in waiting:
        report.rows.append(Row(f"a move that waits, {entry['moves']:,} of them, each epoch", entry["us_a_move"]))
    routing = _routing(context, report)
    report.series = {"operations": operations, "waiting": waiting, "routing": routing}
    report.plots += plots.draw(
        context.out / "scaling.png",
        "Cost against size",
        partial(_paint_operations, points=operations),
        partial(_paint_routing, series=routing),
    )
    report.notes += [
        "Processor time; all sizes take turns. MELL: the least mean and 99th percentile of the rounds. Target of the "
        "ratio: that of the logarithms.",
        "Decisions: medians of all, the least 99th percentile of a batch. "
        "A decision looks at few instances: docs/internals/routing.md.",
    ]
    return report


def _operations(context: Context) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Operations, and moves that wait, for each size of fleet."""
    operations, waiting = [], []
    with ExitStack() as stack:
        subjects = {count: stack.enter_context(Remote(__name__)) for count in _GPUS[: context.pick(3, 4)]}
        requests = {count: subject.ask("build", gpus=count) for count, subject in subjects.items()}
        rounds: dict[int, list[dict[str, list[float]]]] = {count: [] for count in subjects}
        epochs: dict[int, list[dict[str, float]]] = {count: [] for count in subjects}
        for _ in range(context.pick(3, _ROUNDS)):
            for count, subject in subjects.items():
                rounds[count].append(subject.ask("operations", turns=_TURNS))
                epochs[count].append(subject.ask("waiting", gpus=count))
    for count, taken in rounds.items():
        everything = [[each for times in kinds.values() for each in times] for kinds in taken]
        operations.append(
            {
                "gpus": count,
                "requests": requests[count],
                "mean_us": min(float(np.mean(times)) for times in everything),
                "p99_us": min(summarize(times).p99_us for times in everything),
                **{f"{kind}_us": min(summarize(kinds[kind]).median_us for kinds in taken) for kind in _KINDS},
            }
        )
        waiting.append(min(epochs[count], key=lambda entry: entry["us_a_move"]))
    return operations, waiting


def _routing(context: Context, report: Report) -> dict[str, list[dict[str, Any]]]:
    series: dict[str, list[dict[str, Any]]] = {}
    policy = "queue plus execution"
    for name in decision.HOLDERS:
        series[name] = []
        with ExitStack() as stack:
            subjects = {
                count: stack.enter_context(Remote(decision.__name__)) for count in _INSTANCES[: context.pick(4, 5)]
            }
            for count, subject in subjects.items():
                subject.ask("build", instances=count, prompts=_PROMPTS, hot=name == "hot")
            batches: dict[int, list[list[float]]] = {count: [] for count in subjects}
            for seed in range(context.pick(3, decision.BATCHES)):
                for count, subject in subjects.items():
                    batches[count].append(subject.ask("decide", policy=policy, n=decision.BATCH, seed=seed))
        for count, taken in batches.items():
            row = decision.row_of(taken, policy, name, count, _PROMPTS)
            report.rows.append(row)
            series[name].append({"instances": count, "median_us": row.value, "p99_us": row.p99})
    return series


def _paint_operations(axes: Any, points: list[dict[str, Any]]) -> None:
    counts = [point["gpus"] for point in points]
    for number, kind in enumerate(_KINDS):
        times = [point[f"{kind}_us"] for point in points]
        axes.plot(counts, times, "o-", label=f"{kind}, median", color=plots.shade(number, 4))
    axes.plot(counts, [point["mean_us"] for point in points], "s-", label="all, mean", color=plots.shade(3, 4))
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("an operation of MELL (us)")
    axes.legend(frameon=False, fontsize=7)


def _paint_routing(axes: Any, series: dict[str, list[dict[str, Any]]]) -> None:
    for number, (name, points) in enumerate(series.items()):
        counts = [point["instances"] for point in points]
        colour = plots.shade(number, 3)
        axes.plot(counts, [point["median_us"] for point in points], "o-", label=f"{name}, median", color=colour)
        axes.plot(counts, [point["p99_us"] for point in points], "s--", label=f"{name}, 99 %", color=colour)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.axhline(decision.TARGET_US, color="grey", linewidth=0.8)
    axes.set_xlabel("instances")
    axes.set_ylabel("a routing decision (us)")
    axes.legend(frameon=False, fontsize=7)
