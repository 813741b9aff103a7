"""MuxServe's Figure 7: 16 models on 32 GPUs with traffic like ChatLMSYS's, over the mean rate.

The trace is synthetic: the paper's is not published. Its models are those that the authors' repository names; their
rates follow a power law with exponent 0.9, so that a fifth of the models gets half of the requests, and shift every 20
seconds by log-normal factors; lengths have LMSYS-Chat-1M's means. The placement knows mean rates only.

14 s are measured, so that ratios say who is quicker as much as who could serve more; rows say where all is served.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.multiplexing.assumed import LABEL, NOTE, all_served, figures, lines
from bench.result import Report, Row
from kvpool.sim.multiplexing_study import DESIGNS, MIXED, Window, machines, serve, served_models
from kvpool.sim.multiplexing_workload import LMSYS, power_law, shifting

TITLE = f"MuxServe Fig 7: a synthetic trace like ChatLMSYS; {LABEL}"
PEERS: tuple[str, ...] = ()
_MEANS = (4.8, 9.6)
_ALPHA, _POPULAR = 0.9, 0
_SLO, _GOAL = 4.0, 1.2


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE, "The trace is synthetic."])
    window = Window(16.0, 6.0, 4.0) if context.quick else Window(24.0, 10.0, 4.0)
    cells = [_cell(mean, window) for mean in (_MEANS[1:2] if context.quick else _MEANS)]
    for cell in cells:
        for name in ("spatial", "temporal"):
            what = f"{cell['mean_rate']:g} requests/s a model: throughput over {name}"
            if all_served(cell["designs"], _SLO):
                what += ", all is served"
            report.rows.append(Row(what, _over(cell, name), "x", better="higher", details=cell))
        gains = {name: _points(cell, "muxserve") - _points(cell, name) for name in ("spatial", "temporal")}
        what = f"{cell['mean_rate']:g} requests/s a model: attainment at SLO scale {_SLO:g}, over the better"
        report.rows.append(Row(what, min(gains.values()), "points", better="higher", details=gains))
    for name in ("spatial", "temporal"):
        best = max(_over(cell, name) for cell in cells)
        report.rows.append(Row(f"best rate: throughput over {name}", best, "x", _GOAL, "higher"))
    report.series = {"cells": cells}
    panels = [partial(_paint, cells=cells, of=of) for of in ("weighted", "attainment")]
    report.plots += plots.draw(context.out / "mux-shifts.png", f"16 models, a synthetic trace; {LABEL}", *panels)
    return report


def _cell(mean: float, window: Window) -> dict[str, Any]:
    gpus = machines()
    shape = power_law(len(MIXED), _ALPHA, 1.0)
    rates = [mean * len(shape) * each / sum(shape) for each in shape]
    models = served_models(MIXED, rates, LMSYS, shuffle=_POPULAR)
    comes = shifting({model.name: model.rate for model in models}, window.seconds, seed=1)
    placements: dict[Any, Any] = {}
    found: dict[str, Any] = {"mean_rate": mean, "designs": {}}
    for design in DESIGNS:
        if design.place not in placements:
            placements[design.place] = design.place(models, gpus)
        placement = placements[design.place]
        outcome = serve(placement, models, comes, gpus, design.scheduler, design.sharing, window)
        found["designs"][design.name] = figures(outcome)
    return found


def _over(cell: dict[str, Any], name: str) -> float:
    return float(cell["designs"]["muxserve"]["weighted"] / cell["designs"][name]["weighted"])


def _points(cell: dict[str, Any], name: str) -> float:
    return float(100 * cell["designs"][name]["attainment"][f"{_SLO:g}"])


def _paint(axes: Any, cells: list[dict[str, Any]], of: str) -> None:
    points = {
        design.name: [
            (
                cell["mean_rate"],
                cell["designs"][design.name]["weighted"] if of == "weighted" else _points(cell, design.name),
            )
            for cell in cells
        ]
        for design in DESIGNS
    }
    y = "weighted throughput, requests/s" if of == "weighted" else f"in time at SLO scale {_SLO:g}, %"
    lines(axes, points, "mean rate, requests/s a model", y)
