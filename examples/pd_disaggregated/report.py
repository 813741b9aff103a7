"""Presents the study: tables for the terminal, Markdown with pictures, JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvpool
from pd_disaggregated import plots
from pd_disaggregated.checks import Check
from pd_disaggregated.metrics import Spread, Summary
from pd_disaggregated.records import EventKind
from pd_disaggregated.study import ONE_EACH, Measured, most_compared
from pd_disaggregated.workloads import CONTEXT_TOKENS_MAX, SCALE

if TYPE_CHECKING:
    from rich.console import RenderableType

Rows = list[list[str]]

_FIGURES = ("TTFT ms", "P50", "P99", "2nd token ms", "P50", "P99", "TPOT ms", "P50", "P99", "JCT ms", "P50", "P99")
_CACHES = ("hit P", "hit D", "to D", "to P", "kvpool")
_HAPPENED: dict[EventKind, str] = {
    "killed": "killed",
    "lost": "has ended, and is started again",
    "joined": "joined",
    "served": "gives its first token",
    "noticed": "is told that {peer} is lost",
    "went_on": "gives a token",
}
_BY_TURN = ("turn", "requests", "prompt", "hit P", "decoded", "hit D", "to D", "to P")

_READING = f"""## How to read it

- Times are milliseconds, means unless a percentile is named. TTFT: from the question to the first token. 2nd token:
  from the question to the second one, the first that needs the transfer. TPOT: each token after the first. JCT: from
  the question to the last token.
- hit P, hit D: tokens that were found where the prompt was prefilled, and tokens that the decode instance held
  already, as shares of the prompts. to D, to P: KV that travelled, a request. kvpool: time in calls of kvpool, of the
  requests' time.
- Rates are those of one instance: 1P1D counts as two, and is offered what two colocated instances are offered.
- The model is small, its context {CONTEXT_TOKENS_MAX:,} tokens, and a token is a byte. So turns and answers have
  1/{SCALE} of the recorded lengths; documents and examples have their own. The KV of a token is 2 KiB.
- All instances share the cores named above. Compare the settings of one table, and take from the times which is
  better, not by how much it would be elsewhere. With more instances than cores they also wait for each other.
- decoded: tokens of a request that prefill found and had not computed itself: the decode instance had sent them.
  PD-Caching-2 has none, ever; with PD-Caching-3 they grow by an answer a turn. The hit ratio grows with PD-Caching-2
  too: an instance keeps all that it prefills, and it prefills an answer one turn after it was decoded.
"""


def setting_rows(runs: Sequence[Measured]) -> tuple[list[str], Rows]:
    """Header and one row for each run: what users notice."""
    header = ["setting", "req/s", *_FIGURES, *_CACHES]
    return header, [[run.cell.setting.name, f"{run.cell.rate:g}", *_cells(run.summary)] for run in runs]


def turn_rows(run: Measured) -> tuple[list[str], Rows]:
    """Header and one row for each turn."""
    return list(_BY_TURN), [
        [
            str(turn.turn),
            str(turn.requests),
            f"{turn.prompt_tokens:,.0f}",
            f"{turn.hit_at_prefill:.1%}",
            f"{turn.decoded_tokens:,.0f}",
            f"{turn.hit_at_decode:.1%}",
            _size(turn.bytes_to_decode),
            _size(turn.bytes_to_prefill),
        ]
        for turn in run.summary.turns
    ]


def check_rows(checks: Sequence[Check]) -> tuple[list[str], Rows]:
    """Header and one row for each promise."""
    words = {"higher": "at least", "lower": "at most"}
    verdicts = {True: "met", False: "missed", None: ""}
    return ["what it must show", "measured", "target", ""], [
        [
            check.what,
            _figure(check.value, check.unit),
            "" if check.target is None else f"{words[check.better]} {_figure(check.target, check.unit)}",
            verdicts[check.met],
        ]
        for check in checks
    ]


def event_rows(run: Measured) -> tuple[list[str], Rows]:
    """Header and one row for each thing that happened to an instance in the course of the run."""
    return ["at", "instance", ""], [
        [f"{event.at_s:.2f} s", event.instance, _HAPPENED[event.kind].format(peer=event.peer)]
        for event in run.events
        if event.at_s > 0
    ]


def table(header: Sequence[str], rows: Rows, title: str = "") -> RenderableType:
    """For the terminal."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", header_style="bold", pad_edge=False)
    for number, name in enumerate(header):
        # Of the first column the text may wrap, but it is never what gives way to all others.
        shown.add_column(name, justify="left" if number == 0 else "right", no_wrap=number > 0, min_width=len(name))
    styles = {"met": "[green]met[/green]", "missed": "[bold red]missed[/bold red]"}
    for row in rows:
        shown.add_row(*(styles.get(cell, cell) for cell in row))
    return shown


