"""MuxServe's Figure 5: throughput and SLO attainment of 19 models on 32 GPUs, over popularity and load.

Table 1's models, rates by a power law, ShareGPT's mean lengths. In each cell MuxServe is compared with the better of
spatial partitioning, in which models share no GPUs, and temporal multiplexing, which has MuxServe's placement
and cache, and in which models take turns step by step. Which sizes are popular is drawn once.

14 s are measured, and an answer takes some of them: what a design serves there depends on how quick it is as much as on
how much it could serve, for wins and for losses. Where both serve all in time, the row says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.multiplexing.assumed import LABEL, NOTE, all_served, figures, lines, reached
from bench.result import Report, Row
from kvpool.sim.multiplexing_study import DESIGNS, EAGER, GRAPHS, TABLE_1, Window, machines, serve, served_models
from kvpool.sim.multiplexing_times import Launches
from kvpool.sim.multiplexing_workload import arrivals, power_law

TITLE = f"MuxServe Fig 5: throughput and SLO attainment over popularity and load; {LABEL}"
PEERS: tuple[str, ...] = ()
_ALPHAS = (0.7, 2.1)
_TOPS = (20.0, 40.0, 80.0)  # requests a second of the most popular model
_SLO, _TIGHT = 4.0, 2.0
_GOAL_BEST, _GOAL_ALL, _GOAL_SLO = 1.5, 0.98, 2.0
_POPULAR = 0  # the seed that draws which sizes are popular


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    alphas, tops = ((2.1,), (20.0,)) if context.quick else (_ALPHAS, _TOPS)
    window = Window(16.0, 6.0, 4.0) if context.quick else Window(24.0, 10.0, 4.0)
    cells = [_cell(alpha, top, window) for alpha in alphas for top in tops]
    graphs = [] if context.quick else [_cell(2.1, 40.0, window, GRAPHS)]
    for cell in cells:
        report.rows.append(_row(cell, None))
    over = [_over(cell) for cell in cells]
    report.rows.append(Row("best cell, over the better baseline", max(over), "x", _GOAL_BEST, "higher"))
    report.rows.append(Row("worst cell, over the better baseline", min(over), "x", _GOAL_ALL, "higher"))
    if not context.quick:
        report.rows += [_requests_in_time(alpha, cells) for alpha in alphas]
        for cell in cells:
            gain = cell["designs"]["muxserve"]["attainment"][f"{_TIGHT:g}"]
            others = max(cell["designs"][name]["attainment"][f"{_TIGHT:g}"] for name in ("spatial", "temporal"))
            what = f"alpha {cell['alpha']}, top {cell['top']:g}/s: attainment at SLO scale {_TIGHT:g}, over the better"
            report.rows.append(Row(what, 100 * (gain - others), "points", better="higher"))
        report.rows += [_row(cell, "steps launched as graphs") for cell in graphs]
    report.series = {"cells": cells, "graphs": graphs}
    panels = []
    for alpha in alphas:
        of = [cell for cell in cells if cell["alpha"] == alpha]
        panels.append(partial(_throughput, cells=of, alpha=alpha))
        panels.append(partial(_attainment, cells=of, alpha=alpha))
    report.plots += plots.draw(context.out / "mux-loads.png", f"19 models on 32 GPUs; {LABEL}", *panels)
    return report


def _cell(alpha: float, top: float, window: Window, launches: Launches = EAGER) -> dict[str, Any]:
    gpus = machines()
    models = served_models(TABLE_1, power_law(len(TABLE_1), alpha, top), launches=launches, shuffle=_POPULAR)
    rates = {model.name: model.rate for model in models}
    comes = arrivals(rates, window.seconds, seed=1)
    placements: dict[Any, Any] = {}
    found: dict[str, Any] = {"alpha": alpha, "top": top, "mean_rate": sum(rates.values()) / len(rates), "designs": {}}
    for design in DESIGNS:
        if design.place not in placements:
            placements[design.place] = design.place(models, gpus)
        placement = placements[design.place]
        outcome = serve(placement, models, comes, gpus, design.scheduler, design.sharing, window)
        found["designs"][design.name] = figures(outcome) | {"estimated": placement.throughput}
    return found


def _over(cell: dict[str, Any]) -> float:
    designs = cell["designs"]
    return float(designs["muxserve"]["weighted"] / max(designs[name]["weighted"] for name in ("spatial", "temporal")))


def _row(cell: dict[str, Any], kind: str | None) -> Row:
    designs = cell["designs"]
    over = {name: designs["muxserve"]["weighted"] / designs[name]["weighted"] for name in ("spatial", "temporal")}
    what = f"alpha {cell['alpha']}, top {cell['top']:g}/s: throughput over the better baseline"
    if all_served(designs, _SLO):
        what += ", all is served"
    return Row(
        f"{what}, {kind}" if kind else what,
        _over(cell),
        "x",
        None if kind else _GOAL_ALL,
        "higher",
        details={"over": over, **cell},
    )


def _curve(cells: list[dict[str, Any]], design: str) -> list[tuple[float, float]]:
    return [(cell["mean_rate"], cell["designs"][design]["attainment"][f"{_SLO:g}"]) for cell in cells]


def _requests_in_time(alpha: float, cells: list[dict[str, Any]]) -> Row:
    """How many times the requests of the better baseline are served with 99 % in time."""
    of = [cell for cell in cells if cell["alpha"] == alpha]
    rates = {name: reached(_curve(of, name), 0.99) for name in of[0]["designs"]}
    best = max(rates["spatial"], rates["temporal"])
    what = f"alpha {alpha}: requests with 99 % within SLO scale {_SLO:g}, over the better baseline"
    if not best:
        return Row(f"{what}; no baseline reaches 99 % at the lowest rate", rates["muxserve"], "requests/s a model")
    return Row(what, rates["muxserve"] / best, "x", _GOAL_SLO, "higher", details={"rates": rates})


def _throughput(axes: Any, cells: list[dict[str, Any]], alpha: float) -> None:
    points = {
        design.name: [(cell["mean_rate"], cell["designs"][design.name]["weighted"]) for cell in cells]
        for design in DESIGNS
    }
    lines(axes, points, f"mean rate, requests/s (alpha {alpha})", "weighted throughput, requests/s")


def _attainment(axes: Any, cells: list[dict[str, Any]], alpha: float) -> None:
    cell = cells[len(cells) // 2]
    points = {
        design.name: [(float(scale), 100 * met) for scale, met in cell["designs"][design.name]["attainment"].items()]
        for design in DESIGNS
    }
    lines(axes, points, f"SLO scale (alpha {alpha}, {cell['mean_rate']:.1f} requests/s a model)", "in time, %")
