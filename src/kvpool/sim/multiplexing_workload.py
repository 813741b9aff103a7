"""Requests for many models of different popularity (MuxServe §4.2, §4.3).

Rates follow a power law, arrivals are Poisson, lengths log-normal. Of the traces that the paper takes its lengths and
its real traffic from, only means are published; what stands here is synthetic, seeded, and has these means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.sim.workload import LMSYS_PROMPT, LMSYS_RESPONSE, long_tailed, poisson

__all__ = ["LMSYS", "SHAREGPT", "Lengths", "ModelArrival", "arrivals", "cumulative", "power_law", "shifting"]

_LONGEST: Final = 2048  # tokens of a prompt or an answer: the context of the models


class Lengths(NamedTuple):
    """Of requests, in tokens.

    Attributes:
        prompt: The mean.
        output: The mean of answers.
        sigma: Deviation of the logarithm of both; 0: all are equal.
    """

    prompt: float
    output: float
    sigma: float = 1.0

    def times(self, factor: float) -> Lengths:
        """Longer ones."""
        return self._replace(prompt=factor * self.prompt, output=factor * self.output)


SHAREGPT: Final = Lengths(161, 338)
LMSYS: Final = Lengths(LMSYS_PROMPT, LMSYS_RESPONSE)


class ModelArrival(NamedTuple):
    """A request as it comes: when, for which model, and how many tokens its prompt and its answer have."""

    time_s: float
    model: str
    prompt: int
    output: int


def power_law(models: int, alpha: float, top: float) -> list[float]:
    """Requests a second of each model, falling: that of the k-th is top / k^alpha.

    Raises:
        ArgumentError: There are no models, or alpha is below 0, or the largest rate not above 0.
    """
    if models < 1 or alpha < 0 or not top > 0:
        raise ArgumentError(f"{models} models, alpha {alpha}, largest rate {top}: at least one, from 0, above 0")
    return [top / rank**alpha for rank in range(1, models + 1)]


def cumulative(rates: Sequence[float], part: float) -> float:
    """The part of all requests that the most popular `part` of the models get, between two models interpolated."""
    falling = sorted(rates, reverse=True)
    sums = np.concatenate([[0.0], np.cumsum(falling)])
    return float(np.interp(part * len(rates), np.arange(len(sums)), sums) / sums[-1])


def arrivals(
    rates: Mapping[str, float], seconds: float, lengths: Lengths | Mapping[str, Lengths] = SHAREGPT, seed: int = 0
) -> list[ModelArrival]:
    """Poisson arrivals of all models, in the order of their times.

    Args:
        rates: Requests a second, by name of model.
        seconds: How long.
        lengths: Of all models, or by name.
        seed: Determines everything. The requests of a model depend on it and on the model's place among the others.
    """
    found: list[ModelArrival] = []
    for at, (model, rate) in enumerate(rates.items()):
        rng = np.random.default_rng([seed, at])
        times = poisson(rate, seconds, rng) if rate else np.zeros(0)
        found += _requests(model, times, lengths if isinstance(lengths, Lengths) else lengths[model], rng)
    return sorted(found)


def shifting(
    rates: Mapping[str, float],
    seconds: float,
    period_s: float = 20.0,
    spread: float = 0.7,
    lengths: Lengths = LMSYS,
    seed: int = 0,
) -> list[ModelArrival]:
    """Arrivals like those of a site that serves many models: the rate of each changes, and keeps its mean.

    Synthetic. In each period a model's rate is its mean times a log-normal factor, which half follows the one before.

    Args:
        rates: Means, requests a second, by name of model.
        seconds: How long.
        period_s: How long a rate stays.
        spread: Deviation of the logarithm of the factors.
        lengths: Of requests.
        seed: As in `arrivals`.
    """
    found: list[ModelArrival] = []
    edges = [*np.arange(0.0, seconds, period_s).tolist(), seconds]
    for at, (model, rate) in enumerate(rates.items()):
        rng = np.random.default_rng([seed, at])
        factors = _factors(len(edges) - 1, spread, rng)
        times = [
            start + poisson(rate * factor, end - start, rng)
            for (start, end), factor in zip(pairwise(edges), factors, strict=True)
            if rate
        ]
        found += _requests(model, np.concatenate([np.zeros(0), *times]), lengths, rng)
    return sorted(found)


def _factors(count: int, spread: float, rng: np.random.Generator) -> list[float]:
    """Factors whose mean is 1, each half like the one before."""
    level = rng.normal()
    logs = []
    for _ in range(count):
        logs.append(spread * level)
        level = 0.5 * level + 0.75**0.5 * rng.normal()
    factors = np.exp(logs)
    return [float(each) for each in factors / factors.mean()]


def _requests(
    model: str, times: npt.NDArray[np.float64], lengths: Lengths, rng: np.random.Generator
) -> list[ModelArrival]:
    prompts, outputs = (
        np.minimum(_LONGEST, long_tailed(mean, lengths.sigma, len(times), rng)).tolist()
        for mean in (lengths.prompt, lengths.output)
    )
    return [
        ModelArrival(float(time), model, int(prompt), int(output))
        for time, prompt, output in zip(times, prompts, outputs, strict=True)
    ]
