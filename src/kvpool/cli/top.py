"""`kvpool top URL`: the members of a cluster, again and again."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from kvpool.cli.cluster import add_place, columns, join, row
from kvpool.cluster import Cluster, Member
from kvpool.errors import ArgumentError, Unsupported

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser("top", help="watch the members of a cluster (needs the extra kvpool[cli])")
    add_place(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    parser.add_argument("--once", action="store_true", help="look once, and end")
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
    console = Console()
    with join(arguments) as cluster:
        if arguments.once:
            console.print(_table(cluster))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(_table(cluster), console=console, screen=True) as live:
            while True:
                time.sleep(arguments.every)
                live.update(_table(cluster), refresh=True)


def _table(cluster: Cluster) -> Any:
    from rich.table import Table

    members = cluster.members()
    table = Table(title=f"{len(members)} members, {_sum_up(members)}", title_justify="left")
    for title in columns:
        number = title in ("instance", "of", "requests", "seen for") or "/" in title
        table.add_column(title, justify="right" if number else "left", no_wrap=title == "member")
    for member in members:
        table.add_row(*row(member), style="dim" if member.state == "draining" else None)
    return table


def _sum_up(members: list[Member]) -> str:
    free = sum(one.load.hbm_free + one.load.dram_free for one in members)
    blocks = sum(one.hbm_blocks + one.dram_blocks for one in members)
    requests = sum(one.load.requests for one in members)
    return f"{free} of {blocks} blocks free, {requests} requests"
