"""Prints reports: with rich where it is installed, plainly where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.result import Report, Row

_HEADER = ("", "kvpool", "p99", "target", "", "peers (times kvpool's)")
_WIDTH = 150
_TIE = 1.5  # below this a ratio says nothing: medians move by 10-30 % from run to run


class Screen:
    """Where everything goes that a person reads."""

    def __init__(self) -> None:
        self._console: Any = None
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return
        console = Console(highlight=False)
        # A file or a pipe has no width; 80 columns, which rich would take, break every row.
        self._console = console if console.is_terminal else Console(highlight=False, width=_WIDTH)

    def line(self, text: str = "", style: str = "") -> None:
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False)

    def report(self, title: str, report: Report, busy: str) -> None:
        self.line()
        self.line(title, style="bold")
        cells = [_cells(row) for row in report.rows]
        if self._console is None:
            for text in _plain([_HEADER, *cells]):
                self.line(text)
        else:
            self._console.print(_rich_table(cells))
        for note in report.notes:
            self.line(f"  {note}", style="dim")
        if busy:
            self.line(f"  The machine was busy, so these figures are worth little: {busy}.", style="yellow")


def _cells(row: Row) -> tuple[str, ...]:
    if row.error:
        return (row.what, "", "", "", "FAILED", row.error)
    sign = "<=" if row.better == "lower" else ">="
    return (
        row.what,
        _figure(row.value, row.unit),
        "" if row.p99 is None else _figure(row.p99, row.unit),
        "" if row.target is None else f"{sign} {_figure(row.target, row.unit)}",
        {True: "met", False: "MISSED", None: ""}[row.met],
        ", ".join(f"{name} {_figure(value, row.unit)} ({_ratio(row, value)})" for name, value in row.peers.items()),
    )


def _ratio(row: Row, value: float) -> str:
    ratio = value / row.value if row.value else float("inf")
    return "tie" if 1 / _TIE < ratio < _TIE else f"{ratio:.2g}x" if ratio < 10 else f"{ratio:,.0f}x"


def _figure(value: float, unit: str) -> str:
    if unit == "us" and value >= 10_000:
        return f"{value / 1000:,.1f} ms"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f} {unit}"


def _rich_table(cells: Sequence[tuple[str, ...]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim", pad_edge=True)
    for number, name in enumerate(_HEADER):
        table.add_column(name, justify="right" if number in (1, 2, 3) else "left", no_wrap=1 <= number <= 4)
    styles = {"met": "green", "MISSED": "bold red", "FAILED": "bold red"}
    for row in cells:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    return table


def _plain(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
