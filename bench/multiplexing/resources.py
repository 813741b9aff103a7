"""MuxServe's Figure 9: management of compute, then of memory, switched on one after the other, over alpha.

Four models on one mesh of four GPUs. First temporal multiplexing, step by step, with an equal part of the
memory for each model; then ADBS runs prefill and decode beside each other, in the same partitions; then one cache for
all, with quotas that adapt. Rates are scaled so that the mesh is loaded about equally for each alpha.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.multiplexing.assumed import LABEL, NOTE, figures, lines
from bench.result import Report, Row
from kvpool.policy import multiplexing as mux
from kvpool.sim.multiplexing_memory import Sharing
from kvpool.sim.multiplexing_mesh import Scheduler
from kvpool.sim.multiplexing_study import Window, machines, serve, served_models
from kvpool.sim.multiplexing_workload import arrivals, power_law

TITLE = f"MuxServe Fig 9: management of compute, then of memory; {LABEL}"
PEERS: tuple[str, ...] = ()
_SHAPES = ("llama-2-7b", "llama-2-13b", "llama-2-13b", "llama-30b")
_ALPHAS = (0.7, 1.3, 2.1)
_TOTAL = 28.0  # requests a second
_SLO, _GOAL = 8.0, 1.1
_STEPS: dict[str, tuple[Scheduler, Sharing]] = {
    "neither": (mux.Temporal(), "partitioned"),
    "compute": (mux.ADBS(), "partitioned"),
    "compute and memory": (mux.ADBS(), "unified"),
}


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    window = Window(20.0, 8.0) if context.quick else Window(60.0, 20.0)
    gpus = machines(1, 4)
    cells = []
    for alpha in _ALPHAS[-1:] if context.quick else _ALPHAS:
        shape = power_law(len(_SHAPES), alpha, 1.0)
        models = served_models(_SHAPES, [_TOTAL * each / sum(shape) for each in shape])
        placement = mux.together(models, gpus)
        comes = arrivals({model.name: model.rate for model in models}, window.seconds, seed=1)
        cell: dict[str, Any] = {"alpha": alpha, "steps": {}}
        for name, (scheduler, sharing) in _STEPS.items():
            cell["steps"][name] = figures(serve(placement, models, comes, gpus, scheduler, sharing, window))
        cells.append(cell)
        neither, compute, both = (cell["steps"][name]["weighted"] for name in _STEPS)
        report.rows.append(
            Row(f"alpha {alpha}: compute management", compute / neither, "x", better="higher", details=cell)
        )
        report.rows.append(Row(f"alpha {alpha}: then memory management", both / compute, "x", better="higher"))
    for what, before, after in (
        ("compute management", "neither", "compute"),
        ("then memory management", "compute", "compute and memory"),
    ):
        best = max(cell["steps"][after]["weighted"] / cell["steps"][before]["weighted"] for cell in cells)
        report.rows.append(Row(f"best alpha: {what}", best, "x", _GOAL, "higher"))
    report.series = {"cells": cells}
    panels = [partial(_paint, cells=cells, of=of) for of in ("weighted", "attainment")]
    report.plots += plots.draw(context.out / "mux-resources.png", f"Four models on four GPUs; {LABEL}", *panels)
    return report


def _paint(axes: Any, cells: list[dict[str, Any]], of: str) -> None:
    points = {
        name: [
            (
                cell["alpha"],
                cell["steps"][name]["weighted"]
                if of == "weighted"
                else 100 * cell["steps"][name]["attainment"][f"{_SLO:g}"],
            )
            for cell in cells
        ]
        for name in _STEPS
    }
    y = "weighted throughput, requests/s" if of == "weighted" else f"in time at SLO scale {_SLO:g}, %"
    lines(axes, points, "alpha", y)
