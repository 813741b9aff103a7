"""Requests that arrive over time: seeded, with long-tailed lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Arrival", "Load", "arrivals"]


@dataclass(frozen=True)
class Load:
    """What arrives.

    Attributes:
        requests: How many.
        over_s: The mean time until the last one.
        median: Tokens of half of the requests, prompt and answer.
        sigma: Of the logarithm of their lengths: the larger, the longer the tail.
        longest: No request has more tokens.
        waves: They come in so many waves, each in the first quarter of its time.
        seed: Of all of it.
    """

    requests: int
    over_s: float
    median: int
    sigma: float
    longest: int
    seed: int
    waves: int = 1


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        name: Of the request.
        at_s: Seconds from the beginning.
        prompt: Its tokens.
        new_tokens: How many it is answered with.
    """

    name: str
    at_s: float
    prompt: tuple[int, ...]
    new_tokens: int


def arrivals(load: Load) -> list[Arrival]:
    """The requests, in the order in which they arrive. A quarter of each is its prompt."""
    rng = np.random.default_rng(load.seed)
    at = np.cumsum(rng.exponential(load.over_s / load.requests, load.requests))
    if load.waves > 1:
        wave_s = load.over_s / load.waves
        at = np.sort(at // wave_s * wave_s + at % wave_s / 4)
    lengths = np.clip(rng.lognormal(np.log(load.median), load.sigma, load.requests), 8, load.longest).astype(int)
    found = []
    for number, (when, length) in enumerate(zip(at - at[0], lengths, strict=True)):
        prompt = rng.integers(0, 256, max(4, length // 4))
        found.append(Arrival(f"r{number}", float(when), tuple(map(int, prompt)), int(length) - len(prompt)))
    return found
