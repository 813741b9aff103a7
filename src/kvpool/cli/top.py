"""`kvpool top URL`: shows the members of a cluster continuously."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kvpool.cli.cluster import add_url, join
from kvpool.cli.rates import Rates
from kvpool.cluster import Cluster, Member
from kvpool.control.rebalancing import moves_of
from kvpool.errors import ArgumentError, Unsupported

__all__ = ["add_parser"]

_GAP: Final = 2  # between columns: a space of the box, and a padding
_NAME_MIN: Final = 8
_NAME_MAX: Final = 24  # for a longer name no other column has to go
_UNLIMITED: Final = 100_000  # columns where nothing has to fit: in a pipe or a file


class _Column(NamedTuple):
    """A column: what stands above it, and for each member in it. Those of the highest `expendable` go first."""

    title: str
    text: Callable[[Member, Rates], str]
    right: bool = True
    expendable: int = 0


def _short(count: int) -> str:
    """Three or four characters: 9999, 12k, 17M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size:
            return f"{count / size:.0f}{unit}"
    return str(count)


def _blocks(*counts: int) -> str:
    return "/".join(map(_short, counts))


def _hits(member: Member, _: Rates) -> str:
    asked = member.load.requested_tokens
    return f"{100 * member.load.matched_tokens / asked:.0f} %" if asked else "-"


def _tokens_s(member: Member, rates: Rates) -> str:
    rate = rates.of(member)
    return "-" if rate is None else _short(round(rate))


def _moves(member: Member) -> str:
    return "/".join(map(str, moves_of(member) or ()))


_COLUMNS: Final = (
    _Column("member", lambda one, _: one.name, right=False),
    _Column("instance", lambda one, _: str(one.instance), expendable=7),
    _Column("role", lambda one, _: one.role, right=False),
    _Column("state", lambda one, _: one.state, right=False),
    _Column("HBM free/\nactive/cached",
            lambda one, _: _blocks(one.load.hbm_free, one.load.hbm_active, one.load.hbm_historical)),
    _Column("of", lambda one, _: _short(one.hbm_blocks), expendable=4),
    _Column("DRAM free/\nactive/cached",
            lambda one, _: _blocks(one.load.dram_free, one.load.dram_active, one.load.dram_historical), expendable=3),
    _Column("of", lambda one, _: _short(one.dram_blocks), expendable=5),
    _Column("requests", lambda one, _: _short(one.load.requests)),
    _Column("hits", _hits),
    _Column("tokens/s", _tokens_s),
    _Column("seen for", lambda one, _: f"{one.joined_for_s:.0f} s", expendable=8),
    _Column("endpoints", lambda one, _: " ".join(one.endpoints), right=False, expendable=9),
)  # fmt: skip
_MOVING: Final = _Column("moving/by KV/\nby tokens/failed", lambda one, _: _moves(one), expendable=6)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "top",
        help="watch the members of a cluster (needs the extra kvpool[cli])",
        description="Watches the members of a cluster: blocks, requests, the share of the tokens asked for that were "
        "cached (since the pool was made), and tokens asked for in a second. q ends it.",
    )
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
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = _UNLIMITED
    rates = Rates()
    with join(arguments) as cluster:
        if arguments.once:
            console.print(_table(cluster, rates, console.width))
            return
        first = _table(cluster, rates, console.width)
        screen = Live(first, console=console, screen=True, auto_refresh=False)
        with _ended_by_signals(), _keys() as key, screen as live:
            live.refresh()
            while key(arguments.every) not in (b"q", b"Q"):
                live.update(_table(cluster, rates, console.width), refresh=True)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by an exception, so that the terminal is as before."""
    if threading.current_thread() is not threading.main_thread():  # no other may have handlers
        yield
        return
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one, handler in before.items():
        if handler is not signal.SIG_IGN:  # as under nohup
            signal.signal(one, _end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as shells have it


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """A function that waits so long for a key: the key, or nothing. Without a terminal nobody presses any."""
    try:
        typed = sys.stdin.fileno()
        before = termios.tcgetattr(typed)
    except (OSError, ValueError, AttributeError, termios.error):
        yield _no_key
        return
    tty.setcbreak(typed)
    try:
        yield lambda seconds: _key_of(typed, seconds)
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(typed, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> bytes:
    time.sleep(seconds)
    return b""


def _key_of(typed: int, seconds: float) -> bytes:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([typed], [], [], left)[0]:
            key = os.read(typed, 1)
            if not key:  # the terminal has gone
                return b"q"
            if key in (b"q", b"Q"):
                return key
    return b""


def _table(cluster: Cluster, rates: Rates, width: int) -> Any:
    from rich import box
    from rich.table import Table

    members = cluster.members()
    rates.note(members)
    columns = [*_COLUMNS, _MOVING] if any(map(moves_of, members)) else list(_COLUMNS)
    rows = [[column.text(member, rates) for column in columns] for member in members]
    shown, name = _fitting([[column.title for column in columns], *rows], columns, width)
    title = f"{len(members)} members, {_sum_up(members)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0), show_edge=False)
    for number in shown:
        column = columns[number]
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for member, texts in zip(members, rows, strict=True):
        style = "dim" if member.state == "draining" else None
        table.add_row(*(texts[number] if number else _cut(texts[0], name) for number in shown), style=style)
    return table


def _fitting(rows: Sequence[Sequence[str]], columns: Sequence[_Column], width: int) -> tuple[list[int], int]:
    """The columns to show, so that they fit with a name of 24 characters, and the width that is left for names."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(line) for one in rows for line in one[number].split("\n")) + _GAP for number in range(len(columns))
    ]
    widths[0] = min(widths[0], _NAME_MAX + _GAP)
    shown = list(range(len(columns)))
    for number in sorted(shown, key=lambda one: columns[one].expendable, reverse=True):
        if sum(widths[one] for one in shown) <= width or not columns[number].expendable:
            break
        shown.remove(number)
    others = sum(widths[one] for one in shown if one)
    return shown, max(_NAME_MIN, width - others - _GAP)


def _cut(name: str, width: int) -> str:
    """A name without its middle if it is too wide: those of pods differ at their end."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(name) <= width:
        return name
    head = (width - 1) // 2
    tail = name
    while cell_len(tail) > width - 1 - head:
        tail = tail[1:]
    return f"{set_cell_size(name, head)}…{tail}"


def _sum_up(members: list[Member]) -> str:
    free = sum(one.load.hbm_free + one.load.dram_free for one in members)
    blocks = sum(one.hbm_blocks + one.dram_blocks for one in members)
    requests = sum(one.load.requests for one in members)
    asked = sum(one.load.requested_tokens for one in members)
    found = sum(one.load.matched_tokens for one in members)
    hits = f", {100 * found / asked:.0f} % of tokens cached" if asked else ""
    return f"{free} of {blocks} blocks free, {requests} requests{hits}"
