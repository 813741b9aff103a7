"""Synthetic, seeded workloads without end, so that a shorter simulation runs a prefix of a longer one.

| name        | arrivals                    | prompts                                                              |
|-------------|-----------------------------|----------------------------------------------------------------------|
| poisson     | Poisson, each by itself     | log-normal lengths, nothing shared                                   |
| power-law   | Poisson, each by itself     | lengths with a heavy tail (Pareto), nothing shared                   |
| documents   | Poisson, each by itself     | a document, by Zipf's law some far more often, and a question        |
| chat        | Poisson sessions, think time | a system prompt that many share, and all turns before               |
| agent       | Poisson sessions, no pause  | a long prompt with tools and examples, many turns, short answers     |

Lengths of prompts are whole blocks: an id stands for one. Parameters are assumptions, not measurements; those of
`chat` are near what LMSYS-Chat-1M publishes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.sim.requests import NO_IDS, FreshIds, Ids, SimRequest, Workload

__all__ = ["PRESETS", "Shape", "generate"]

_CHUNK: Final = 4096  # random numbers drawn at a time


@dataclass(frozen=True)
class Shape:
    """The shape of requests; lengths are means, in tokens.

    Attributes:
        what: One line for a person.
        prompt: The new part of a prompt: all of it, a question, a turn.
        output: The answer.
        sigma: Deviation of the logarithm of both: log-normal lengths. 0 makes them all equal.
        tail: Exponent of a Pareto distribution in place of the log-normal one; above 1, and heavier the nearer to 1.
        shared: Prefixes that prompts share: system prompts, documents.
        shared_count: How many there are; 0 for none.
        zipf: How unequally they are used: the k-th most used is used in proportion to 1 / k^zipf.
        turns: Mean number of turns of a session; geometric. 1 for single requests.
        think_s: Mean time from an answer to the next turn; exponential.
        longest: The longest prompt, with all turns before; a session ends there.
    """

    what: str
    prompt: float
    output: float
    sigma: float = 1.0
    tail: float | None = None
    shared: int = 0
    shared_count: int = 0
    zipf: float = 1.0
    turns: float = 1.0
    think_s: float = 0.0
    longest: int = 32_768


PRESETS: Final[Mapping[str, Shape]] = {
    "poisson": Shape("distinct prompts, log-normal lengths", prompt=1000, output=200),
    "power-law": Shape("distinct prompts, lengths with a heavy tail", prompt=1000, output=200, tail=1.5),
    "documents": Shape(
        "questions about documents, some far more popular",
        prompt=64,
        output=128,
        sigma=0.6,
        shared=4096,
        shared_count=2000,
    ),
    "chat": Shape(
        "conversations behind shared system prompts",
        prompt=70,
        output=215,
        shared=512,
        shared_count=20,
        zipf=1.2,
        turns=4.0,
        think_s=30.0,
    ),
    "agent": Shape(
        "agents: long shared prompts, many quick turns",
        prompt=250,
        output=60,
        sigma=0.7,
        shared=2048,
        shared_count=8,
        turns=8.0,
        think_s=1.0,
    ),
}


def generate(
    shape: Shape | str,
    *,
    rate: float,
    requests: int,
    seed: int = 0,
    block_tokens: int = 16,
    **changes: Any,
) -> Workload:
    """A synthetic workload.

    Args:
        shape: The shape of requests, or the name of a preset.
        rate: Mean requests a second. Sessions start as a Poisson process of this rate divided by the mean turns.
        requests: How many, all turns counted; the last session to begin is cut short if it would have more.
        seed: Determines everything that is drawn.
        block_tokens: Tokens a block.
        **changes: Fields of the shape to change.

    Raises:
        ArgumentError: An unknown preset or field, or a value out of range.
    """
    name = shape if isinstance(shape, str) else "made up"
    if isinstance(shape, str):
        if shape not in PRESETS:
            raise ArgumentError(f"no workload {shape!r}; there are {', '.join(PRESETS)}")
        shape = PRESETS[shape]
    try:
        shape = replace(shape, **changes)
    except TypeError as error:
        raise ArgumentError(f"a workload has no such field: {error}") from error
    _check(shape, rate, requests, block_tokens)
    chosen = shape

    def start() -> Iterator[SimRequest]:
        source = _Source(chosen, block_tokens, seed)
        if chosen.turns == 1:
            return islice(source.singles(rate), requests)
        return source.sessions(rate / chosen.turns, requests)

    note = f"{chosen.what}; Poisson arrivals, {rate:g} requests/s on average"
    return Workload(name, block_tokens, start, (note,))


def _check(shape: Shape, rate: float, requests: int, block_tokens: int) -> None:
    if not rate > 0 or requests < 1 or block_tokens < 1:
        raise ArgumentError(f"rate {rate} above 0, requests {requests} and block_tokens {block_tokens} at least 1")
    if shape.prompt < 1 or shape.output < 1 or shape.turns < 1 or shape.sigma < 0 or shape.think_s < 0:
        raise ArgumentError(f"prompt, output and turns are at least 1, sigma and think_s at least 0: {shape}")
    if shape.tail is not None and not shape.tail > 1:
        raise ArgumentError(f"tail is {shape.tail}; lengths have a mean only above 1")
    if min(shape.shared, shape.shared_count) < 0 or shape.zipf < 0 or shape.longest <= shape.shared:
        raise ArgumentError(f"shared, shared_count and zipf are at least 0, longest is above shared: {shape}")


class _Drawn:
    """Numbers of one distribution, drawn in chunks."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._left: list[Any] = []

    def next(self) -> Any:
        if not self._left:
            self._left = self._draw(_CHUNK).tolist()[::-1]
        return self._left.pop()


