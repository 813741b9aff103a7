"""Timing of calls that take microseconds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """What many timings of one operation come to, in microseconds."""

    median_us: float
    p99_us: float
    min_us: float
    n: int


def summarize(times_us: Sequence[float]) -> Sample:
    """REQUIRES: at least one time."""
    ordered = sorted(times_us)
    return Sample(
        median_us=median(ordered),
        p99_us=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        min_us=ordered[0],
        n=len(ordered),
    )


@contextmanager
def no_collections() -> Iterator[None]:
    """Keeps Python's garbage collector from running inside a timed call."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_calls(call: Callable[[T], object], arguments: Iterable[T]) -> list[float]:
    """Times `call(argument)` for each argument, each call once; microseconds."""
    times = []
    with no_collections():
        for argument in arguments:
            start = perf_counter_ns()
            call(argument)
            times.append((perf_counter_ns() - start) / 1000)
    return times


def interleave(subjects: Mapping[str, Callable[[], Sequence[float]]], rounds: int) -> dict[str, Sample]:
    """Lets the subjects take turns, so that whatever disturbs the machine disturbs all of them; microseconds."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            times[name].extend(measure())
    return {name: summarize(values) for name, values in times.items()}
