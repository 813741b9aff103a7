"""MuxServe's Figure 10: ADBS, round robin and FCFS on four GPUs, and how they share the cache.

Two settings of the paper, at its rates and half as much again, where memory is short for all. Goals are for baselines
that leave room for the next block of each request that decodes, as all schedulers of kvpool do: it is a matter of
memory and not of the order. As a note they come without it, too: then their prompts take all memory there is. FCFS
serves the model of the oldest request; by steps, models take turns, which is how temporal multiplexing is meant in the
other figures.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.multiplexing.assumed import LABEL, NOTE, figures
from bench.result import Report, Row
from kvpool.policy import multiplexing as mux
from kvpool.sim.multiplexing_mesh import Scheduler
from kvpool.sim.multiplexing_study import Outcome, Window, machines, serve, served_models
from kvpool.sim.multiplexing_workload import SHAREGPT, arrivals

TITLE = f"MuxServe Fig 10: ADBS against round robin and FCFS; {LABEL}"
PEERS: tuple[str, ...] = ()
_SETTINGS = {
    "30B, 13B, 7B at 2:8:8": (("llama-30b", "llama-2-13b", "llama-2-7b"), (2.0, 8.0, 8.0), (2.0, 1.0, 1.0)),
    "65B, 30B at 1:8": (("llama-65b", "llama-30b"), (1.0, 8.0), (4.0, 1.0)),
}
_LOADS = (1.0, 1.5)
_SCHEDULERS: dict[str, tuple[Scheduler, bool]] = {
    "ADBS": (mux.ADBS(), True),
    "round robin, room for growth": (mux.RoundRobin(), True),
    "FCFS, room for growth": (mux.FCFS(), True),
    "FCFS by steps, room for growth": (mux.Temporal(), True),
    "round robin": (mux.RoundRobin(), False),
    "FCFS": (mux.FCFS(), False),
}
_GOALS = {"round robin, room for growth": 1.2, "FCFS, room for growth": 1.4}


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE])
    window = Window(20.0, 8.0, 0.0) if context.quick else Window(120.0, 40.0, 0.0)
    found = [_cell(name, load, window) for name in _SETTINGS for load in (_LOADS[:1] if context.quick else _LOADS)]
    for cell in found:
        own = cell["schedulers"]["ADBS"]
        for name in list(_SCHEDULERS)[1:]:
            other = cell["schedulers"][name]
            what = f"{cell['setting']}, {cell['load']:g} times the rates: ADBS over {name}"
            ratio = own["weighted"] / max(other["weighted"], 1e-9)
            goal = _GOALS.get(name)
            report.rows.append(Row(what, ratio, "x", goal, "higher", details=cell))
        others = min(cell["schedulers"][name]["unfair"] for name in _GOALS)
        what = f"{cell['setting']}, {cell['load']:g} times the rates: eq. 2 over all models, of the fairer of the two"
        report.rows.append(Row(what, own["unfair"] / max(others, 1e-9), "x", 1.0))
    report.series = {"cells": found}
    panels = [partial(_paint, cell=cell) for cell in found]
    report.plots += plots.draw(context.out / "mux-schedulers.png", f"Cache usage; {LABEL}", *panels)
    return report


def _cell(setting: str, load: float, window: Window) -> dict[str, Any]:
    shapes, rates, longer = _SETTINGS[setting]
    gpus = machines(1, 4)
    lengths = [SHAREGPT.times(each) for each in longer]
    models = served_models(shapes, [load * rate for rate in rates], lengths)
    placement = mux.together(models, gpus)
    by_name = {model.name: of for model, of in zip(models, lengths, strict=True)}
    comes = arrivals({model.name: model.rate for model in models}, window.seconds, by_name, seed=1)
    cell: dict[str, Any] = {"setting": setting, "load": load, "schedulers": {}}
    for name, (scheduler, growth) in _SCHEDULERS.items():
        outcome = serve(placement, models, comes, gpus, scheduler, window=window, growth=growth)
        cell["schedulers"][name] = figures(outcome) | _sharing(models, outcome)
    return cell


def _sharing(models: list[mux.ServedModel], outcome: Outcome) -> dict[str, Any]:
    """Each model's part of the cache on average, and how far that is from its part of what is asked for.

    Over all models, as the paper compares them. Our quotas' fairness is over those whose requests wait for memory.
    """
    used = outcome.counts[0].used
    demands = {
        model.name: model.rate * (model.prompt_tokens + model.output_tokens) * model.kv_bytes_per_token
        for model in models
    }
    uses = {name: mux.Use(round(units)) for name, units in used.items()}
    spread = mux.fairness(uses, demands, set(demands)).spread
    together, wanted = sum(used.values()), sum(demands.values())
    return {
        "unfair": spread,
        "parts": {name: units / together for name, units in used.items()},
        "wanted": {name: demand / wanted for name, demand in demands.items()},
    }


def _paint(axes: Any, cell: dict[str, Any]) -> None:
    runs = cell["schedulers"]
    parts = {"asked for": next(iter(runs.values()))["wanted"]} | {name: each["parts"] for name, each in runs.items()}
    base = [0.0] * len(parts)
    names = list(parts["asked for"])
    for number, model in enumerate(names):
        heights = [each[model] for each in parts.values()]
        axes.bar(
            range(len(parts)), heights, 0.6, base, label=model.split("/")[0], color=plots.shade(number, len(names))
        )
        base = [below + height for below, height in zip(base, heights, strict=True)]
    labels = [
        name
        if name == "asked for"
        else f"{name}\n{runs[name]['weighted']:.1f} req/s".replace(", ", ",\n").replace("room for ", "room for\n")
        for name in parts
    ]
    axes.set_xticks(range(len(parts)), labels, fontsize=6)
    axes.set_ylabel(f"part of the cache ({cell['setting']}, x{cell['load']:g})", fontsize=7)
    axes.legend(frameon=False, fontsize=7, ncol=len(names), loc="lower right", bbox_to_anchor=(1, 1))
