"""Prefill and decode in separate processes, with and without caches.

    python -m examples.pd_disaggregated run --workload chat --design PD-Caching-3
    python -m examples.pd_disaggregated all --quick

`run` serves one workload with one setting. `all` serves every workload with every setting and leaves a report: tables
and pictures after Fig 8 of the MemServe paper. Exits with 1 when a token was wrong, a block was lost, or, for `all`,
when anything that it must show was missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where llama.py is, and this package

if TYPE_CHECKING:
    from rich.console import Console

    from pd_disaggregated.study import Cell, Measured

_OUT = Path("build/pd_disaggregated")
_RATE = 0.5
_EPILOG = """\
designs:
  PD            one instance prefills and decodes, and keeps nothing
  PD-CC         ... and keeps prompts and answers
  PD-Basic      prefill sends every prompt to decode, whole
  PD-Caching-1  ... and prefill keeps prompts
  PD-Caching-2  ... and decode keeps prompts and answers, and is sent only what it does not have
  PD-Caching-3  ... and decode sends answers back to prefill

workloads:
  chat          conversations of five turns, with the lengths of azure2023_conv
  documents     five questions on each document of 1,000 tokens
  react         agents that share a long prompt with examples

begin with:
  python -m examples.pd_disaggregated run                      PD-Caching-3, conversations
  python -m examples.pd_disaggregated run --design PD-Basic    the same without caches
  python -m examples.pd_disaggregated all --quick              all of it, and a report
  python -m examples.pd_disaggregated run --help               what else can be chosen

