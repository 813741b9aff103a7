"""Figure 8 of the MemServe paper: what users notice against the load, with and without disaggregation and caching.

The instances, workloads and settings are those of examples/pd_disaggregated. Every instance is a process with the
demo's transformer; sessions arrive at random (Poisson), rates are those of one instance, and settings are compared at
equal numbers of instances. In one more run, of four instances, one that prefills and one that decodes are killed (-9):
that every request ends, that no block is lost, how soon each of the others goes on and those that were killed serve
again, stands beside the targets for it (checks.py, deaths.py). All tokens are compared with those of one process.

Some minutes on two quiet cores; `--quick` fewer, and with `KVPOOL_LONG=1` forty, which the number of loads, settings
and sessions decides (study.py). Needs PyTorch, and the folder examples beside this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import plots
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row, Skipped

if TYPE_CHECKING:
    from pd_disaggregated.study import Measured

TITLE = "MemServe Fig 8: prefill and decode apart, with and without caches, with the demo's transformer"
PEERS: tuple[str, ...] = ()
_EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
_QUICK = ("chat", "react")
_TIMES = (("ttft_s", "TTFT"), ("ttst_s", "time to second token"), ("tpot_s", "TPOT"), ("jct_s", "JCT"))
_SHOWN = (_TIMES[0], _TIMES[-1])
_BY_TURN = (
    ("hit_at_prefill", "found at prefill (% of prompt)", 100.0),
    ("bytes_to_decode", "prefill to decode (KiB a request)", 1 / 1024),
)


class Subject:
    """Starts the instances of one setting after another; see bench/remote.py."""

    def __init__(self) -> None:
        sys.path.insert(0, str(_EXAMPLES))
        self._study = importlib.import_module("pd_disaggregated.study")
        self._checks = importlib.import_module("pd_disaggregated.checks")
        llama, reference = importlib.import_module("llama"), importlib.import_module("pd_disaggregated.reference")
        # What one process generates is remembered: each question is asked of every setting.
        self._run = partial(
            importlib.import_module("pd_disaggregated.dispatcher").run,
            reference=reference.Reference(llama.LlamaConfig()),
        )
        self._measured: list[Measured] = []

    def plan(self, quick: bool) -> int:
        """How many runs there are."""
        names = _QUICK if quick else tuple(self._study.RATES)
        size = "quick" if quick else "long" if os.environ.get("KVPOOL_LONG") else "standard"
        self._cells = self._study.plan(names, size=size)
        return len(self._cells)

    def measure(self, number: int) -> dict[str, Any]:
        """One run; its figures."""
        measured: Measured = self._study.measure(self._cells[number], self._run)
        self._measured.append(measured)
        return measured.as_json()

    def checks(self) -> list[dict[str, Any]]:
        """What all runs together must show."""
        return [asdict(check) for check in self._checks.check(self._measured)]


def run(context: Context) -> Report:
    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not installed")
    report = Report()
    with Remote(__name__) as subject:
        runs = [subject.ask("measure", number=number) for number in range(subject.ask("plan", quick=context.quick))]
        report.rows += [Row(**check) for check in subject.ask("checks")]
    for one in runs:
        for key, label in _TIMES:
            times = one["summary"][key]
            what = f"{one['cell']['name']}: {label}, mean"
            details = {"p50": 1e3 * times["p50"]} if key != "ttft_s" else one["summary"]
            report.rows.append(Row(what, 1e3 * times["mean"], "ms", p99=1e3 * times["p99"], details=details))
    report.series = {"runs": runs}
    names = dict.fromkeys(one["cell"]["workload"] for one in runs)
    panels = [
        partial(_paint, runs=[one for one in runs if _is_of(one, name)], key=key, label=f"{name}: {label}, mean (ms)")
        for name in names
        for key, label in _SHOWN
    ]
    cached = {name: _with_caches([one for one in runs if _is_of(one, name)]) for name in names}
    panels += [
        partial(_paint_turns, runs=cached[name], key=key, label=f"{name}: {label}", scale=scale)
        for name in names
        for key, label, scale in _BY_TURN
    ]
    report.plots += plots.draw(
        context.out / "fig8.png", "Prefill and decode apart, two instances (MemServe, Fig 8)", *panels
    )
    report.notes += [
        "A rate is that of one instance: 1P1D counts as two. The model is small, its instances share this machine's "
        "cores, and turns and answers have a quarter of their recorded lengths.",
        *(f"{name}: {next(one['source'] for one in runs if _is_of(one, name))}." for name in names),
        *(_turns_in_words(one) for name in names for one in cached[name]),
    ]
    return report


def _is_of(one: dict[str, Any], workload: str) -> bool:
    return bool(one["cell"]["workload"] == workload)


def _with_caches(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of PD-Caching-1 to -3 on one instance each, at the load at which all of them ran."""
    chosen: dict[float, list[dict[str, Any]]] = {}
    for one in runs:
        setting = one["cell"]["setting"]
        if (
            setting["design"].startswith("PD-Caching")
            and (setting["prefill"], setting["decode"], setting["strategy"]) == (1, 1, "by_request_agg")
            and not one["cell"]["kill"]
        ):
            chosen.setdefault(one["cell"]["rate"], []).append(one)
    return max(chosen.values(), key=len, default=[])


def _turns_in_words(one: dict[str, Any]) -> str:
    turns = one["summary"]["turns"]
    figures = (
        ("found at prefill", "%", 100.0, "hit_at_prefill"),
        ("held at decode", "%", 100.0, "hit_at_decode"),
        ("to decode", "KiB", 1 / 1024, "bytes_to_decode"),
        ("back", "KiB", 1 / 1024, "bytes_to_prefill"),
    )
    said = (
        f"{label} {', '.join(f'{scale * turn[key]:,.0f}' for turn in turns)} {unit}"
        for label, unit, scale, key in figures
    )
    return f"{one['cell']['name']}, a request, turn by turn: {'; '.join(said)}."


def _paint_turns(axes: Any, runs: Sequence[dict[str, Any]], key: str, label: str, scale: float) -> None:
    """A line for each design; where they lie on each other their widths tell them apart."""
    for number, one in enumerate(runs):
        turns = one["summary"]["turns"]
        axes.plot(
            [turn["turn"] for turn in turns],
            [scale * turn[key] for turn in turns],
            marker="o",
            linewidth=1.0 + 1.2 * (len(runs) - 1 - number),
            color=plots.shade(number, len(runs)),
            label=one["cell"]["setting"]["design"],
        )
    axes.set_ylim(bottom=0)
    axes.set_xticks([turn["turn"] for turn in max((one["summary"]["turns"] for one in runs), key=len, default=[])])
    axes.set_xlabel("turn")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=7)


def _paint(axes: Any, runs: Sequence[dict[str, Any]], key: str, label: str) -> None:
    """A line for each setting of two instances."""
    of_two = [
        one for one in runs if one["cell"]["instances"] == 2 and one["cell"]["setting"]["strategy"] == "by_request_agg"
    ]
    designs = list(dict.fromkeys(one["cell"]["setting"]["design"] for one in of_two))
    for number, design in enumerate(designs):
        line = sorted(
            (one["cell"]["rate"], 1e3 * one["summary"][key]["mean"])
            for one in of_two
            if one["cell"]["setting"]["design"] == design
        )
        axes.plot(*zip(*line, strict=True), marker="o", color=plots.shade(number, len(designs)), label=design)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests/s an instance")
    axes.set_ylabel(label)
    axes.legend(frameon=False, fontsize=7)
