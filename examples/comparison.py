"""Measures what the cache changes: one stream of requests with it and without it, and TTFT against the cached share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llama import Llama
from prompts import Conversation
from serving import Engine, Served, Tokens, kv_layout

import kvpool

_CURVE_SHARES = 5


@dataclass(frozen=True)
class Pair:
    """One request, served twice."""

    off: Served
    on: Served

    @property
    def same_tokens(self) -> bool:
        return self.off.tokens == self.on.tokens

    @property
    def logit_difference(self) -> float:
        return float((self.off.logits - self.on.logits).abs().max())

    @property
    def margin(self) -> float:
        """By how much the best token won where it was closest."""
        best, second = self.off.logits.topk(2).values.unbind(-1)
        return float((best - second).min())


@dataclass(frozen=True)
class Comparison:
    """A stream of requests, served twice. Pairs are (off, on)."""

    pairs: list[Pair]
    stats: kvpool.PoolStats  # of the pool with the cache, after the last request

    @property
    def different(self) -> list[int]:
        """Numbers of the requests whose tokens differ. Must be empty."""
        return [number for number, pair in enumerate(self.pairs) if not pair.same_tokens]

    @property
    def prompt_tokens(self) -> int:
        return sum(pair.on.prompt_tokens for pair in self.pairs)

    @property
    def cached_tokens(self) -> int:
        return sum(pair.on.cached_tokens for pair in self.pairs)

    @property
    def generated_tokens(self) -> int:
        return sum(len(pair.on.tokens) for pair in self.pairs)

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def logit_difference(self) -> float:
        return max(pair.logit_difference for pair in self.pairs)

    @property
    def margin(self) -> float:
        return min(pair.margin for pair in self.pairs)

    def ttft_s(self, percentile: float) -> tuple[float, float]:
        """Time to first token without and with the cache."""
        off, on = np.percentile([(pair.off.ttft_s, pair.on.ttft_s) for pair in self.pairs], percentile, axis=0)
        return float(off), float(on)

    def total_s(self) -> tuple[float, float]:
        """Time spent serving all requests, without and with the cache."""
        off = sum(pair.off.ttft_s + pair.off.decode_s for pair in self.pairs)
        on = sum(pair.on.ttft_s + pair.on.decode_s for pair in self.pairs)
        return off, on


@dataclass(frozen=True)
class CurvePoint:
    """TTFT of prompts of one length of which so many tokens were cached."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # median


def serve_off_and_on(
    model: Llama,
    turns: Sequence[Conversation],
    new_tokens: int,
    hbm_blocks: int,
    dram_blocks: int,
    progress: Callable[[Pair], None],
) -> Comparison:
    """Serves each turn without and with the cache, one after the other, so that a busy machine disturbs both alike.

    The two engines have a pool each. A turn's prompt contains the answers of the turns before it, as the engine
    without the cache gave them.
    """
    layout = kv_layout(model.config)
    with (
        kvpool.Pool(layout, hbm_blocks=hbm_blocks, dram_blocks=0, device="cpu") as pool_off,
        kvpool.Pool(layout, hbm_blocks=hbm_blocks, dram_blocks=dram_blocks, device="cpu") as pool_on,
    ):
        engine_off, engine_on = Engine(model, pool_off, cache=False), Engine(model, pool_on)
        warm_up(engine_off)
        pairs = []
        for number, conversation in enumerate(turns):
            prompt = conversation.prompt()
            if number % 2:  # the second one finds the weights in the CPU's cache
                on = engine_on.serve(prompt, new_tokens)
                off = engine_off.serve(prompt, new_tokens)
            else:
                off = engine_off.serve(prompt, new_tokens)
                on = engine_on.serve(prompt, new_tokens)
            conversation.answered(off.tokens)
            pairs.append(Pair(off, on))
            progress(pairs[-1])
        pool_on.audit()
        return Comparison(pairs, pool_on.stats())


def ttft_curve(
    model: Llama,
    lengths: Sequence[int],
    seed: int,
    progress: Callable[[], None],
) -> list[CurvePoint]:
    """TTFT of prompts with 0, 1/4, 1/2, 3/4 and all but the last block cached.

    Lengths are in tokens, multiples of a block. Calls `progress` after each of the `curve_requests(lengths)` requests.
    """
    size = model.config.block_tokens
    rng = np.random.default_rng(seed)

    def text(tokens: int) -> Tokens:
        return rng.integers(0, 256, tokens, dtype=np.int32)  # the time does not depend on what a prompt says

    points = []
    for length in lengths:
        blocks = length // size
        cached_blocks = [*(blocks * share // (_CURVE_SHARES - 1) for share in range(_CURVE_SHARES - 1)), blocks - 1]
        repeats = _curve_repeats(length)
        # Room for every request of this length, so that nothing is evicted meanwhile.
        hbm_blocks = (1 + len(cached_blocks) * repeats) * (blocks + 1)
        with kvpool.Pool(kv_layout(model.config), hbm_blocks=hbm_blocks, dram_blocks=0, device="cpu") as pool:
            engine = Engine(model, pool)
            known = text(length)
            engine.serve(known, 1)
            times: list[list[float]] = [[] for _ in cached_blocks]
            for _ in range(repeats):
                for cached, samples in zip(cached_blocks, times, strict=True):
                    prompt = np.concatenate([known[: cached * size], text(length - cached * size)])
                    served = engine.serve(prompt, 1)
                    if served.cached_tokens != cached * size:
                        raise AssertionError(f"{served.cached_tokens} tokens cached, not {cached * size}")
                    samples.append(served.ttft_s)
                    progress()
        points += [
            CurvePoint(length, cached * size, float(np.median(samples)))
            for cached, samples in zip(cached_blocks, times, strict=True)
        ]
    return points


def curve_requests(lengths: Sequence[int]) -> int:
    return sum(_CURVE_SHARES * _curve_repeats(length) for length in lengths)


def warm_up(engine: Engine) -> None:
    """The first call of a kernel is slow; nobody's TTFT should pay for it."""
    engine.serve(np.arange(100, dtype=np.int32), 2)


def use_one_thread() -> None:
    """A tile's matrices are small. Threads would wait for each other more than they compute, on a busy machine much."""
    torch.set_num_threads(1)


def _curve_repeats(length: int) -> int:
    return 3 if length > 512 else 7  # short prompts cost little and their times scatter more
