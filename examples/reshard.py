"""Sends blocks from an instance to one with other ranks, in one process.

Each rank has a pool, which holds its layers and heads of every block under the same block numbers. The plan says which
rank sends which part to which rank. Here NumPy carries it out, so that you can read and watch it; kvpool's routes
carry out the same plan between processes.

    python examples/reshard.py --from 8x1 --to 2x2 --kv-heads 4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.transfer.reshard import ParallelConfig, RankSlice, ReshardPlan, plan_reshard


def configuration(text: str) -> ParallelConfig:
    """Reads "TPxPP", such as 8x2."""
    tp, _, pp = text.partition("x")
    return ParallelConfig(int(tp), int(pp or 1))


def draw(plan: ReshardPlan) -> str:
    """What each rank holds and sends."""
    lines = [str(plan), ""]
    for slice_, sent in zip(plan.senders, plan.bytes_sent, strict=True):
        copy = f", copy {slice_.replica + 1} of {slice_.replicas}" if slice_.replicas > 1 else ""
        held = f"layers {list(slice_.layers)}, heads {list(slice_.heads)}{copy}" if slice_.layers else "no layers"
        lines.append(f"  sender rank {slice_.rank} holds {held}; sends {sent} bytes a block")
    return "\n".join(lines)


def pools_of(slices: Sequence[RankSlice], blocks: int) -> list[kvpool.Pool | None]:
    """A pool for each rank; none for a rank that holds no layer."""
    return [kvpool.Pool(slice_.layout, hbm_blocks=blocks) if slice_.layout else None for slice_ in slices]


def arrays_of(pools: Sequence[kvpool.Pool | None]) -> list[npt.NDArray[Any] | None]:
    return [None if pool is None else pool.tensor().numpy() for pool in pools]


def move(plan: ReshardPlan, blocks: int) -> bool:
    """Sends blocks between two instances of this process; True when every rank of the receiver has its part."""
    senders = arrays_of(pools_of(plan.senders, blocks))
    receivers = arrays_of(pools_of(plan.receivers, blocks))
    kv = np.random.default_rng(0).integers(0, 1 << 16, (blocks, *plan.layout.shape), np.uint16)
    for slice_, array in zip(plan.senders, senders, strict=True):
        if array is not None:
            array[:] = kv[slice_.index]

    there = np.random.default_rng(1).permutation(blocks)  # the receiver's blocks have other numbers
    plan.apply(senders, receivers, range(blocks), there)
    return all(
        array is None or bool((array[there] == kv[slice_.index]).all())
        for slice_, array in zip(plan.receivers, receivers, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--from", dest="sender", type=configuration, default="4x1", metavar="TPxPP")
    parser.add_argument("--to", dest="receiver", type=configuration, default="2x2", metavar="TPxPP")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=16)
    arguments = parser.parse_args()

    layout = kvpool.KVLayout(arguments.layers, arguments.kv_heads, head_dim=64, dtype="bfloat16", block_tokens=16)
    plan = plan_reshard(layout, arguments.sender, arguments.receiver)
    print(draw(plan))
    right = move(plan, arguments.blocks)
    print(f"\n{arguments.blocks} blocks moved; every rank has its part: {right}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
