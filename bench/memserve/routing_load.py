"""Routing under load: hits against one ideal cache, balance and TTFT at 10, 50 and 80 % busy, over eight instances.

Six workloads: two recorded traces of Mooncake's and one of ReAct's prompts (left out where they are not at hand:
docs/traces.md), and three generated ones. Recorded arrivals are sped up or slowed down until the fleet is as busy as it
should be; sessions of generated ones start more or less often, and think as long. As busy as it should be means with
the hits of the ideal cache, so arrivals are the same for all policies, and one that has fewer hits is busier.

The ideal is one LRU cache as large as the caches of all instances together, in the order of arrival, with nothing to
wait for: what a prompt holds is there when the next one comes. Hits are counted in blocks, by the instances' own
indexes. Partitioned caches can have more, since LRU is not the best there is.

The scheduler learns at dispatch; with events it follows the instances' events as well, as `kvpool router` does. What it
did not learn from events it forgets half a span after the last use. Caches are small enough that live blocks are
evicted; only so do events tell it what it does not know. The notes say which runs are the same all the same.
Simulated are times (bench/memserve/assumed.py).
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, log, sqrt
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bench.context import Context
from bench.memserve.assumed import MODEL
from bench.remote import Remote
from bench.result import Report, Row
from kvpool import PromptIndex
from kvpool.policy import cost, routing
from kvpool.sim.generators import PRESETS, generate
from kvpool.sim.routing_fleet import FleetSim, Session, Turn
from kvpool.sim.times import CountedInBlocks

TITLE = "Routing under load: hits, balance and TTFT at 10, 50 and 80 % busy, simulated"
PEERS: tuple[str, ...] = ()
_ROOT = Path(__file__).resolve().parents[2]
_TRACES = Path(os.environ.get("KVPOOL_TRACES") or _ROOT.parent / "shared" / "traces")
_INSTANCES = 8
_LOADS, _QUICK_LOADS = (0.1, 0.5, 0.8), (0.5,)
_REQUESTS, _QUICK_REQUESTS = 3000, 400
_TOKEN_S = 0.03  # of decoding
_SEED = 1
_ROUNDS = 30  # at most, to find the rate of sessions
_OFF = 0.01  # how far the load may be from what it is said to be
_STRETCH = 1.3  # at most, of the times of generated sessions
_TTL = 0.5  # of the span
_DEFAULT = "default"
_POLICIES: dict[str, Callable[[], routing.Policy | None]] = {
    _DEFAULT: lambda: None,
    "queue + exec": routing.QueuePlusExec,
    "queue + exec, thrift 1": lambda: routing.QueuePlusExec(thrift=1.0),
    "longest prefix": routing.LongestPrefix,
    "session": routing.SessionId,
    "least load": routing.LeastLoad,
}
_QUICK_POLICIES = (_DEFAULT, "queue + exec")
_HIT_SHARE, _IMBALANCE = 95.0, 1.3

Ids = npt.NDArray[np.int32]
_NOTHING: Final[Ids] = np.zeros(0, np.int32)


@dataclass(frozen=True)
class _Asked:
    """A request: when, of which session, the ids of its prompt and of its answer."""

    time_s: float
    session: str
    prompt: Ids
    output: Ids


@dataclass(frozen=True)
class _Workload:
    """Requests, and the fleet for them.

    Attributes:
        make: So many requests; at a rate of sessions, if they are not recorded.
        unit: Tokens of an id.
        blocks: Of all instances together, one for an id.
        tp: GPUs of an instance.
        file: The trace; "": generated.
        few: The blocks at 10 % busy, where fewer sessions overlap; 0: as `blocks`.
    """

    make: Callable[[int, float], list[_Asked]]
    unit: int
    blocks: int
    tp: int = 1
    file: str = ""
    few: int = 0


def _recorded(file: str, requests: int, _: float) -> list[_Asked]:
    with lzma.open(_TRACES / file, "rt") as lines:
        rows = [json.loads(line) for _, line in zip(range(requests), lines, strict=False)]
    gaps = np.random.default_rng(_SEED).exponential(1.0, len(rows)).cumsum()  # for a trace without times
    return [
        _Asked(
            float(row.get("timestamp", 1000 * gaps[at])) / 1000,
            str(row.get("session", at)),
            np.array(row["hash_ids"], np.int32),
            _NOTHING,
        )
        for at, row in enumerate(rows)
    ]


def _generated(shape: str, before: int, changes: dict[str, Any], requests: int, rate: float) -> list[_Asked]:
    """Requests of sessions in the middle of their flow: those `before` are left out, and as many come after."""
    total = before + 2 * requests if before else requests
    workload = generate(PRESETS[shape], rate=rate, requests=total, seed=_SEED, block_tokens=64, **changes)
    asked: list[_Asked] = []
    for first in workload.start():
        name, time_s = first.session or str(len(asked)), first.time_s
        turns = [first, *(first.then or ())]
        for at, turn in enumerate(turns):
            if at:
                time_s += _TOKEN_S * turns[at - 1].output + turn.time_s
            asked.append(_Asked(time_s, name, turn.ids, turn.output_ids))
    asked.sort(key=lambda each: each.time_s)
    return asked[before : before + requests]


_CHAT = {"prompt": 400, "output": 100, "shared": 1024, "think_s": 5.0}
_WORKLOADS: dict[str, _Workload] = {
    "conversation": _Workload(partial(_recorded, file := "mooncake_conversation_trace.jsonl.xz"), 512, 30_000, 4, file),
    "arxiv": _Workload(partial(_recorded, file := "mooncake_arxiv_first1000.jsonl.xz"), 512, 4_000, 4, file),
    "react": _Workload(partial(_recorded, file := "derived_react_hotpotqa_blk16.jsonl.xz"), 16, 4_000, 1, file),
    "documents": _Workload(partial(_generated, "documents", 0, {}), 64, 32_000),
    "agents": _Workload(partial(_generated, "agent", 3000, {}), 64, 12_000, few=4_000),
    "chat": _Workload(partial(_generated, "chat", 3000, _CHAT), 64, 24_000, few=5_000),
}


class Subject:
    """The simulator; see bench/remote.py."""

    def load(self, workload: str, requests: int, busy: float) -> dict[str, float]:
        """Makes the requests that keep the fleet so busy; returns what the ideal cache does with them."""
        shape = _WORKLOADS[workload]
        self._shape = shape
        self._blocks = shape.few if shape.few and busy == _LOADS[0] else shape.blocks
        self._model = CountedInBlocks(MODEL.spread(cost.Parallel(tp=shape.tp)) if shape.tp > 1 else MODEL, shape.unit)
        if shape.file:
            asked = shape.make(requests, 1.0)
            hits, work_s, evicted = self._ideal(asked)
            factor = _too_fast(asked, work_s, busy)
        else:  # sessions start more often, and are as long as before
            asked, (hits, work_s, evicted), factor = self._so_busy(requests, busy)
        start_s = asked[0].time_s
        self._sessions = [
            Session(each.session, (each.time_s - start_s) * factor, [Turn(each.prompt, each.output)]) for each in asked
        ]
        span_s = self._sessions[-1].start_s
        return {
            "hit_ratio": hits,
            "requests": len(asked),
            "span_s": span_s,
            "busy": work_s / (_INSTANCES * span_s),
            "blocks": self._blocks,
            "evicted": evicted,
        }

    def _so_busy(self, requests: int, busy: float) -> tuple[list[_Asked], tuple[float, float, int], float]:
        """Requests at the rate that keeps the fleet so busy, the ideal cache's figures, and a factor for times.

        Faster sessions overlap more, so they evict more of each other, and work grows faster than the rate: the rate is
        bracketed and halved, since following the proportion goes to and fro. With few requests the load jumps at a
        rate, over the one that is wanted; then times are stretched or shortened, which changes no hits of the ideal.
        """
        low, high, rate = 0.0, inf, 1.0
        best: tuple[float, list[_Asked], tuple[float, float, int]] = inf, [], (0.0, 0.0, 0)
        for _ in range(_ROUNDS):
            asked = self._shape.make(requests, rate)
            ideal = self._ideal(asked)
            factor = _too_fast(asked, ideal[1], busy)
            if abs(factor - 1) <= _OFF:
                return asked, ideal, 1.0
            if abs(log(factor)) < abs(log(best[0])):
                best = factor, asked, ideal
            low, high = (rate, high) if factor < 1 else (low, rate)
            rate = sqrt(low * high) if low and high < inf else rate * min(4.0, max(0.25, 1 / factor))
        factor, asked, ideal = best
        if abs(log(factor)) > log(_STRETCH):
            raise RuntimeError(f"no rate of sessions keeps the fleet {busy:.0%} busy; the best is off by {factor}")
        return asked, ideal, factor

    def _ideal(self, asked: list[_Asked]) -> tuple[float, float, int]:
        """The hit ratio of one cache, the seconds that all prompts take with its hits, and the blocks it evicts."""
        index, hits, tokens, work_s, evicted = PromptIndex(1), 0, 0, 0.0, 0
        for each in asked:
            whole = np.concatenate([each.prompt, each.output])
            with index.match(each.prompt) as hit, index.insert(whole, whole.astype(np.uint64)):
                hits, tokens = hits + hit.tokens, tokens + len(each.prompt)
                work_s += self._model.exec_s(len(each.prompt), hit.tokens)
            over = len(index) - self._blocks
            if over > 0:
                index.evict(over)
                evicted += over
        return hits / tokens, work_s, evicted

    def simulate(self, policy: str, events: bool) -> dict[str, float]:
        fleet = FleetSim(
            lambda clock: routing.GlobalScheduler(
                self._model,
                clock,
                policy=_POLICIES[policy](),
                ttl_s=_TTL * self._sessions[-1].start_s,
            ),
            _INSTANCES,
            self._model,
            self._blocks // _INSTANCES,
            token_s=_TOKEN_S * self._shape.unit,
            by_events=events,
        )
        done = fleet.run(self._sessions)
        starts = np.array([session.start_s for session in self._sessions])
        return {
            "hit_ratio": done.hit_ratio,
            "imbalance": done.imbalance,
            "busy": float(done.work_s.mean() / (starts + done.ttft_s).max()),  # until the last first token
            "p50_s": float(np.median(done.ttft_s)),
            "p99_s": float(np.quantile(done.ttft_s, 0.99)),
        }


def _too_fast(asked: list[_Asked], work_s: float, busy: float) -> float:
    """By what arrivals have to be slowed down for this work to keep the fleet so busy."""
    return work_s / (_INSTANCES * busy * (asked[-1].time_s - asked[0].time_s))


def run(context: Context) -> Report:
    report = Report()
    missing = [name for name, shape in _WORKLOADS.items() if shape.file and not (_TRACES / shape.file).is_file()]
    series: dict[str, Any] = {}
    policies = _QUICK_POLICIES if context.quick else tuple(_POLICIES)
    with Remote(__name__) as subject:
        for workload in _WORKLOADS:
            if workload in missing:
                continue
            for busy in _QUICK_LOADS if context.quick else _LOADS:
                ideal = subject.ask(
                    "load", workload=workload, requests=context.pick(_QUICK_REQUESTS, _REQUESTS), busy=busy
                )
                for events in (True, False):
                    done = {each: subject.ask("simulate", policy=each, events=events) for each in policies}
                    what = f"{workload}, {busy:.0%} busy, {'with' if events else 'without'} events"
                    series[what] = {"ideal": ideal, **done}
                    report.rows += _rows(what, ideal, done)
    report.series = series
    cells = list(series)
    alike = [what for what in cells[::2] if series[what] == series[what.replace("with events", "without events")]]
    report.notes.append(f"runs with and without events that are the same: {', '.join(alike) or 'none'}")
    report.notes.append(
        f"{_INSTANCES} instances; at most the first {context.pick(_QUICK_REQUESTS, _REQUESTS):,} requests of a trace, "
        f"as many of a generated workload, seed {_SEED}. The target of P99 TTFT is the best of the other policies."
    )
    if missing:
        report.notes.append(f"left out, since their traces are not at hand: {', '.join(missing)}")
    return report


def _rows(what: str, ideal: dict[str, float], done: dict[str, dict[str, float]]) -> list[Row]:
    """Three rows for each policy; only the default has targets."""
    best_s = min(figures["p99_s"] for policy, figures in done.items() if policy != _DEFAULT)
    rows = []
    for policy, figures in done.items():
        aims = policy == _DEFAULT
        share = 100 * figures["hit_ratio"] / ideal["hit_ratio"]
        name = f"{what}: {policy}"
        rows.append(Row(f"{name}, hits of one cache's", share, "%", _HIT_SHARE if aims else None, "higher"))
        most = _IMBALANCE if aims else None
        rows.append(Row(f"{name}, busiest instance, of the mean", figures["imbalance"], "x", most, details=figures))
        rows.append(Row(f"{name}, P99 TTFT", 1e3 * figures["p99_s"], "ms", 1e3 * best_s if aims else None))
    return rows