What the designs do is in examples/pd_disaggregated/designs.py; its README.md says where to begin.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    missing = [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        hint = "`make demo` installs all it needs; by hand: pip install '.[demo]' torch"
        print(f"This example needs {' and '.join(missing)}. {hint}", file=sys.stderr)
        return 2
    from rich.console import Console

    options = _options(arguments)
    console = Console(highlight=False)
    return _run(console, options) if options.command == "run" else _all(console, options)


def _run(console: Console, options: argparse.Namespace) -> int:
    """One setting, with all its figures."""
    from pd_disaggregated import report
    from pd_disaggregated.study import Cell

    cell = Cell(
        options.workload, options.rate, options.setting, options.sessions, options.seed, tuple(options.kill or ())
    )
    asked = f"{cell.made().requests} requests of {cell.sessions} sessions"
    console.print(f"\n[bold]{cell.name}[/bold]: {asked}\n", soft_wrap=True)
    (run,) = _measure(console, [cell])
    console.print(f"[dim]{run.source}[/dim]\n")
    header, rows = report.setting_rows([run])
    for part in (slice(2, 8), slice(8, 14), slice(14, None)):  # each fits a terminal of 80 columns
        console.print(report.table(header[part], [row[part] for row in rows]))
    console.print(report.table(*report.turn_rows(run)))
    if run.cell.kill:
        console.print(report.table(*report.event_rows(run)))
    console.print(_kept(run))
    return 1 if run.lost_blocks or not run.verified else 0


def _all(console: Console, options: argparse.Namespace) -> int:
    """The study."""
    from pd_disaggregated import report, study
    from pd_disaggregated.checks import check

    started = time.monotonic()
    cells = study.plan(options.workloads, size=options.size, seed=options.seed)
    console.print(f"\n[bold]{len(cells)} runs[/bold] of {', '.join(options.workloads)}\n")
    runs = _measure(console, cells)
    checks = check(runs)
    console.print(report.table(*report.check_rows(checks)))
    path = report.write(options.out, runs, checks, time.monotonic() - started)
    console.print(f"{time.monotonic() - started:.0f} s. The report: [bold]{path}[/bold]", soft_wrap=True)
    return 1 if any(each.met is False for each in checks) else 0


def _measure(console: Console, cells: Sequence[Cell]) -> list[Measured]:
    """Runs cells one after another, and shows meanwhile how many requests are answered."""
    from llama import LlamaConfig

    from pd_disaggregated import study
    from pd_disaggregated.dispatcher import run
    from pd_disaggregated.progress import shown
    from pd_disaggregated.reference import Reference

    runs = []
    requests = sum(cell.made().requests for cell in cells)
    with closing(Reference(LlamaConfig())) as reference, shown(console, requests) as (name, answered):
        for number, cell in enumerate(cells, 1):
            name(f"{number}/{len(cells)} {cell.name}")
            measured = study.measure(cell, partial(run, reference=reference), answered)
            runs.append(measured)
            if len(cells) > 1:
                ttft, jct = measured.summary.ttft_s, measured.summary.jct_s
                console.print(
                    f"  {cell.name}: TTFT {1000 * ttft.mean:,.0f} ms, JCT {1000 * jct.mean:,.0f} ms, "
                    f"hit {measured.summary.hit_at_prefill:.0%}",
                    style="dim",
                    soft_wrap=True,
                )
    return runs


def _kept(run: Measured) -> str:
    tokens = sum(map(len, run.tokens.values()))
    same = f"all {tokens:,} tokens are those of one process" if run.verified else "tokens were not compared"
    colour = "green" if run.verified and not run.lost_blocks else "bold red"
    return f"[{colour}]{same}; {run.lost_blocks} blocks lost.[/{colour}]"


# ---- what was asked for


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    from pd_disaggregated.records import DESIGNS, STRATEGIES
    from pd_disaggregated.workloads import WORKLOADS

    parser = argparse.ArgumentParser(
        prog="python -m examples.pd_disaggregated",
        description="Serve multi-turn sessions with prefill and decode in separate processes, in the four\n"
        "designs of the MemServe paper, or colocated. Every token is compared with those of one process.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="one workload, one setting", description="Serve one workload.")
    one.add_argument("--workload", choices=WORKLOADS, default="chat", help="what is asked (default chat)")
    one.add_argument("--design", choices=DESIGNS, default="PD-Caching-3", help="(default PD-Caching-3)")
    one.add_argument(
        "--prefill",
        type=_positive,
        default=1,
        metavar="N",
        help="instances that prefill (default 1); of a colocated design (PD, PD-CC) all instances",
    )
    one.add_argument("--decode", type=_positive, metavar="N", help="instances that decode (default 1)")
    one.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=STRATEGIES[0],
        help="when the KV of a prompt is sent: "
        "once all of it is computed, or layer by layer meanwhile (default by_request_agg)",
    )
    one.add_argument(
        "--rate", type=_rate, default=_RATE, metavar="R", help=f"requests a second and instance (default {_RATE})"
    )
    one.add_argument("--sessions", type=_positive, default=6, metavar="N", help="how many (default 6)")
    one.add_argument(
        "--kill",
        type=_kill,
        action="append",
        metavar="NAME@SHARE",
        help="kill -9 an instance when this share of all tokens has come, as in prefill-0@0.5; it is started again",
    )
    every = commands.add_parser("all", help="every workload, every setting, and a report", description="The study.")
    every.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="(default all)")
    size = every.add_mutually_exclusive_group()
    size.add_argument(
        "--quick",
        action="store_const",
        const="quick",
        dest="size",
        help="one load, two instances, few sessions: some minutes instead of about ten",
    )
    size.add_argument(
        "--long",
        action="store_const",
        const="long",
        dest="size",
        help="three loads and three instances for every workload, more sessions: forty minutes",
    )
    every.set_defaults(size="standard")
    every.add_argument("--out", type=Path, default=_OUT, metavar="FOLDER", help=f"of the report (default {_OUT})")
    for command in (one, every):
        command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the workloads (default 0)")
    options = parser.parse_args(arguments)
    if options.command == "run":
        options.setting = _setting(one, options)
    return options


def _setting(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Any:
    """The setting that was asked for; a mistake ends the program with a usage message."""
    from pd_disaggregated.records import COLOCATED, Setting

    decode = options.decode if options.decode is not None else 0 if options.design in COLOCATED else 1
    try:
        setting = Setting(options.design, options.prefill, decode, options.strategy)
    except ValueError as error:
        parser.error(str(error))
    unknown = [name for name, _ in options.kill or () if name not in setting.instances]
    if unknown:
        parser.error(f"--kill {unknown[0]}: the instances are {', '.join(setting.instances)}")
    return setting


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0")
    return int(text)


def _rate(text: str) -> float:
    rate = _number(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return rate


def _kill(text: str) -> tuple[str, float]:
    name, at, share = text.partition("@")
    if not name or not at or not 0 <= _number(share) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not NAME@SHARE with a share of 0 to 1")
    return name, float(share)


def _number(text: str) -> float:
    """Parses a number; NaN, which is in no range, for anything else."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
