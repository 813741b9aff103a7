"""Swap as an application uses it: Pool.swap_out, Pool.swap_in, and both at once, with HBM on the GPU.

Blocks are scattered on both sides, so each is a separate piece. A time is from the call to the last byte, including the
work of the index and the allocator.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

import kvpool
from bench.measure import no_collections
from bench.workload import BLOCK_TOKENS, Tokens, random_tokens

PIECES = (16 << 10, 64 << 10, 256 << 10)
WAYS = ("device to pinned", "pinned to device", "both ways")  # as kvpool_gpu_bench names them
Rates = dict[str, list[float]]  # by way: GB/s over the bus, of each round
_STREAM = 2  # the thread's default one, which is idle: without a stream each direction would wait for the other


def rates(piece: int, quick: bool) -> Rates:
    """Of blocks of so many bytes. Raises what the pool raises."""
    blocks = ((64 << 20) if quick else (256 << 20)) // piece
    pool = kvpool.Pool(kvpool.RawLayout(block_bytes=piece), 2 * blocks, 2 * blocks, device="cuda:0")
    with pool, no_collections():
        return _rates_of(pool, piece, blocks, 5 if quick else 15)


def _rates_of(pool: kvpool.Pool, piece: int, blocks: int, rounds: int) -> Rates:
    tokens = [random_tokens(name, blocks * BLOCK_TOKENS) for name in range(2)]
    for number, medium in enumerate((kvpool.HBM, kvpool.DRAM)):
        taken = pool.alloc(2 * blocks, medium=medium)
        kept, free = taken[::2].copy(), taken[1::2]  # no two are neighbours
        np.random.default_rng(number).shuffle(kept)
        pool.insert(tokens[number], kept).close()
        pool.free(free)
    found: Rates = {way: [] for way in WAYS}
    for number in range(-2, rounds):  # two to warm up
        times = _round(pool, tokens, blocks, hot=number % 2)
        if number >= 0:
            for way, (time_ns, ways) in zip(WAYS, times, strict=True):
                found[way].append(ways * blocks * piece / time_ns)
    return found


def _round(pool: kvpool.Pool, tokens: list[Tokens], blocks: int, hot: int) -> list[tuple[int, int]]:
    """Nanoseconds and directions of each way. Prompt `hot` lies in HBM before, the other one after."""
    started = perf_counter_ns()
    moved = pool.swap_out(blocks, stream=_STREAM)
    out_ns = perf_counter_ns() - started
    started = perf_counter_ns()
    held = pool.swap_in(moved, stream=_STREAM)
    in_ns = perf_counter_ns() - started
    held.close()
    cold = pool.explain_match(tokens[1 - hot]).addrs
    started = perf_counter_ns()
    out = pool.swap_out(blocks, stream=_STREAM, wait=False)
    brought = pool.swap_in(cold, stream=_STREAM, wait=False)
    out.wait()
    brought.wait()
    both_ns = perf_counter_ns() - started
    brought.result.close()
    if not len(moved) == len(out.result) == len(cold) == blocks:
        raise AssertionError(f"{len(moved)} and {len(out.result)} blocks out, {len(cold)} in: not {blocks}")
    return [(out_ns, 1), (in_ns, 1), (both_ns, 2)]
