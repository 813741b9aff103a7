"""Requests with their arrivals and lengths."""

from __future__ import annotations

import csv
import lzma
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LMSYS_PROMPT", "LMSYS_RESPONSE", "Arrival", "azure", "long_tailed", "poisson", "zipped"]

# Means that LMSYS-Chat-1M publishes, in tokens.
LMSYS_PROMPT = 69.5
LMSYS_RESPONSE = 214.5


class Arrival(NamedTuple):
    """A request as it arrives.

    Attributes:
        time_s: Seconds since the start.
        prompt: Tokens that it comes with; 1 or more.
        response: Tokens that will be generated; 1 or more.
    """

    time_s: float
    prompt: int
    response: int


def poisson(rate: float, seconds: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Times of a Poisson process of `rate` a second."""
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds + 10 * (rate * seconds) ** 0.5) + 10))
    return times[times < seconds]


def long_tailed(mean: float, sigma: float, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Log-normal lengths of this mean, 1 or more; `sigma` is the deviation of their logarithm."""
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.maximum(1, np.rint(lengths)).astype(np.int64)


def azure(path: Path) -> list[Arrival]:
    """Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens; `.csv`, or `.csv.xz`."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(lines)
        ]
    start = min(row[0] for row in rows)
    return [Arrival((time - start).total_seconds(), max(1, prompt), max(1, out)) for time, prompt, out in sorted(rows)]


def zipped(times: npt.NDArray[np.float64], prompts: Sequence[int], responses: Sequence[int]) -> list[Arrival]:
    """Requests of separate arrivals and lengths."""
    return [
        Arrival(float(time), int(prompt), int(response))
        for time, prompt, response in zip(times, prompts, responses, strict=True)
    ]
