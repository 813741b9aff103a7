"""The Mooncake conversation trace over eight instances: hits against one cache of the same total size, and balance.

Each id of the trace is one token of the trees here, and stands for 512 tokens in times: two prompts agree as far as
their ids do. The scheduler follows the instances' events. Simulated are times (bench/memserve/assumed.py), at the
trace's own arrivals. The ideal is one LRU cache of all instances' blocks, in the order of arrival.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.context import Context
from bench.memserve.assumed import MODEL
from bench.remote import Remote
from bench.result import Report, Row, Skipped
from kvpool import PromptIndex
from kvpool.policy import cost, routing
from kvpool.sim.routing_fleet import FleetSim, Session, Turn

TITLE = "Routing the Mooncake conversation trace over eight instances, simulated"
PEERS: tuple[str, ...] = ()
_ROOT = Path(__file__).resolve().parents[2]
_TRACE = Path(os.environ.get("KVPOOL_TRACES") or _ROOT.parent / "shared" / "traces") / (
    "mooncake_conversation_trace.jsonl.xz"
)
_ID_TOKENS = 512
_INSTANCES = 8
_BLOCKS, _QUICK_BLOCKS = (10_000, 30_000, 80_000), (30_000,)  # of all instances together; 512 tokens each
_QUICK_REQUESTS = 3000
_DEFAULT = "default"
_POLICIES: dict[str, Callable[[], routing.Policy]] = {
    _DEFAULT: routing.KeepHits,
    "least load": routing.LeastLoad,
    "longest prefix": routing.LongestPrefix,
    "queue + exec": routing.QueuePlusExec,
    "queue + exec, thrift 1": lambda: routing.QueuePlusExec(thrift=1.0),
}
_HIT_SHARE, _IMBALANCE = 95.0, 1.3


class _InIds(cost.CostModel):
    """The model, of prompts counted in ids."""

    def __init__(self, model: cost.CostModel) -> None:
        super().__init__(model.model, model.fits, model.parallel, block_tokens=1)
        self._in_tokens = model

    def exec_s(self, tokens: int, cached: int = 0, in_dram: int = 0) -> float:
        return self._in_tokens.exec_s(_ID_TOKENS * tokens, _ID_TOKENS * cached, _ID_TOKENS * in_dram)

    def exec_many_s(self, tokens: int, cached: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return self._in_tokens.exec_many_s(_ID_TOKENS * tokens, _ID_TOKENS * cached)


class Subject:
    """The simulator; see bench/remote.py."""

    def load(self, requests: int) -> int:
        with lzma.open(_TRACE, "rt") as lines:
            rows = [json.loads(line) for line in lines][: requests or None]
        nothing = np.zeros(0, np.int32)
        self._sessions = [
            Session(str(at), row["timestamp"] / 1000, [Turn(np.array(row["hash_ids"], np.int32), nothing)])
            for at, row in enumerate(rows)
        ]
        return len(rows)

    def ideal(self, blocks: int) -> float:
        index, hits, asked = PromptIndex(1), 0, 0
        for session in self._sessions:
            prompt = session.turns[0].prompt
            with index.match(prompt) as hit, index.insert(prompt, prompt.astype(np.uint64)):
                hits, asked = hits + hit.tokens, asked + len(prompt)
            if len(index) > blocks:
                index.evict(len(index) - blocks)
        return hits / asked

    def simulate(self, policy: str, blocks: int) -> dict[str, float]:
        model = _InIds(MODEL.spread(cost.Parallel(tp=4)))
        fleet = FleetSim(
            lambda clock: routing.GlobalScheduler(
                model,
                clock,
                policy=_POLICIES[policy](),
                ttl_s=None,
                learn_at="response",  # that is, from events alone
            ),
            _INSTANCES,
            model,
            blocks // _INSTANCES,
            by_events=True,
        )
        done = fleet.run(self._sessions)
        return {
            "hit_ratio": done.hit_ratio,
            "imbalance": done.imbalance,
            "requests_imbalance": float(np.bincount(done.instance, minlength=_INSTANCES).max() / done.instance.size)
            * _INSTANCES,
            "busy": float(done.work_s.mean() / done.end_s),
            "mean_s": float(done.ttft_s.mean()),
            "p99_s": float(np.quantile(done.ttft_s, 0.99)),
        }


def run(context: Context) -> Report:
    if not _TRACE.is_file():
        raise Skipped(f"no {_TRACE.name}: docs/traces.md says where to get it")
    report = Report()
    series: dict[str, Any] = {}
    with Remote(__name__) as subject:
        requests = subject.ask("load", requests=context.pick(_QUICK_REQUESTS, 0))
        for blocks in _QUICK_BLOCKS if context.quick else _BLOCKS:
            ideal = subject.ask("ideal", blocks=blocks)
            series[str(blocks)] = {"ideal": ideal}
            for policy in _POLICIES:
                done = subject.ask("simulate", policy=policy, blocks=blocks)
                series[str(blocks)][policy] = done
                aims = policy == _DEFAULT
                what = f"{blocks:,} blocks: {policy}"
                share = 100 * done["hit_ratio"] / ideal
                target = _HIT_SHARE if aims else None
                report.rows.append(Row(f"{what}, hits of one cache's", share, "%", target, "higher", details=done))
                most = _IMBALANCE if aims else None
                report.rows.append(Row(f"{what}, busiest instance, of the mean", done["imbalance"], "x", most))
    report.series = series
    report.notes.append(
        f"{requests:,} requests, {_INSTANCES} instances; blocks of {_ID_TOKENS} tokens, all instances together. Hits "
        "are counted in blocks, by the instances' own indexes."
    )
    return report