def write(folder: Path, runs: Sequence[Measured], checks: Sequence[Check], seconds: float) -> Path:
    """Writes report.md, report.json and the pictures into `folder`; returns the path of report.md.

    Args:
        folder: Made where it is missing. What is there from an earlier report is written over.
        runs: In the order in which they were made.
        checks: Of these runs.
        seconds: That all of it took.
    """
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    pictures = plots.draw(runs, folder)
    content = {
        "machine": machine,
        "seconds": seconds,
        "checks": [{**vars(check), "met": check.met} for check in checks],
        "runs": [run.as_json() for run in runs],
        "pictures": pictures,
    }
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path = folder / "report.md"
    path.write_text(_markdown(runs, checks, machine, pictures, seconds), encoding="utf-8")
    return path


def describe_machine() -> dict[str, str]:
    """Processor, cores and versions; nothing that names the machine or its user."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvpool": kvpool.__version__,
        **{name: _version(name) for name in ("torch", "numpy")},
    }


def _markdown(
    runs: Sequence[Measured], checks: Sequence[Check], machine: dict[str, str], pictures: Sequence[str], seconds: float
) -> str:
    parts = [
        "# Caching for disaggregated inference\n",
        "The designs of MemServe §5.1 and its Fig 8, with the transformer of the demo; each instance is a process.\n",
        ", ".join(f"{name} {value}" for name, value in machine.items()) + f". {len(runs)} runs, {seconds:,.0f} s.\n",
        "## What it must show\n",
        _markdown_table(*check_rows(checks)),
    ]
    undisturbed = [run for run in runs if not run.cell.kill]
    for name in dict.fromkeys(run.cell.workload for run in undisturbed):
        of = [run for run in undisturbed if run.cell.workload == name]
        asked = f"{of[0].summary.requests} requests of {of[0].cell.sessions} sessions"
        parts.append(f"## {name}\n\n{asked}: {of[0].source}.\n")
        for count in sorted({run.cell.instances for run in of}):
            parts.append(f"{count} instances:\n")
            parts.append(_markdown_table(*setting_rows([run for run in of if run.cell.instances == count])))
    parts += [f"![{picture.removesuffix('.png')}]({picture})\n" for picture in pictures]
    parts += _markdown_turns(undisturbed)
    parts += _markdown_deaths(runs)
    return "\n".join([*parts, _READING])


def _markdown_turns(runs: Sequence[Measured]) -> list[str]:
    chosen = most_compared([run for run in runs if run.cell.setting in ONE_EACH])
    parts = ["## Turn by turn\n"] if chosen else []
    for run in chosen:
        parts += [f"{run.cell.name}:\n", _markdown_table(*turn_rows(run))]
    return parts


def _markdown_deaths(runs: Sequence[Measured]) -> list[str]:
    parts = []
    for run in runs:
        if run.cell.kill:
            parts += [
                "## Instances killed in the middle of a run\n",
                f"{run.cell.name}. {run.summary.requests} requests answered, {run.summary.retried} "
                f"of them tried again; {run.lost_blocks} blocks lost.\n",
                _markdown_table(*event_rows(run)),
            ]
    return parts


def _markdown_table(header: Sequence[str], rows: Rows) -> str:
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _cells(summary: Summary) -> list[str]:
    return [
        *_times(summary.ttft_s, "mean", "p50", "p99"),
        *_times(summary.ttst_s, "mean", "p50", "p99"),
        *_times(summary.tpot_s, "mean", "p50", "p99"),
        *_times(summary.jct_s, "mean", "p50", "p99"),
        f"{summary.hit_at_prefill:.1%}",
        f"{summary.hit_at_decode:.1%}",
        _size(summary.bytes_to_decode / summary.requests),
        _size(summary.bytes_to_prefill / summary.requests),
        f"{summary.kvpool_share:.2%}",
    ]


def _times(spread: Spread | None, *names: str) -> list[str]:
    return ["-" if spread is None else _milliseconds(getattr(spread, name)) for name in names]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _size(count: float) -> str:
    if count < 1:
        return "-"
    return f"{count / (1 << 20):.2f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):.0f} KiB"


def _figure(value: float, unit: str) -> str:
    number = f"{value:,.0f}" if not unit else f"{value:.2f}"
    return f"{number} {unit}".rstrip()


def _version(package: str) -> Any:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
