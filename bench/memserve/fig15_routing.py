"""Figure 15 of the MemServe paper: routing policies against the share ratio, the number of identical requests.

80 sessions of document questions, roughly 250 requests, and everything up to four times over, at random times, onto
three instances. Simulated: times come from the cost model (bench/memserve/assumed.py), decoding disturbs nobody. Real:
the global scheduler, its trees, each instance's radix index.

"Session" sends a session where a hash of its id says, as by a connection's id; "session, placed" begins each session at
the shortest queue, which the paper does not say, and which is a stronger baseline. The paper's gain is the target
against either. All instances keep what they computed, so both find what the same instance computed for another session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bench import plots
from bench.context import Context
from bench.memserve.assumed import MODEL, TRANSFER
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.policy import cost, routing
from kvpool.sim.routing_fleet import FleetSim
from kvpool.sim.routing_sessions import DocumentSessions

TITLE = "MemServe Fig 15: routing policies against the share ratio, simulated"
PEERS: tuple[str, ...] = ()
_INSTANCES = 3
_CAPACITY_BLOCKS = 7000  # 112,000 tokens, 92 GB of Llama-2-13B: what two devices of 80 GB leave
_SHARES = (1, 2, 3, 4)
_RATE = 30.0  # requests a second and instance
_RATES = (10.0, 20.0, 30.0, 35.0)
_GAIN = 50.0  # per cent
_POLICIES: dict[str, Callable[[], routing.Policy]] = {
    "least load": routing.LeastLoad,
    "session": lambda: routing.SessionId("hash"),
    "session, placed": routing.SessionId,
    "longest prefix": routing.LongestPrefix,
    "queue + exec": routing.QueuePlusExec,
    "queue + exec, thrift 0.5": lambda: routing.QueuePlusExec(thrift=0.5),
    "queue + exec, fetching": routing.QueuePlusExec,
}
_AS_IN_THE_PAPER = routing.Balance(  # whose policies may leave an instance idle
    patience=float("inf"), cap=2.0, idle=0.2, half_life_s=30.0
)
_SESSIONS, _PLACED = "session", "session, placed"
_TREES = ("longest prefix", "queue + exec", "queue + exec, thrift 0.5", "queue + exec, fetching")


class Subject:
    """The simulator; see bench/remote.py."""

    def simulate(self, policy: str, share: int, rate: float, seeds: int) -> list[dict[str, float]]:
        model = MODEL.spread(cost.Parallel(tp=2))
        transfer = TRANSFER if policy.endswith("fetching") else None
        results = []
        for seed in range(seeds):
            fleet = FleetSim(
                lambda clock: routing.GlobalScheduler(
                    model,
                    clock,
                    policy=_POLICIES[policy](),
                    transfer=transfer,
                    balance=_AS_IN_THE_PAPER,
                    learn_at="response",  # §6
                ),
                _INSTANCES,
                model,
                _CAPACITY_BLOCKS,
                transfer=transfer,
            )
            done = fleet.run(DocumentSessions().sessions(share, rate * _INSTANCES, seed))
            results.append(
                {
                    "p99_ms": 1e3 * float(np.quantile(done.ttft_s, 0.99)),
                    "mean_ms": 1e3 * float(done.ttft_s.mean()),
                    "hit_ratio": done.hit_ratio,
                    "fetched": float(done.fetched_tokens.sum() / done.prompt_tokens.sum()),
                    "imbalance": done.imbalance,
                    "busy": float(done.work_s.mean() / done.end_s),
                    "requests": len(done.ttft_s),
                }
            )
        return results


def run(context: Context) -> Report:
    report = Report()
    seeds = context.pick(2, 9)
    series: dict[str, Any] = {"by_share": {}, "by_rate": {}}
    with Remote(__name__) as subject:
        for name in _POLICIES:
            series["by_share"][name] = [
                _middle(subject.ask("simulate", policy=name, share=share, rate=_RATE, seeds=seeds)) for share in _SHARES
            ]
            if not context.quick:
                series["by_rate"][name] = [
                    _middle(subject.ask("simulate", policy=name, share=2, rate=rate, seeds=seeds)) for rate in _RATES
                ]
    shares = series["by_share"]
    for at, share in enumerate(_SHARES):
        report.rows += [
            Row(f"share ratio {share}: {name}, P99 TTFT", points[at]["p99_ms"], "ms", details=points[at])
            for name, points in shares.items()
        ]
        for name in _TREES:
            target = _GAIN if share > 1 else None
            for other in (_SESSIONS, _PLACED):
                gain = 100 * (1 - shares[name][at]["p99_ms"] / shares[other][at]["p99_ms"])
                what = f"share ratio {share}: {name}, P99 TTFT below that of {other}"
                report.rows.append(Row(what, gain, "%", target, better="higher"))
    report.series = {"shares": _SHARES, "rate_per_instance": _RATE, "rates": _RATES, **series}
    panels = [partial(_paint, lines=shares, x=_SHARES, label=f"share ratio, at {_RATE:.0f} requests/s an instance")]
    if series["by_rate"]:
        panels.append(partial(_paint, lines=series["by_rate"], x=_RATES, label="requests/s an instance, share ratio 2"))
    report.plots += plots.draw(
        context.out / "fig15.png", "Routing policies, three instances, simulated (MemServe, Fig 15)", *panels
    )
    report.notes.append(
        f"{_INSTANCES} instances, {DocumentSessions().documents} sessions times the share ratio, {_RATE:.0f} requests "
        f"a second and instance, medians of {seeds} seeds. A prefill of 1,024 tokens takes "
        f"{1e3 * MODEL.spread(cost.Parallel(tp=2)).exec_s(1024):.0f} ms."
    )
    return report


def _middle(results: list[dict[str, float]]) -> dict[str, float]:
    """Each figure's median over the seeds, and how far the P99 spreads."""
    middle = {name: median(result[name] for result in results) for name in results[0]}
    p99 = [result["p99_ms"] for result in results]
    return {**middle, "p99_least_ms": min(p99), "p99_most_ms": max(p99)}


def _paint(axes: Any, lines: dict[str, list[dict[str, float]]], x: tuple[float, ...], label: str) -> None:
    for number, (name, points) in enumerate(lines.items()):
        colour = plots.shade(number, len(lines))
        axes.plot(x, [point["p99_ms"] for point in points], marker="o", color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xticks(x)
    axes.set_xlabel(label)
    axes.set_ylabel("P99 TTFT (ms)")
    axes.legend(frameon=False, fontsize=7)
