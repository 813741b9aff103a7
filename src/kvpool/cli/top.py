"""`kvpool top URL`: shows the members of a cluster continuously."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from kvpool.cli.cluster import add_url, columns, join, row
from kvpool.cluster import Cluster, Member
from kvpool.control.rebalancing import moves_of
from kvpool.errors import ArgumentError, Unsupported

__all__ = ["add_parser"]

_EXPENDABLE: Final = ("endpoints", "seen for", "instance")  # on a narrow terminal, in this order
_BETWEEN: Final = 3  # a line and two spaces
_MOVES: Final = 16 + _BETWEEN  # the column of migrations, where members take part in rebalancing


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("top", help="watch the members of a cluster (needs the extra kvpool[cli])")
    add_url(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="interval of the updates")
    parser.add_argument("--once", action="store_true", help="show the members once")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if not 0.05 <= arguments.every <= 3600:
        raise ArgumentError(f"--every is {arguments.every}; it must be from 0.05 to 3600 seconds")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise Unsupported(
            "kvpool top draws with rich: pip install 'kvpool[cli]'; kvpool cluster needs nothing"
        ) from None
    console = Console(markup=False, emoji=False, highlight=False)  # member names are arbitrary text
    with join(arguments) as cluster:
        if arguments.once:
            console.print(_table(cluster, console.width))
            return
        first = _table(cluster, console.width)
        with contextlib.suppress(KeyboardInterrupt), Live(first, console=console, screen=True) as live:
            while True:
                time.sleep(arguments.every)
                live.update(_table(cluster, console.width), refresh=True)


def _table(cluster: Cluster, width: int) -> Any:
    from rich.table import Table

    members = cluster.members()
    rows = [row(member) for member in members]
    moves = [moves_of(member) for member in members]
    titles = [title.replace("free/active/", "free/active\n/").replace(" ", "\n", 1) for title in columns]
    table = Table(title=f"{len(members)} members, {_sum_up(members)}", title_justify="left")
    shown = _fitting([titles, *rows], width - (_MOVES if any(moves) else 0))
    for column in shown:
        number = columns[column] in ("instance", "of", "requests", "seen for") or "/" in columns[column]
        table.add_column(titles[column], justify="right" if number else "left", no_wrap=True)
    if any(moves):
        table.add_column("moving/by KV/\nby tokens/failed", justify="right", no_wrap=True)
    for member, texts, counts in zip(members, rows, moves, strict=True):
        style = "dim" if member.state == "draining" else None
        more = ["/".join(map(str, counts))] if counts else [""] if any(moves) else []
        table.add_row(*(texts[column] for column in shown), *more, style=style)
    return table


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns to show, so that they fit if possible."""
    widths = [max(len(line) for one in rows for line in one[column].split("\n")) for column in range(len(columns))]
    shown = list(range(len(columns)))
    for title in _EXPENDABLE:
        if sum(widths[column] + _BETWEEN for column in shown) + 1 <= width:
            break
        shown.remove(columns.index(title))
    return shown


def _sum_up(members: list[Member]) -> str:
    free = sum(one.load.hbm_free + one.load.dram_free for one in members)
    blocks = sum(one.hbm_blocks + one.dram_blocks for one in members)
    requests = sum(one.load.requests for one in members)
    return f"{free} of {blocks} blocks free, {requests} requests"
