"""How all plots look."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def draw(path: Path, title: str, *panels: Callable[[Any], None]) -> list[str]:
    """Draws panels, two a row, each by a function that is given its axes, and writes them to `path`.

    Returns the file's name, or nothing where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return []
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces on the screen that it looks for fonts
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 5.2 * columns, 0.3 + 3.9 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places[len(panels) :]:  # of an odd number
        axes.set_visible(False)
    for axes, paint in zip(places, panels, strict=False):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without metadata: it would name the version that drew it, and change the file for nothing.
    figure.savefig(path, dpi=130, metadata={"Software": None})
    return [path.name]


def mark_counts(axes: Any, counts: Sequence[int]) -> None:
    """A logarithmic x axis with a label at each of these numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()


def shade(number: int, count: int) -> Any:
    """Colour of line `number` of `count` lines that are ordered."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.85 * number / max(1, count - 1))
