"""Pictures of the study: what users notice against the load, as in Fig 8 of the paper, and the caches by turn."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pd_disaggregated.metrics import ByTurn, Summary
from pd_disaggregated.records import Setting
from pd_disaggregated.study import ONE_EACH, Measured, most_compared

# A colour for each design, so that it is the same in all pictures: grey is without a cache.
_COLOURS = {
    "PD": "#9a9a9a",
    "PD-CC": "#1f77b4",
    "PD-Basic": "#4d4d4d",
    "PD-Caching-1": "#f2b134",
    "PD-Caching-2": "#e4572e",
    "PD-Caching-3": "#2a9d5c",
}
_NOTICED: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("TTFT, mean (ms)", lambda summary: 1000 * summary.ttft_s.mean),
    ("TTFT, P99 (ms)", lambda summary: 1000 * summary.ttft_s.p99),
    ("JCT, mean (ms)", lambda summary: 1000 * summary.jct_s.mean),
    ("JCT, P99 (ms)", lambda summary: 1000 * summary.jct_s.p99),
)
_TURNS: tuple[tuple[str, Callable[[ByTurn], float]], ...] = (
    ("found at prefill (% of prompt)", lambda turn: 100 * turn.hit_at_prefill),
    ("held at decode (% of prompt)", lambda turn: 100 * turn.hit_at_decode),
    ("prefill to decode (KiB a request)", lambda turn: turn.bytes_to_decode / 1024),
    ("decode to prefill (KiB a request)", lambda turn: turn.bytes_to_prefill / 1024),
)


def draw(runs: Sequence[Measured], folder: Path) -> list[str]:
    """Writes all pictures into `folder`; returns the names of those written: none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces on the screen that it looks for fonts
    undisturbed = [run for run in runs if not run.cell.kill]
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for count in sorted({run.cell.instances for run in undisturbed}):
        compared = [run for run in undisturbed if run.cell.instances == count]
        names.append(
            _write(folder / f"load-{count}-instances.png", compared, _NOTICED, _against_load, f"{count} instances")
        )
    by_turn = [run for run in undisturbed if run.cell.setting in ONE_EACH]
    if by_turn:
        names.append(_write(folder / "turns.png", most_compared(by_turn), _TURNS, _against_turns, "1P1D, turn by turn"))
    return names


def _write(path: Path, runs: Sequence[Measured], columns: Sequence[Any], paint: Callable[..., None], title: str) -> str:
    """A row of panels for each workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(run.cell.workload for run in runs))
    figure = Figure(figsize=(3.4 * len(columns), 0.6 + 2.8 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), len(columns), squeeze=False)
    for name, row in zip(names, panels, strict=True):
        of = [run for run in runs if run.cell.workload == name]
        for axes, (label, figure_of) in zip(row, columns, strict=True):
            paint(axes, of, figure_of)
            axes.set_title(f"{name}: {label}", loc="left", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path.name


def _against_load(axes: Any, runs: Sequence[Measured], figure_of: Callable[[Summary], float]) -> None:
    """A line for each setting, where it ran at several loads; a bar for each, where all ran at one."""
    settings = list(dict.fromkeys(run.cell.setting for run in runs))
    if len({run.cell.rate for run in runs}) == 1:
        for number, run in enumerate(runs):
            look = _look(run.cell.setting)
            bar = axes.bar(number, figure_of(run.summary), color=look["color"], label=look["label"])
            bar[0].set_hatch({"^": "//", "x": "xx"}.get(look["marker"], ""))  # bars of one design differ by this
        axes.set_xticks([])
        axes.set_xlabel(f"{runs[0].cell.rate:g} requests/s an instance", fontsize=8)
        return
    for setting in settings:
        of = sorted((run for run in runs if run.cell.setting == setting), key=lambda run: run.cell.rate)
        axes.plot([run.cell.rate for run in of], [figure_of(run.summary) for run in of], **_look(setting))
    axes.set_xlabel("requests/s an instance", fontsize=8)


def _against_turns(axes: Any, runs: Sequence[Measured], figure_of: Callable[[ByTurn], float]) -> None:
    for number, run in enumerate(runs):
        turns = run.summary.turns
        # Lines that lie on each other are told apart by their widths.
        width = 1.0 + 1.2 * (len(runs) - 1 - number)
        axes.plot(
            [turn.turn for turn in turns],
            [figure_of(turn) for turn in turns],
            color=_COLOURS[run.cell.setting.design],
            linewidth=width,
            marker="o",
            markersize=2 + width,
            label=run.cell.setting.design,
        )
    axes.set_xticks([turn.turn for turn in max((run.summary.turns for run in runs), key=len)])
    axes.set_xlabel("turn", fontsize=8)


def _look(setting: Setting) -> dict[str, Any]:
    """Colocated settings are dashed squares; with more prefill than decode instances a triangle, by layer a cross."""
    split = "x" if setting.strategy == "by_layer" else "^" if setting.prefill > setting.decode else "o"
    marker = "s" if setting.colocated else split
    return {
        "color": _COLOURS[setting.design],
        "marker": marker,
        "markersize": 5,
        "linestyle": "--" if setting.colocated else "-",
        "label": setting.name,
    }
