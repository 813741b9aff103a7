"""What the simulated benches of MuxServe share: models, GPUs and designs, said on each, and how results are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import plots
from kvpool.sim.multiplexing_study import HARDWARE, Outcome

LABEL = "assumed hardware"
NOTE = (
    f"Simulated on {LABEL}, nothing measured: {HARDWARE} by its data sheet, with the efficiencies of "
    "kvpool.sim.hardware and launches as in the profile that MuxServe's authors publish. The schedulers, quotas and "
    "placement are those of kvpool.policy.multiplexing. Other assumptions stand in kvpool.sim.multiplexing_study."
)
_ALL = 0.99
SCALES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def figures(outcome: Outcome) -> dict[str, Any]:
    """The figures of one run, for the JSON."""
    return {
        "weighted": outcome.weighted,
        "requests_s": outcome.requests_s,
        "attainment": {f"{scale:g}": outcome.attainment(scale) for scale in SCALES if scale <= outcome.window.slo_max},
        "stopped": outcome.total("stopped"),
        "refused": outcome.total("refused"),
        "arrived": outcome.total("arrived"),
        "meshes": [[unit.gpus, [placed.model for placed in unit.models]] for unit in outcome.placement.units],
    }


def all_served(designs: Mapping[str, Mapping[str, Any]], scale: float) -> bool:
    """Whether MuxServe and the better baseline both end 99 % of the requests in time.

    Then both serve all that comes, and a ratio of what ended in a short window says who was quicker, and not who could
    serve more.

    Args:
        designs: By name, `figures` of each.
        scale: Of the SLO.
    """
    better = max(("spatial", "temporal"), key=lambda name: float(designs[name]["weighted"]))
    return all(designs[name]["attainment"][f"{scale:g}"] >= _ALL for name in ("muxserve", better))


def lines(axes: Any, points: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> None:
    """A line for each design."""
    for number, (design, line) in enumerate(points.items()):
        axes.plot(*zip(*line, strict=True), "o-", color=plots.shade(number, len(points)), label=design)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=7)


def reached(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """The highest rate up to which attainment is at least `wanted`, between two rates interpolated; 0 below the first.

    Args:
        points: (rate, attainment), rates rising.
        wanted: From 0 to 1.
    """
    best = 0.0
    for at, (rate, met) in enumerate(points):
        if met < wanted:
            if at:
                before, above = points[at - 1]
                best = before + (rate - before) * (above - wanted) / (above - met)
            break
        best = rate
    return best