class _Source:
    """Random numbers, ids, and the requests that are made of them."""

    def __init__(self, shape: Shape, block_tokens: int, seed: int) -> None:
        self._shape, self._block = shape, block_tokens
        streams = [np.random.default_rng([seed, number]) for number in range(6)]
        self._gap_random = streams[0]
        self._prompts = _Drawn(lambda n: self._lengths(streams[1], shape.prompt, n))
        self._outputs = _Drawn(lambda n: self._lengths(streams[2], shape.output, n))
        self._turns = _Drawn(lambda n: streams[3].geometric(1 / shape.turns, n))
        self._pauses = _Drawn(lambda n: streams[4].exponential(shape.think_s, n))
        self._shared_blocks = -(-shape.shared // block_tokens) if shape.shared_count else 0
        weights = np.arange(1, max(1, shape.shared_count) + 1, dtype=np.float64) ** -shape.zipf
        cumulative = np.cumsum(weights / weights.sum())
        self._beginnings = _Drawn(
            lambda n: np.minimum(np.searchsorted(cumulative, streams[5].random(n)), len(cumulative) - 1)
        )
        self._fresh = FreshIds(first=shape.shared_count * self._shared_blocks)

    def singles(self, rate: float) -> Iterator[SimRequest]:
        """Single requests."""
        for time_s in self._times(rate):
            beginning = self._beginning()
            asked, output = self._new_blocks(len(beginning)), self._outputs.next()
            ids = np.concatenate([beginning, self._fresh.take(asked)])
            yield SimRequest(time_s, ids, len(ids) * self._block, output)

    def sessions(self, rate: float, requests: int) -> Iterator[SimRequest]:
        """The first requests of sessions, from which the others follow, up to the number of requests in all."""
        left = requests
        for number, time_s in enumerate(self._times(rate)):
            turns = self._session(f"s{number}", min(left, self._turns.next()))
            left -= len(turns)
            following = iter(turns)
            for turn in turns:
                turn.then = following
            first = next(following)
            first.time_s = time_s
            yield first
            if not left:
                return

    def _session(self, name: str, turns: int) -> list[SimRequest]:
        said = self._beginning()
        rest: list[SimRequest] = []
        for _ in range(turns):
            if rest and (len(said) + 1) * self._block > self._shape.longest:
                break
            ids = np.concatenate([said, self._fresh.take(self._new_blocks(len(said)))])
            output = self._outputs.next()
            answer = self._fresh.take(-(-output // self._block))
            said = np.concatenate([ids, answer])
            pause = self._pauses.next() if rest else 0.0
            rest.append(SimRequest(pause, ids, len(ids) * self._block, output, name, answer))
        return rest

    def _beginning(self) -> Ids:
        if not self._shared_blocks:
            return NO_IDS
        start = self._beginnings.next() * self._shared_blocks
        return np.arange(start, start + self._shared_blocks, dtype=np.int32)

    def _new_blocks(self, before: int) -> int:
        """How many new blocks a prompt has behind `before`: at least one, at most what the longest prompt allows."""
        room = self._shape.longest // self._block - before
        return int(max(1, min(room, -(-self._prompts.next() // self._block))))

    def _times(self, rate: float) -> Iterator[float]:
        now = 0.0
        while True:
            for gap in self._gap_random.exponential(1 / rate, _CHUNK).tolist():
                now += gap
                yield now

    def _lengths(self, random: np.random.Generator, mean: float, n: int) -> npt.NDArray[np.int64]:
        shape = self._shape
        if shape.tail is not None:
            drawn = (random.pareto(shape.tail, n) + 1) * mean * (shape.tail - 1) / shape.tail
        else:
            drawn = random.lognormal(np.log(mean) - shape.sigma**2 / 2, shape.sigma, n)
        return np.clip(np.rint(drawn), 1, shape.longest).astype(np.int64)
