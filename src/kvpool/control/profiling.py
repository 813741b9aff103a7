"""Measures a model's operators on this machine, for the cost model (MemServe §5.3.2).

Each operator runs alone, on every length; whole prefills run too. How they are timed: control/timing.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpool.control.timing import Rank, SelfTimed, clock_of, machine_of, measure, rank_of
from kvpool.errors import ArgumentError
from kvpool.policy.cost import ModelShape, Profile, Sample, Work
from kvpool.pool import Pool
from kvpool.types import HBM, KVLayout

__all__ = ["load_profile", "profile_ops", "save_profile"]

_PREFILL = "prefill"  # beside the operators' names


class _Case(NamedTuple):
    """Something to measure. `run(i)` runs it; i counts up, so that each run may take other weights."""

    name: str
    work: Work
    run: Callable[[int], object]


def profile_ops(
    model: ModelShape,
    *,
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024),
    shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75),
    block_tokens: int = 16,
    units: int | None = None,
    rounds: int = 5,
    prefills: bool = True,
    torch: Any = None,
    device: str = "cpu",
) -> Profile:
    """Measures all operators of one rank, with NumPy on the CPU, or with the PyTorch that is given.

    Takes time: rounds * (all lengths, all shares) prefills and as much again for the operators alone.

    Args:
        model: Its operators. NumPy computes in float32 and float16.
        lengths: Of prompts, in tokens.
        shares: Of them that are cached: y.
        block_tokens: Tokens a block of KV.
        units: SMs or cores that compute; by default what the library says.
        rounds: How often everything is measured.
        prefills: Whole prefills too, for the architecture-level model.
        torch: The module `torch`, to measure with it.
        device: Where it computes.

    Raises:
        ArgumentError: No length, no round, or a share outside 0 to 1.
        Unsupported: The library does not compute in the model's dtype.
    """
    if not lengths or min(lengths) < 1 or not shares or not all(0 <= share < 1 for share in shares) or rounds < 1:
        raise ArgumentError(
            f"lengths {tuple(lengths)}, shares {tuple(shares)}, {rounds} rounds: there must be lengths from 1, "
            "shares from 0 to below 1, and a round"
        )
    rank = rank_of(model, max(lengths), block_tokens, torch, device)
    plan = [(x, _whole_blocks(x * share, block_tokens)) for x in lengths for share in shares]
    plan = sorted({(x, cached) for x, cached in plan if cached < x})
    units = units or rank.units()

    with ExitStack() as stack:
        cases = [*_operator_cases(rank, plan), *_swap_cases(stack, model, block_tokens, max(lengths))]
        if prefills:
            cases += _prefill_cases(rank, plan)
        times = measure([case.run for case in cases], rounds, clock_of(rank, units))
    operators: dict[str, list[Sample]] = {}
    for case, seconds in zip(cases, times, strict=True):
        operators.setdefault(case.name, []).append(Sample(case.work, seconds))
    whole = operators.pop(_PREFILL, [])
    machine = machine_of(rank, units, torch, device)
    return Profile(model, machine, block_tokens, operators, whole)


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes a profile as JSON."""
    Path(path).write_text(json.dumps(profile.as_json(), indent=1) + "\n")


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile and checks every field.

    Raises:
        ArgumentError: It is no JSON or no profile; the text names what is wrong.
        OSError: The file cannot be read.
    """
    try:
        return Profile.from_json(json.loads(Path(path).read_text()))
    except ValueError as error:
        raise ArgumentError(f"{os.fspath(path)}: {error}") from error


# ---- what is measured


def _operator_cases(rank: Rank, plan: Sequence[tuple[int, int]]) -> Iterator[_Case]:
    model, layers = rank.model, rank.model.layers
    news = sorted({x - cached for x, cached in plan})
    longest = max(x for x, _ in plan)
    stream = rank.normal(longest, model.hidden)
    ids = rank.ids(longest)
    projected = rank.qkv(0, stream)
    q, k, v = rank.rope(projected, 0)
    mixed = rank.attention(q, k, v, 0)
    gate_up = rank.gate_up(0, stream)
    hidden = rank.activation(gate_up)
    target = stream * 0
    for n in news:
        work = Work(n)
        yield _Case("qkv", work, _in_turn(layers, rank.qkv, stream[:n]))
        yield _Case("attn_out", work, _in_turn(layers, rank.attn_out, mixed[:n]))
        yield _Case("gate_up", work, _in_turn(layers, rank.gate_up, stream[:n]))
        yield _Case("down", work, _in_turn(layers, rank.down, hidden[:n]))
        yield _Case("embedding", work, _alone(rank.embedding, ids[:n]))
        yield _Case("norm", work, _in_turn(layers, rank.norm, stream[:n], 0))
        yield _Case("residual", work, _alone(rank.residual, target[:n], stream[:n]))
        yield _Case("rope", work, _alone(rank.rope, projected[:n], 0))
        yield _Case("activation", work, _alone(rank.activation, gate_up[:n]))
        yield _Case("kv_store", work, _in_turn(layers, rank.kv_store, k[:, :n], v[:, :n], 0))
    for x, cached in plan:
        work = Work(x - cached, cached, _blocks(x, rank.block_tokens))
        rows = rank.contiguous(q[:, :, cached:x])
        keys, values = rank.contiguous(k[:, :x]), rank.contiguous(v[:, :x])
        yield _Case("attention", work, _alone(rank.attention, rows, keys, values, cached))
    large = 4 * rank.block_tokens
    for x in sorted({x for x, _ in plan}):
        yield _Case("gather", Work(x, 0, _blocks(x, rank.block_tokens)), _in_turn(layers, rank.gather, x))
        if x % large == 0:  # so that what blocks cost and what tokens cost can be told apart
            yield _Case("gather", Work(x, 0, x // large), _in_turn(layers, rank.gather, x, large))
    for prompts in (1, 2, 4, 8):
        if prompts <= longest:
            yield _Case("lm_head", Work(prompts, 0, 0, prompts), _alone(rank.lm_head, stream[:prompts]))


def _alone(operator: Callable[..., object], *arguments: object) -> Callable[[int], object]:
    return lambda run: operator(*arguments)


def _in_turn(layers: int, operator: Callable[..., object], *arguments: object) -> Callable[[int], object]:
    """Each run takes the weights of the next layer: those of the last one may still be in the cache."""
    return lambda run: operator(run % layers, *arguments)


def _swap_cases(stack: ExitStack, model: ModelShape, block_tokens: int, longest: int) -> Iterator[_Case]:
    """Pool.swap_in of prompts, for blocks of two sizes."""
    for size in (block_tokens, 4 * block_tokens):
        layout = KVLayout(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            block_tokens=size,
        )
        counts = sorted({max(1, _blocks(longest, size) // part) for part in (8, 4, 2, 1)})
        room = counts[-1]
        pool = stack.enter_context(Pool(layout, hbm_blocks=room, dram_blocks=room))
        for blocks in counts:
            yield _Case("swap_in", Work(0, blocks * size, blocks), _SwapIn(pool, blocks, size))


class _SwapIn(SelfTimed):
    """Times Pool.swap_in alone: what has to be undone between two runs is not counted."""

    def __init__(self, pool: Pool, blocks: int, block_tokens: int) -> None:
        self._pool, self._blocks = pool, blocks
        self._tokens = np.arange(blocks * block_tokens, dtype=np.int32)

    def __call__(self, run: int) -> float:
        pool = self._pool
        pool.insert(self._tokens, pool.alloc(self._blocks, HBM)).close()
        pool.swap_out(self._blocks)
        with pool.match(self._tokens) as hit:
            start = perf_counter()
            pool.swap_in(hit.addrs).close()
            seconds = perf_counter() - start
        pool.delete(self._tokens)
        return seconds


def _prefill_cases(rank: Rank, plan: Sequence[tuple[int, int]]) -> Iterator[_Case]:
    ids = rank.ids(max(x for x, _ in plan))
    for x, cached in plan:
        work = Work(x - cached, cached, _blocks(x, rank.block_tokens))
        yield _Case(_PREFILL, work, _alone(rank.prefill, ids[:x], cached))


def _whole_blocks(tokens: float, block_tokens: int) -> int:
    return int(tokens) // block_tokens * block_tokens


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
