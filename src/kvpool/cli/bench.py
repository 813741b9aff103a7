"""`kvpool bench`: what this machine does: allocation, matching, insertion, swap, and transfer to another process."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvpool.cli.quick_bench import Row, measure

__all__ = ["add_parser"]

_TEXT = """\
Measures this installation on this machine, in some seconds: medians of calls from Python, one thread. Copies are
compared with memcpy, measured in turns with them. To compare with other libraries and with the papers: `make bench` in
a checkout."""


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine: blocks, prompts, copies, transfer",
        description=_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps([row._asdict() for row in measure(arguments.quick)], indent=2))
        return
    print(f"{'':<60} {'median':>10}")
    for row in measure(arguments.quick):
        print(_line(row), flush=True)


def _line(row: Row) -> str:
    """One row, as soon as it is measured."""
    text = f"{row.what:<60} {row.median_us:>7.1f} us"
    if row.gib_s is not None:
        text += f"  {row.gib_s:6.2f} GiB/s"
    return text if row.of_memcpy is None else f"{text}, {row.of_memcpy:.2f} of memcpy"
