"""Figure 8 of the MemServe paper: what users notice against the load, with and without disaggregation and caching.

The instances, workloads and settings are those of examples/pd_disaggregated. Every instance is a process with the
demo's transformer; sessions arrive at random (Poisson), rates are those of one instance, and settings are compared at
equal numbers of instances. In one more run, of four instances, one that prefills and one that decodes are killed: how
soon the others go on, and those that were killed are back, stands beside the targets for it. All tokens are compared
with those of one process.

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
_SHOWN = (("ttft_s", "TTFT"), ("jct_s", "JCT"))


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
        cell, summary = one["cell"], one["summary"]
        what = f"{cell['name']}: TTFT"
        times = summary["ttft_s"]
        report.rows.append(Row(what, 1e3 * times["mean"], "ms", p99=1e3 * times["p99"], details=summary))
    report.series = {"runs": runs}
    names = dict.fromkeys(one["cell"]["workload"] for one in runs)
    panels = [
        partial(_paint, runs=[one for one in runs if _is_of(one, name)], key=key, label=f"{name}: {label}, mean (ms)")
        for name in names
        for key, label in _SHOWN
    ]
    report.plots += plots.draw(
        context.out / "fig8.png", "Prefill and decode apart, two instances (MemServe, Fig 8)", *panels
    )
    report.notes += [
        "A rate is that of one instance: 1P1D counts as two. The model is small, its instances share this machine's "
        "cores, and turns and answers have a quarter of their recorded lengths.",
        *(f"{name}: {next(one['source'] for one in runs if _is_of(one, name))}." for name in names),
    ]
    return report


def _is_of(one: dict[str, Any], workload: str) -> bool:
    return bool(one["cell"]["workload"] == workload)


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
