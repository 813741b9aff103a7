"""The results of a bench."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.measure import Sample


class Skipped(Exception):
    """A bench cannot run here; says why."""


@dataclass(frozen=True)
class Row:
    """One figure of kvpool, its target, and the same figure of the peers.

    Attributes:
        what: What was measured, for a person.
        value: kvpool's figure; a median where there are many.
        unit: Of the value, the target and the peers' figures.
        target: At most, or at least, see `better`; None where the figure stands for itself.
        better: Which way is good.
        p99: 99th percentile of kvpool's.
        peers: Name of a peer to its median in the same run.
        details: Whatever else belongs into the JSON.
        error: Why there is no figure; then `value` is None. "": there is a figure.
    """

    what: str
    value: float
    unit: str = "us"
    target: float | None = None
    better: Literal["lower", "higher"] = "lower"
    p99: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one, and without a figure."""
        if self.target is None or self.error:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "value": None if self.error else self.value, "met": self.met}


def timed_row(what: str, samples: dict[str, Sample], target: float | None = None, **details: Any) -> Row:
    """A row of medians in microseconds.

    Args:
        what: As in Row.
        samples: By name; kvpool's is called "kvpool", the others are peers.
        target: As in Row.
        **details: As in Row.
    """
    own = samples["kvpool"]
    return Row(
        what=what,
        value=own.median_us,
        target=target,
        p99=own.p99_us,
        peers={name: sample.median_us for name, sample in samples.items() if name != "kvpool"},
        details={**details, "samples": {name: dataclasses.asdict(sample) for name, sample in samples.items()}},
    )


def failed_row(what: str, error: Exception | str) -> Row:
    """A row for a figure that could not be had."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Row(what, math.nan, unit="", error=said.strip().partition("\n")[0] or "no word of why")


@dataclass
class Report:
    """All rows of a bench, and what a person should know about them.

    Attributes:
        rows: In the order of the table.
        notes: Sentences below the table.
        series: Points of the plots.
        plots: Names of the files that were drawn.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    series: dict[str, Any] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """An error inside becomes a row, and what comes after is measured all the same. Skipped goes on."""
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            self.rows.append(failed_row(what, error))
