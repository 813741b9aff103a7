"""Figures 11, 12, 14 and 15 of MELL's paper from runs of small instances, and beside each what the policies predict.

An instance is a GPU of the paper. Its lower bound is that of the requests that decode, moment by moment, each with the
room that its tokens take. Figure 13 compares operations one by one with batches; instances plan by epochs, which is
always in batches: that figure is the simulator's (bench/mell/figures.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bench import plots
from bench.mell.live_model import Predicted, room_of
from kvpool.policy import mell

__all__ = ["FIGURES", "Traced", "draw_live", "of_prediction", "over_seeds", "traced"]

FIGURES = ("gpus", "over_bound", "utilisation", "moves_s")
_TITLES = {"mell": "MELL", "bf": "BF", "wf": "WF", "lb": "LB"}


class Answered(Protocol):
    """A request of examples/migration that was answered."""

    @property
    def arrival(self) -> Any: ...

    @property
    def times(self) -> Sequence[float]: ...


class Ran(Protocol):
    """A run of examples/migration."""

    @property
    def seconds(self) -> float: ...

    @property
    def answers(self) -> Sequence[Answered]: ...

    @property
    def in_use(self) -> Sequence[tuple[float, int]]: ...


@dataclass(frozen=True)
class Traced:
    """The figures of one run.

    Attributes:
        gpus: Instances, on average over time.
        over_bound: By so many percent that is above the lower bound.
        utilisation: Percent of the room of instances that requests have, on average over time.
        moves_s: Requests that moved, a second.
        over_time: Seconds and instances, each epoch.
    """

    gpus: float
    over_bound: float
    utilisation: float
    moves_s: float
    over_time: list[tuple[float, int]]


def traced(run: Ran, moves: int, *, blocks: int, block_tokens: int, epoch_s: float) -> Traced:
    """What a run has shown, looked at once an epoch."""
    used_s = bound_s = tokens_s = 0.0
    starts = [second for second, _ in run.in_use]
    over_time = []
    for number in range(max(1, round(run.seconds / epoch_s))):
        now = number * epoch_s
        instances = run.in_use[max(0, bisect_right(starts, now) - 1)][1]
        sizes = [_size(each, now, block_tokens) for each in run.answers]
        running = [size for size in sizes if size]
        used_s += epoch_s * instances
        bound_s += epoch_s * mell.lower_bound(running, blocks * block_tokens)
        tokens_s += epoch_s * sum(running)
        over_time.append((now, instances))
    return _traced(used_s, bound_s, tokens_s, run.seconds, moves, blocks * block_tokens, over_time)


def of_prediction(found: Predicted, capacity: int) -> Traced:
    """What the policies alone predict."""
    return _traced(
        found.instance_seconds, found.bound_seconds, found.token_seconds, found.seconds, found.moves, capacity,
        list(found.over_time),
    )  # fmt: skip


def over_seeds(runs: Sequence[Traced]) -> dict[str, dict[str, float]]:
    """Median, least and most of each figure."""
    found = {}
    for key in FIGURES:
        values = [getattr(run, key) for run in runs]
        found[key] = {"median": median(values), "min": min(values), "max": max(values)}
    return found


def draw_live(
    out: Path, measured: Mapping[str, Sequence[Traced]], predicted: Mapping[str, Sequence[Traced]]
) -> list[str]:
    """Draws the figures, by policy: bars are runs with their spread, crosses the prediction. Names of the files."""
    names = list(measured)
    shown = {name: over_seeds(runs) for name, runs in measured.items()}
    thought = {name: over_seeds(runs) for name, runs in predicted.items()}

    def bars(axes: Any, key: str, title: str) -> None:
        for number, name in enumerate(names):
            one = shown[name][key]
            spread = [[one["median"] - one["min"]], [one["max"] - one["median"]]]
            axes.bar(
                [number], [one["median"]], 0.6, yerr=spread, color=plots.shade(number, len(names)), error_kw={"lw": 0.8}
            )
        axes.plot(range(len(names)), [thought[name][key]["median"] for name in names], "kx", label="predicted")
        axes.set_xticks(range(len(names)), [_TITLES[name] for name in names])
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7)

    def over_bound(axes: Any) -> None:
        bars(axes, "over_bound", "mean instances over the lower bound, %  (Fig 11)")

    def moves(axes: Any) -> None:
        bars(axes, "moves_s", "requests migrated a second  (Fig 12)")

    def utilisation(axes: Any) -> None:
        bars(axes, "utilisation", "utilisation, %  (Fig 14)")

    def over_time(axes: Any) -> None:
        for number, name in enumerate(names):
            points = measured[name][0].over_time
            axes.step(
                *zip(*points, strict=True), where="post", label=_TITLES[name], color=plots.shade(number, len(names))
            )
        axes.set_title("instances over time, s: the first seed  (Fig 15)", fontsize=9)
        axes.legend(fontsize=7)

    def curve(axes: Any) -> None:
        for number, name in enumerate(names):
            colour = plots.shade(number, len(names))
            axes.plot(
                [run.moves_s for run in measured[name]], [run.gpus for run in measured[name]], "o",
                label=_TITLES[name], color=colour,
            )  # fmt: skip
        axes.set_xlabel("requests migrated a second")
        axes.set_ylabel("mean instances")
        axes.legend(fontsize=7)

    return plots.draw(
        out / "live.png", "Small instances: MELL, BF, WF and LB", over_bound, moves, utilisation, over_time, curve
    )


def _traced(
    used_s: float, bound_s: float, tokens_s: float, seconds: float, moves: int, capacity: int,
    over_time: list[tuple[float, int]],
) -> Traced:  # fmt: skip
    return Traced(
        used_s / max(seconds, 1e-9),
        100 * (used_s / bound_s - 1) if bound_s else 0.0,
        100 * tokens_s / (capacity * used_s) if used_s else 0.0,
        moves / max(seconds, 1e-9),
        over_time,
    )


def _size(answer: Answered, now: float, block_tokens: int) -> int:
    """The room that a request takes now; 0 before it has arrived and after its end."""
    if now < answer.arrival.at_s or not answer.times or now >= answer.times[-1]:
        return 0
    return room_of(len(answer.arrival.prompt) + bisect_right(answer.times, now), block_tokens)
