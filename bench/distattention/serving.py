"""Table 2 and Figure 8 of Infinite-LLM: 18 workloads, the throughput of each design, and latency under rising load.

All requests are there at the start: throughput is requests over the time to the last token. Twice: with prompts that
are computed, and with prompts that come with their KV (the paper does not say what it counts). Simulated, on assumed
hardware. The baseline is the better of one large engine (vLLM-v2) and a pipeline, which serve every request. Engines
alone (vLLM-v1), with migration or without, refuse what is longer than an engine's memory; the table says how many.
Requests longer than a fleet that lends can hold are left out for all, and counted.

With the same memory, about as many sequences decode at a time in every design. So lending is faster only where a step
takes less time on few GPUs than on all, that is where tensor parallelism costs more in communication than it saves
in reading weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.result import Report, Row
from kvpool.sim.lending_study import DESIGNS, LONG_PARTS, SETTINGS, Design, Lengths, Setting, fleet, requests
from kvpool.sim.workload import Arrival

TITLE = f"Infinite-LLM Table 2, Fig 8: throughput of 18 workloads, latency under load; {LABEL}"
PEERS: tuple[str, ...] = ()
_GOALS = dict(zip(LONG_PARTS, (1.4, 1.1, 1.03), strict=True))
_CHUNKS = {"prompts computed": 4096, "prompts with KV": 0}
_LOADS = (0.25, 0.5, 0.75, 0.9, 1.1)  # of what lending serves at most
_CURVES: tuple[Design, ...] = ("lending", "one", "pipeline")


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    count = context.pick(100, 1000)
    settings = SETTINGS[:2] if context.quick else SETTINGS
    table: list[dict[str, Any]] = []
    for setting in settings:
        for number, part in zip(setting.datasets, LONG_PARTS, strict=True):
            for what in _CHUNKS:
                table.append(_workload(setting, part, number, what, "logarithmic", count))
                if part == LONG_PARTS[0]:
                    table.append(_workload(setting, part, number, what, "chat", count))
    report.rows += [_row(entry) for entry in table]
    curves = {setting.name: _curves(setting, count // 4, table) for setting in settings}
    report.series = {"table": table, "latency": curves}
    panels = [partial(_paint, curves=lines, name=name) for name, lines in curves.items()]
    title = f"Latency under load, 1 % long requests, prompts computed; {LABEL}"
    report.plots += plots.draw(context.out / "dist-serving.png", title, *panels)
    return report


def _workload(setting: Setting, part: float, number: int, what: str, lengths: Lengths, count: int) -> dict[str, Any]:
    every = requests(setting, part, count=count, lengths=lengths)
    arrivals = _held(setting, every)
    found: dict[str, Any] = {
        "dataset": number, "setting": setting.name, "long_part": part, "lengths": lengths, "what": what,
        "too_long_for_lending": len(every) - len(arrivals), "designs": {},
    }  # fmt: skip
    for design in DESIGNS:
        done = fleet(setting, design, chunk_tokens=_CHUNKS[what]).run(arrivals)
        found["designs"][design] = {
            "requests_s": done.requests_s,
            "output_tokens_s": done.output_tokens_s,
            "served": len(done.done),
            "refused": done.refused + done.given_up,
            "stopped": done.stopped,
            "moved": done.moved,
            "busy": done.busy_s / done.end_s,
            "waited_for_creditors": done.remote_s / done.busy_s,
            "away": sum(done.away) / len(done.away) if done.away else 0.0,
        }
    return found


def _held(setting: Setting, every: Sequence[Arrival]) -> list[Arrival]:
    """Those that a fleet that lends can hold."""
    most = fleet(setting, "lending").context_max
    return [each for each in every if each.prompt + each.response < most]


def _row(entry: dict[str, Any]) -> Row:
    designs = entry["designs"]
    best = max(designs["one"]["requests_s"], designs["pipeline"]["requests_s"])
    head = f"{entry['dataset']}: {entry['setting']}, {entry['long_part']:.0%} long"
    kind = "" if entry["lengths"] == "logarithmic" else f", {entry['lengths']} lengths"
    return Row(
        f"{head}, {entry['what']}{kind}",
        designs["lending"]["requests_s"] / best,
        "x of the best baseline",
        _GOALS[entry["long_part"]],
        "higher",
        details=entry,
    )


def _curves(setting: Setting, count: int, table: list[dict[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Mean latency at rates up to a little more than lending serves; of fewer requests."""
    most = next(
        entry["designs"]["lending"]["requests_s"]
        for entry in table
        if (entry["setting"], entry["long_part"], entry["lengths"]) == (setting.name, LONG_PARTS[0], "logarithmic")
    )
    lines: dict[str, list[dict[str, float]]] = {design: [] for design in _CURVES}
    for load in _LOADS:
        arrivals = _held(setting, requests(setting, LONG_PARTS[0], count=count, rate=load * most))
        for design in _CURVES:
            done = fleet(setting, design).run(arrivals)
            lines[design].append({"rate": load * most, "latency_s": done.latency_s})
    return lines


def _paint(axes: Any, curves: dict[str, list[dict[str, float]]], name: str) -> None:
    for number, (design, points) in enumerate(curves.items()):
        rates, latencies = [point["rate"] for point in points], [point["latency_s"] for point in points]
        axes.plot(rates, latencies, "o-", color=plots.shade(number, len(curves)), label=design)
    axes.set_yscale("log")
    axes.set_xlabel(f"requests/s ({name})")
    axes.set_ylabel("mean latency, s")
    axes.legend(frameon=False, fontsize=7)
