"""MuxServe's Figure 6: which part of all requests the most popular models get, over the exponent of the power law."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.multiplexing.assumed import LABEL, NOTE, lines
from bench.result import Report, Row
from kvpool.sim.multiplexing_study import TABLE_1
from kvpool.sim.multiplexing_workload import cumulative, power_law

TITLE = f"MuxServe Fig 6: cumulative rates over alpha; {LABEL}"
PEERS: tuple[str, ...] = ()
_ALPHAS = (0.7, 0.9, 1.3, 1.7, 2.1)
_PAPER = {0.9: 50.0, 2.1: 90.0}
_PART, _POINTS = 0.2, 3.0


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    curves = {}
    for alpha in _ALPHAS:
        rates = power_law(len(TABLE_1), alpha, 20.0)
        parts = [at / len(rates) for at in range(len(rates) + 1)]
        curves[f"alpha {alpha}"] = [(100 * part, 100 * cumulative(rates, part)) for part in parts]
        found = 100 * cumulative(rates, _PART)
        report.rows.append(Row(f"alpha {alpha}: requests of the most popular 20 % of 19 models", found, "%"))
        if alpha in _PAPER:
            paper = _PAPER[alpha]
            what = f"alpha {alpha}: away from the paper's {paper:g} %"
            report.rows.append(Row(what, abs(found - paper), "points", _POINTS))
    report.series = {"curves": curves}
    paint = partial(_paint, curves=curves)
    report.plots += plots.draw(context.out / "mux-popularity.png", f"Popularity of 19 models; {LABEL}", paint)
    return report


def _paint(axes: Any, curves: dict[str, list[tuple[float, float]]]) -> None:
    lines(axes, curves, "most popular models, %", "of all requests, %")
