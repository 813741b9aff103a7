"""Two instances of one model with different ranks, each rank a process; one sends the other a prompt.

The scheduler of an instance has one index and one allocator. Its ranks hold their layers and heads of every block under
the same block number. When a prompt goes to the other instance, the ranks send their parts to its ranks directly: the
schedulers only say which blocks.

    python examples/logical_instances.py --prefill 4x1 --decode 2x2
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool import KVLayout, ParallelConfig, Pool, RankArena

PROMPT_BLOCKS = 8


def configuration(text: str) -> ParallelConfig:
    """Reads "TPxPP", such as 4x2."""
    tp, _, pp = text.partition("x")
    return ParallelConfig(int(tp), int(pp or 1))


def computed(layout: KVLayout, blocks: int, seed: int) -> npt.NDArray[Any]:
    """What a model would have computed for these blocks, all layers and heads: every process can make it for itself."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (blocks, *layout.shape), np.uint16)


def worker(ticket: str, layout: KVLayout, pipe: Connection) -> None:
    """A rank: computes its part of blocks, or checks its part, on request."""
    with RankArena.join(ticket) as rank:
        kv = rank.tensor().numpy()
        pipe.send(repr(rank))
        while (order := pipe.recv()) is not None:
            what, blocks, seed = order
            part = computed(layout, len(blocks), seed)[rank.slice.index]
            if what == "compute":
                kv[blocks] = part
            pipe.send(bool((kv[blocks] == part).all()))


class Instance:
    """A scheduler in this process, and its ranks in others."""

    def __init__(self, name: str, layout: KVLayout, parallel: ParallelConfig, blocks: int) -> None:
        self.pool = Pool(layout, hbm_blocks=blocks, parallel=parallel, name=name)
        spawn = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for part in parallel.slices(layout):
            if part.layout is None:
                continue  # a stage without layers has nothing to hold
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=worker, args=(self.pool.ranks.export(part.rank), layout, theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.pool.ranks.wait(60)
        for pipe in self.pipes:
            print(f"  {pipe.recv()}")

    def all_ranks(self, what: str, addrs: npt.NDArray[np.uint64], seed: int) -> bool:
        """Tells every rank, and waits until all have done it."""
        for pipe in self.pipes:
            pipe.send((what, kvpool.block_ids(addrs), seed))
        answers = [pipe.recv() for pipe in self.pipes]
        return all(answers)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
        self.pool.close()


def serve(prefill: Instance, decode: Instance, say: Callable[[str], None]) -> bool:
    """A prompt is computed at one instance, moved with its KV, found at the other, and extended there."""
    layout = prefill.pool.kv_layout
    tokens = np.arange(PROMPT_BLOCKS * layout.block_tokens, dtype=np.int32)
    addrs = prefill.pool.alloc(PROMPT_BLOCKS)
    prefill.all_ranks("compute", addrs, seed=1)

    moved = prefill.pool.transfer_with_insert("decode", tokens, addrs, private=b"request 1")
    moved.wait(30)
    stats = moved.stats
    say(f"prefill -> decode: {stats.blocks} blocks, {stats.bytes / 1e6:.1f} MB in {stats.calls} calls, "
        f"{stats.total_us / 1e3:.2f} ms")  # fmt: skip

    with decode.pool.match(tokens) as hit:
        right = hit.tokens == len(tokens) and decode.all_ranks("look", hit.addrs, seed=1)
        say(f"decode: {hit.tokens} of {len(tokens)} tokens cached; every rank has its part: {right}")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefill", type=configuration, default="4x1", metavar="TPxPP")
    parser.add_argument("--decode", type=configuration, default="2x2", metavar="TPxPP")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    arguments = parser.parse_args()

    layout = KVLayout(arguments.layers, arguments.kv_heads, head_dim=64, dtype="bfloat16", block_tokens=16)
    print("prefill:")
    prefill = Instance("prefill", layout, arguments.prefill, blocks=4 * PROMPT_BLOCKS)
    print("decode:")
    decode = Instance("decode", layout, arguments.decode, blocks=4 * PROMPT_BLOCKS)
    prefill.pool.peers.connect(decode.pool.peers.listen("unix:@kvpool-example-" + decode.processes[0].name))
    right = serve(prefill, decode, print)
    prefill.close()
    decode.close()
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
