"""Measures what migration may use of links and of idle computation, for MELL's adaptive migration (§V).

Links are measured by transfers between connected pools, with the routes, secrets and hosts of the service. Computation
is measured by whole iterations on one rank, with random weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from kvpool.control.iteration import iterate
from kvpool.control.timing import clock_of, machine_of, measure, rank_of
from kvpool.errors import ArgumentError
from kvpool.policy.cost import ModelShape
from kvpool.policy.mell import BoundaryProfile, IterationSample, LinkSample
from kvpool.pool import Pool
from kvpool.types import HBM, Route

__all__ = ["MeasuredLink", "load_boundaries", "profile_boundaries", "save_boundaries"]


class MeasuredLink(NamedTuple):
    """A link between two pools.

    Attributes:
        pool: The sender, connected to the peer.
        peer: The peer's name, as `connect` returned it.
        route: The route of the blocks: "shm", "sock", ...; None for the one that transfers of this size take.
    """

    pool: Pool
    peer: str
    route: Route | None = None


def profile_boundaries(
    model: ModelShape,
    links: Mapping[str, MeasuredLink],
    *,
    blocks: Sequence[int] = (1, 4, 16, 64, 256),
    batches: Sequence[int] = (1, 4, 16, 64),
    tokens: Sequence[int] = (8, 32, 128, 512),
    context: int = 512,
    block_tokens: int = 16,
    units: int | None = None,
    rounds: int = 5,
    timeout: float = 30.0,
    torch: Any = None,
    device: str = "cpu",
) -> BoundaryProfile:
    """Measures the communication boundary of each link, and the computation boundary for each batch size.

    Measure while nothing else runs, because a boundary is the capacity of idle hardware. The links are measured first,
    one after another. The pools are unchanged afterwards, even after an error.

    Args:
        model: The model of the KV cache and of the iterations. NumPy computes in float32 and float16.
        links: By a name for their kind: "pcie", "network", ...
        blocks: Sizes of transfers; two or more, to separate latency from bandwidth. Sender and peer must have as many
            free blocks.
        batches: Numbers of requests that decode.
        tokens: Numbers of tokens that are prefilled at the same time; 0 is always measured too.
        context: Tokens of each request, and of the prompt whose end is prefilled; rounded up to whole blocks.
        block_tokens: Tokens a block of KV.
        units: SMs or cores that compute; by default as the library reports.
        rounds: How often everything is measured.
        timeout: Seconds for each transfer.
        torch: The module `torch`, to measure with it; NumPy otherwise.
        device: The device that computes.

    Raises:
        ArgumentError: Fewer than two sizes of transfers; no batch or number of tokens; anything below 1; more tokens
            than context.
        Unsupported: The library does not support the model's dtype; the pools do not have this route.
        PeerLost, OutOfBlocks, DeadlineExceeded: As `Pool.alloc` and `Pool.transfer` raise them.
    """
    sizes, batches, tokens = sorted(set(blocks)), sorted(set(batches)), sorted(set(tokens))
    if len(sizes) < 2 or not batches or not tokens or min(*sizes, *batches, *tokens, rounds, context, block_tokens) < 1:
        raise ArgumentError(
            f"transfers of {sizes} blocks, batches of {batches}, {tokens} tokens, {rounds} rounds, {context} tokens "
            f"of context in blocks of {block_tokens}: two sizes of transfers are needed, one of each other, all from 1"
        )
    context = -(-context // block_tokens) * block_tokens
    if tokens[-1] > context:
        raise ArgumentError(f"{tokens[-1]} tokens of a prompt of {context} cannot be prefilled: raise context")
    positions = max(batches[-1] * context, batches[-1] + tokens[-1])
    rank = rank_of(model, positions, block_tokens, torch, device)
    units = units or rank.units()
    carried = {name: _carried(link, sizes, rounds, timeout) for name, link in links.items()}
    plan = [(batch, count) for batch in batches for count in (0, *tokens)]
    ids = rank.ids(batches[-1] + tokens[-1])

    def iteration(batch: int, count: int) -> Callable[[int], object]:
        return lambda run: iterate(rank, ids[: batch + count], batch, context)

    times = measure([iteration(*each) for each in plan], rounds, clock_of(rank, units))
    iterations = tuple(IterationSample(*each, seconds) for each, seconds in zip(plan, times, strict=True))
    return BoundaryProfile(model, machine_of(rank, units, torch, device), context, carried, iterations)


def save_boundaries(profile: BoundaryProfile, path: str | os.PathLike[str]) -> None:
    """Writes a profile as JSON."""
    Path(path).write_text(json.dumps(profile.as_json(), indent=1) + "\n")


def load_boundaries(path: str | os.PathLike[str]) -> BoundaryProfile:
    """Reads a profile and checks every field.

    Raises:
        ArgumentError: It is no JSON or no such profile; the text names the error.
        OSError: The file cannot be read.
    """
    try:
        return BoundaryProfile.from_json(json.loads(Path(path).read_text()))
    except ValueError as error:
        raise ArgumentError(f"{os.fspath(path)}: {error}") from error


def _carried(link: MeasuredLink, sizes: Sequence[int], rounds: int, timeout: float) -> tuple[LinkSample, ...]:
    """Transfers of all sizes, into blocks that the peer lends for them."""
    pool, peer, route = link
    with ExitStack() as stack:
        own = pool.alloc(sizes[-1], HBM, evict=False)
        stack.callback(pool.free, own)
        lent = pool.alloc(sizes[-1], HBM, evict=False, instance=peer, timeout=timeout)
        stack.callback(pool.free, lent)

        def transfer(count: int) -> Callable[[int], object]:
            return lambda run: pool.transfer(peer, own[:count], to=lent[:count], route=route, timeout=timeout).wait()

        seconds = measure([transfer(count) for count in sizes], rounds, perf_counter)
    block_bytes = pool.kv_layout.block_bytes
    return tuple(LinkSample(count * block_bytes, each) for count, each in zip(sizes, seconds, strict=True))
