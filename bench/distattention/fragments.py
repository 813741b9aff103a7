"""Figure 10 of Infinite-LLM: throughput over time with and without settlement of debts that go round (DGFM).

Four engines of Llama-2-13B, two GPUs each, requests of up to 480,000 tokens with their KV, more than the fleet serves.
Twice: by kvpool's rules, where a member that borrows is not asked to lend and debts come home while there is room; and
by the paper's, where all lend and nothing comes home but by settlement. Simulated, on assumed hardware.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.result import Report, Row
from kvpool.sim.lending_study import SETTINGS, fleet, lending_rules, requests

TITLE = f"Infinite-LLM Fig 10: throughput over time, settlement on and off; {LABEL}"
PEERS: tuple[str, ...] = ()
_WAYS: dict[str, dict[str, Any]] = {
    "kvpool's rules, on": {},
    "kvpool's rules, off": {"settle_every": 0},
    "the paper's rules, on": {"borrowers_lend": True, "payback": False},
    "the paper's rules, off": {"borrowers_lend": True, "payback": False, "settle_every": 0},
}
_WINDOWS = 20


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    seeds = context.pick(1, 5)
    results = {name: [_one(seed, changes, context) for seed in range(seeds)] for name, changes in _WAYS.items()}
    for name, runs in results.items():
        rates = [run["tokens_s"] for run in runs]
        report.rows.append(
            Row(f"{name}: tokens a second", sum(rates) / seeds, "tokens/s", details={"seeds": runs}, better="higher")
        )
    for rules in ("kvpool's rules", "the paper's rules"):
        gains = [
            on["tokens_s"] / off["tokens_s"]
            for on, off in zip(results[f"{rules}, on"], results[f"{rules}, off"], strict=True)
        ]
        cycles = sum(run["cycles"] for run in results[f"{rules}, on"]) / seeds
        what = f"{rules}: throughput with settlement, of that without"
        report.rows.append(
            Row(what, sum(gains) / seeds, "x", 1.0, "higher", details={"all": gains, "cycles_settled": cycles})
        )
    report.series = {name: runs[0]["over_time"] for name, runs in results.items()}
    paint = partial(_paint, lines=report.series)
    report.plots += plots.draw(context.out / "dist-fragments.png", f"Settlement on and off; {LABEL}", paint)
    return report


def _one(seed: int, changes: dict[str, Any], context: Context) -> dict[str, Any]:
    setting = SETTINGS[3]
    arrivals = requests(setting, 0.1, count=context.pick(150, 1000), seed=seed)
    done = fleet(setting, "lending", lending_rules(**changes), chunk_tokens=0, seed=seed).run(arrivals)
    market = done.market
    assert market is not None
    width = done.end_s / _WINDOWS
    over_time = [0.0] * (_WINDOWS + 1)
    for second, made in done.made.items():
        over_time[int(second / width)] += made / width
    return {
        "tokens_s": done.output_tokens_s,
        "cycles": market.cycles,
        "settled_blocks": market.settled,
        "payback_blocks": market.came_home,
        "away": sum(done.away) / len(done.away),
        "waited_for_creditors": done.remote_s / done.busy_s,
        "over_time": over_time[:_WINDOWS],
    }


def _paint(axes: Any, lines: dict[str, list[float]]) -> None:
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(range(len(points)), points, color=plots.shade(number, len(lines)), label=name)
    axes.set_xlabel("time, twentieths of the run")
    axes.set_ylabel("generated tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)
