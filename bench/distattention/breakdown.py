"""Figure 11 of Infinite-LLM: attention of two engines of four GPUs, beside tensor parallelism over all eight.

A layer's attention of one sequence of Llama-2-13B, half of it at each engine: what reads K and V, and what comes on
top: the query's way, the creditor's kernel under way, the answer, and merging. Simulated, on assumed hardware.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.result import Report, Row
from kvpool.sim.lending_study import SETTINGS, Setting, machines
from kvpool.sim.lending_times import Part, Remote, Work, layer_s, queue_s

TITLE = f"Infinite-LLM Fig 11: attention breakdown against tensor parallelism; {LABEL}"
PEERS: tuple[str, ...] = ()
_CONTEXTS = (8_192, 32_768, 65_536, 131_072, 262_144, 524_288)
_MERGE_S = 4e-6  # two kernels: scale and reduce


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(
        notes=[NOTE, "The paper has 5 to 10 % on top. A busy creditor has a step of one sequence under way."]
    )
    setting = Setting("llama-2-13b", 8, 4, *SETTINGS[3].datasets[:2], SETTINGS[3].datasets)
    two, whole = machines(setting, "lending"), machines(setting, "one")
    points = []
    for tokens in _CONTEXTS:
        half = two.times.part_s(Part(1, tokens // 2))
        trip = two.times.round_trip_s(1, two.near)
        queue = queue_s([], two.times.kernel_s(Work(1, local=Part(1, tokens // 4))))
        layer = layer_s(half, [Remote(queue, trip, half)]) + _MERGE_S
        tensor = whole.times.part_s(Part(1, tokens))
        points.append(
            {
                "tokens": tokens, "reads_us": 1e6 * half, "round_trip_us": 1e6 * trip, "queue_us": 1e6 * queue,
                "merge_us": 1e6 * _MERGE_S, "tensor_us": 1e6 * tensor,
                "idle_over": 100 * ((layer - queue) / tensor - 1), "over": 100 * (layer / tensor - 1),
            }
        )  # fmt: skip
    for point in points:
        what = f"{point['tokens']:,} tokens: on top of tensor-parallel attention, idle creditor"
        target = 10.0 if point["tokens"] >= 131_072 else None
        report.rows.append(Row(what, point["idle_over"], "%", target, details=point))
        report.rows.append(Row(f"{point['tokens']:,} tokens: busy creditor", point["over"], "%", details=point))
    report.series = {"points": points}
    paint = partial(_paint, points=points)
    report.plots += plots.draw(context.out / "dist-breakdown.png", f"Attention of a layer; {LABEL}", paint)
    return report


def _paint(axes: Any, points: list[dict[str, float]]) -> None:
    base = [0.0] * len(points)
    for number, key in enumerate(("reads_us", "round_trip_us", "queue_us", "merge_us")):
        parts = [point[key] for point in points]
        axes.bar(range(len(points)), parts, 0.5, base, label=key.removesuffix("_us"), color=plots.shade(number, 4))
        base = [before + part for before, part in zip(base, parts, strict=True)]
    axes.plot(
        range(len(points)), [point["tensor_us"] for point in points], "k_", ms=24, label="tensor-parallel, 8 GPUs"
    )
    axes.set_xticks(range(len(points)), [f"{point['tokens'] // 1024}k" for point in points])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("us a layer")
    axes.legend(frameon=False, fontsize=7)
