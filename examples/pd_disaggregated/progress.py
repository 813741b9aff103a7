"""The progress of a run: a bar on a terminal, plain lines now and then for a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

    from pd_disaggregated.records import Answer

LINE_EVERY_S: Final = 5.0

Shown = tuple[Callable[[str], None], Callable[["Answer"], None]]


@contextmanager
def shown(console: Console, requests: int) -> Iterator[Shown]:
    """Yields what names the run that is on, and what counts an answer; both are for one thread.

    Args:
        console: Where it is shown.
        requests: Of all runs.
    """
    if not console.is_terminal:
        yield _lines(console, requests)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=requests)

        def name(text: str) -> None:
            progress.update(task, description=text)

        def answered(_: Answer) -> None:
            progress.advance(task)

        yield name, answered


def _lines(console: Console, requests: int) -> Shown:
    """A line when a run begins, and after an answer when the last line is some seconds old."""
    started = said = time.monotonic()
    done, run = 0, ""

    def say(text: str) -> None:
        nonlocal said
        said = time.monotonic()
        console.print(f"{text} ({said - started:.0f} s)", soft_wrap=True, markup=False)
        console.file.flush()  # a pipe would keep it until the end

    def name(text: str) -> None:
        nonlocal run
        run = text
        say(f"{run}: starts")

    def answered(_: Answer) -> None:
        nonlocal done
        done += 1
        if time.monotonic() - said >= LINE_EVERY_S:
            say(f"{run}: {done} of {requests} requests answered")

    return name, answered
