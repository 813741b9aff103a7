"""Figure 9 of the MemServe paper: the latency of the APIs.

(a) Memory APIs against the number of blocks. (b) insert and match against the share of the prompt that is cached, for
prompts of several lengths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import kvpool
from bench import plots
from bench.context import Context
from bench.measure import summarize, time_calls
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.workload import BLOCK_TOKENS, Tokens, random_tokens

TITLE = "MemServe Fig 9: API latency against the number of blocks and the cached ratio"
_COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
_PROMPT_BLOCKS = (64, 256, 1024)
_RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TABLE_RATIOS = (0.0, 0.5, 1.0)  # the others are in the plot and the JSON
_CAPACITY = 200_000  # that of bench/api/alloc.py
_PAPER_BLOCK_US = 0.8  # "roughly 800 ns per block"


class Subject:
    """kvpool's answers; see bench/remote.py."""

    def __init__(self) -> None:
        self._pool = kvpool.Pool(kvpool.RawLayout(block_bytes=64), hbm_blocks=500_000)
        self._seed = 0

    def insert_match(self, blocks: int, cached_blocks: int, n: int) -> list[list[float]]:
        """Times of matching, then inserting, n prompts of which the first blocks are cached."""
        prompts = [random_tokens(self._seed + number, blocks * BLOCK_TOKENS) for number in range(n)]
        self._seed += n
        if cached_blocks:
            for tokens in prompts:
                cached = tokens[: cached_blocks * BLOCK_TOKENS]
                self._pool.insert(cached, self._pool.alloc(cached_blocks)).close()
        match_us = time_calls(self._match, prompts)
        addrs = np.split(self._pool.alloc(n * blocks), n)
        insert_us = time_calls(self._insert, list(zip(prompts, addrs, strict=True)))
        self._pool.evict(self._pool.stats().hbm.historical, kvpool.HBM)
        return [match_us, insert_us]

    def _match(self, tokens: Tokens) -> None:
        with self._pool.match(tokens) as hit:
            _ = hit.addrs

    def _insert(self, prompt: tuple[Tokens, Any]) -> None:
        self._pool.insert(*prompt, free_duplicates=True).close()


def run(context: Context) -> Report:
    report = Report()
    memory = _memory(context, report)
    index = _index(context, report)
    report.series = {
        "blocks": list(_COUNTS),
        "memory_us": memory,
        "cached_ratio": list(_RATIOS),
        "index_us_by_blocks": index,
    }
    title = "API latency (MemServe, Fig 9)"
    paint = (partial(_paint_memory, lines=memory), partial(_paint_index, lines=index))
    report.plots += plots.draw(context.out / "fig9.png", title, *paint)
    report.notes.append(
        "The paper, on its own machine: about 800 ns a block for memory APIs, at most 700 us to insert 256 blocks."
    )
    return report


def _memory(context: Context, report: Report) -> dict[str, list[float]]:
    """Median times of alloc and free, one list a line of the plot."""
    lines: dict[str, list[float]] = {}
    with context.subjects("bench.api.alloc", "vLLM") as subjects:
        for blocks in _COUNTS:
            n = context.pick(100, 1000) // (4 if blocks > 1000 else 1)
            medians: dict[str, dict[str, float]] = {"alloc": {}, "free": {}}
            for name, remote in subjects.items():
                for what, times in zip(
                    medians, remote.ask("alloc_free", blocks=blocks, n=n, capacity=_CAPACITY), strict=True
                ):
                    medians[what][name] = summarize(times).median_us
                    lines.setdefault(f"{name} {what}", []).append(medians[what][name])
            for what, by_name in medians.items():
                own = by_name.pop("kvpool")
                report.rows.append(Row(what=f"{what} of {blocks:,} blocks", value=own, peers=by_name))
    return lines


def _index(context: Context, report: Report) -> dict[str, dict[str, list[float]]]:
    """Median times of match and insert: by what was called, by blocks of the prompt, a list over the ratios."""
    lines: dict[str, dict[str, list[float]]] = {"match": {}, "insert": {}}
    with Remote(__name__) as subject:
        for blocks in _PROMPT_BLOCKS:
            for ratio in _RATIOS:
                n = context.pick(30, 150)
                both = subject.ask("insert_match", blocks=blocks, cached_blocks=round(ratio * blocks), n=n)
                for what, times in zip(lines, both, strict=True):
                    sample = summarize(times)
                    lines[what].setdefault(str(blocks), []).append(sample.median_us)
                    if ratio in _TABLE_RATIOS:
                        label = f"{what}, {blocks:,} blocks, {ratio:.0%} cached"
                        report.rows.append(timed_row(label, {"kvpool": sample}))
    return lines


def _paint_memory(axes: Any, lines: dict[str, list[float]]) -> None:
    for label, medians in lines.items():
        axes.plot(_COUNTS, medians, marker="o", linestyle="-" if label.startswith("kvpool") else "--", label=label)
    axes.plot(
        _COUNTS,
        [_PAPER_BLOCK_US * count for count in _COUNTS],
        color="grey",
        linestyle=":",
        label="the paper: 0.8 us a block",
    )
    plots.mark_counts(axes, _COUNTS)
    axes.set_yscale("log")
    axes.set_xlabel("blocks")
    axes.set_ylabel("time of a call (us, median)")
    axes.set_title("(a) memory APIs", loc="left", fontsize=10)
    axes.legend(frameon=False)


def _paint_index(axes: Any, lines: dict[str, dict[str, list[float]]]) -> None:
    for what, style in (("insert", "-"), ("match", "--")):
        for number, (blocks, medians) in enumerate(lines[what].items()):
            axes.plot(
                [100 * ratio for ratio in _RATIOS],
                medians,
                marker="o",
                linestyle=style,
                color=plots.shade(number, len(lines[what])),
                label=f"{what}, {int(blocks):,} blocks",
            )
    axes.set_yscale("log")
    axes.set_xlabel("cached share of the prompt (%)")
    axes.set_ylabel("time of a call (us, median)")
    axes.set_title("(b) index APIs", loc="left", fontsize=10)
    axes.set_ylim(top=4 * axes.get_ylim()[1])  # room for the legend
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center")
