"""Figure 10 of the MemServe paper: the cost of the index for an uncached prompt, radix tree against hash.

Ours: match, alloc, insert and the release of the pins. vLLM's: hash the blocks, look them up, allocate, cache. The
lowest line of any chain of hashes in Python is drawn too: SHA-256 of each block's bytes and the hash before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import kvpool
from bench import plots
from bench.context import Context
from bench.measure import interleave, time_calls
from bench.result import Report, Row
from bench.workload import BLOCK_TOKENS, random_tokens

TITLE = "MemServe Fig 10: time in the index for a prompt that is not cached, radix tree against hash chain"
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768)
_HASHES = ("sha256", "xxhash")
_ROUNDS = 3
_VLLM = "vLLM"


class Subject:
    """kvpool's answers; see bench/remote.py."""

    def __init__(self) -> None:
        self._pool = kvpool.Pool(kvpool.RawLayout(block_bytes=64), hbm_blocks=200_000)

    def cache_prompt(self, tokens: int, n: int, seed: int, lists: bool) -> list[float]:
        """Everything that the pool does for a prompt of which nothing is cached."""
        prompts: list[Any] = [random_tokens(seed + i, tokens) for i in range(n)]
        times = time_calls(self._admit, [prompt.tolist() for prompt in prompts] if lists else prompts)
        self._pool.evict(self._pool.stats().hbm.historical, kvpool.HBM)
        return times

    def _admit(self, tokens: Any) -> None:
        with self._pool.match(tokens) as hit:
            addrs = self._pool.alloc((len(tokens) - hit.tokens) // BLOCK_TOKENS)
        self._pool.insert(tokens, addrs).close()

    def hash_chain(self, tokens: int, n: int, seed: int) -> list[float]:
        """SHA-256 of each block and the hash before it."""
        prompts = [random_tokens(seed + i, tokens).tobytes() for i in range(n)]
        return time_calls(_hash_chain, prompts)


def _hash_chain(tokens: bytes) -> list[bytes]:
    size = 4 * BLOCK_TOKENS
    chain, digest = [], b""
    for start in range(0, len(tokens), size):
        digest = hashlib.sha256(digest + tokens[start : start + size]).digest()
        chain.append(digest)
    return chain


def run(context: Context) -> Report:
    report = Report()
    lines: dict[str, list[float]] = {}
    lengths = _LENGTHS[: context.pick(5, len(_LENGTHS))]
    with context.subjects(__name__, _VLLM) as subjects:
        own, vllm = subjects["kvpool"], subjects.get(_VLLM)
        for tokens in lengths:
            n = max(5, min(context.pick(7, 40), 400_000 // tokens))
            ask: dict[str, Any] = {"tokens": tokens, "n": n, "seed": tokens}
            calls = {
                "kvpool": partial(own.ask, "cache_prompt", lists=False, **ask),
                "kvpool, a list of ints": partial(own.ask, "cache_prompt", lists=True, **ask),
                "SHA-256 chain alone": partial(own.ask, "hash_chain", **ask),
            }
            if vllm is not None:
                for algorithm in _HASHES:
                    calls[f"vLLM {algorithm}"] = partial(vllm.ask, "cache_prompt", algorithm=algorithm, **ask)
                    calls[f"vLLM {algorithm}, hash alone"] = partial(
                        vllm.ask, "hash_prompt", algorithm=algorithm, **ask
                    )
            medians = {name: sample.median_us for name, sample in interleave(calls, _ROUNDS).items()}
            for name, median_us in medians.items():
                lines.setdefault(name, []).append(median_us)
            report.rows.append(
                Row(
                    what=f"prompt of {tokens:,} tokens, nothing cached",
                    value=medians.pop("kvpool"),
                    peers=medians,
                    details={"tokens": tokens},
                )
            )
    report.series = {"prompt_tokens": list(lengths), "median_us": lines}
    title = "Time in the index for a prompt that is not cached (MemServe, Fig 10)"
    report.plots += plots.draw(context.out / "fig10.png", title, partial(_paint, lengths=lengths, lines=lines))
    report.notes.append(
        "kvpool: match, alloc, insert, release. vLLM: hash, look up, allocate, cache; its prompts are lists."
    )
    return report


def _paint(axes: Any, lengths: Sequence[int], lines: dict[str, list[float]]) -> None:
    for name, medians in lines.items():
        style = "-" if name == "kvpool" or name.endswith(_HASHES) else "--"
        axes.plot(lengths, medians, marker="o", linestyle=style, label=name)
    plots.mark_counts(axes, lengths)
    axes.set_yscale("log")
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("time in the index (us, median)")
    axes.legend(frameon=False, fontsize=8)
