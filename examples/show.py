"""Presents the demo's figures: tables for the terminal, a plot, JSON."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import Comparison, CurvePoint
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_BAR_CELLS = 32


def results_table(result: Comparison) -> RenderableType:
    """What a user of the engine notices: off, on, and the gain."""
    table = Table(box=box.SIMPLE_HEAD, title=None, padding=(0, 2), header_style="bold")
    table.add_column("")
    table.add_column("cache off", justify="right")
    table.add_column("cache on", justify="right", style="green")
    table.add_column("", style="bold green")
    prefilled = result.prompt_tokens - result.cached_tokens
    table.add_row("prompt tokens", f"{result.prompt_tokens:,}", f"{result.prompt_tokens:,}", "")
    table.add_row("  found in the cache", "-", f"{result.cached_tokens:,}", f"{result.hit_ratio:.1%} hit ratio")
    table.add_row("  prefilled", f"{result.prompt_tokens:,}", f"{prefilled:,}", f"{result.cached_tokens:,} saved")
    for name, percentile in (("TTFT p50", 50.0), ("TTFT p99", 99.0)):
        off, on = result.ttft_s(percentile)
        table.add_row(name, _milliseconds(off), _milliseconds(on), _gain(off, on))
    off, on = result.total_s()
    table.add_row("time for all requests", f"{off:.1f} s", f"{on:.1f} s", _gain(off, on))
    return table


def blocks_table(result: Comparison) -> RenderableType:
    """What the pool did behind it: where the cached blocks are, and how they moved."""
    stats = result.stats
    table = Table(box=None, padding=(0, 2), show_header=False)
    for name, medium in (("HBM", stats.hbm), ("DRAM", stats.dram)):
        filled = round(_BAR_CELLS * medium.historical / medium.capacity)
        bar = Text("█" * filled, style="cyan") + Text("░" * (_BAR_CELLS - filled), style="dim")
        table.add_row(name, bar, f"{medium.historical} of {medium.capacity} blocks cached")
    moves = Text.assemble(
        "  ",
        (f"{stats.swapped_out_blocks:,}", "bold"),
        " swapped out to DRAM, ",
        (f"{stats.swapped_in_blocks:,}", "bold"),
        " swapped back in, ",
        (f"{stats.evicted_blocks:,}", "bold"),
        " evicted for good",
    )
    return Group(table, moves)


def verdict(result: Comparison) -> Text:
    """Whether the cache changed what the model says."""
    count = len(result.pairs)
    if result.different:
        numbers = ", ".join(map(str, result.different))
        return Text(
            f"Different tokens in {len(result.different)} of {count} requests (numbers {numbers}). This must not be: "
            f"logits differ by up to {result.logit_difference:.3g}, the closest choice was won by {result.margin:.3g}.",
            style="bold red",
        )
    difference = result.logit_difference
    logits = "their logits agree bit for bit" if difference == 0 else f"their logits differ by at most {difference:.2g}"
    return Text.assemble(
        ("Same tokens", "bold green"),
        f": all {result.generated_tokens:,} generated tokens of {count} requests are identical with the cache off and "
        f"on; {logits} (the closest choice was won by {result.margin:.2g}).",
    )


def save_plot(points: Sequence[CurvePoint], path: Path) -> None:
    """TTFT against the cached share of the prompt, one line a prompt length (Fig. 13 of the MemServe paper)."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces on the screen that it looks for fonts
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    lengths = sorted({point.prompt_tokens for point in points}, reverse=True)
    for number, length in enumerate(lengths):
        line = [point for point in points if point.prompt_tokens == length]
        axes.plot(
            [100 * point.cached_tokens / length for point in line],
            [1000 * point.ttft_s for point in line],
            color=colormaps["viridis"](0.85 * number / max(1, len(lengths) - 1)),
            marker="o",
            clip_on=False,
            label=f"{length:,} tokens",
        )
    axes.set_title("The more of a prompt is cached, the sooner its first token comes", loc="left", fontsize=11)
    axes.set_xlabel("cached share of the prompt (%)")
    axes.set_ylabel("time to first token (ms)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-2, 102)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="prompt", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def as_json(result: Comparison, points: Sequence[CurvePoint], setup: dict[str, Any]) -> dict[str, Any]:
    """All figures, for programs. Times in seconds, (off, on) where there are two."""
    stats = result.stats
    return {
        "setup": setup,
        "same_tokens": not result.different,
        "different_requests": result.different,
        "logit_difference_max": result.logit_difference,
        "argmax_margin_min": result.margin,
        "requests": len(result.pairs),
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "generated_tokens": result.generated_tokens,
        "hit_ratio": result.hit_ratio,
        "ttft_p50_s": result.ttft_s(50),
        "ttft_p99_s": result.ttft_s(99),
        "total_s": result.total_s(),
        "hbm_blocks": {"capacity": stats.hbm.capacity, "cached": stats.hbm.historical, "free": stats.hbm.free},
        "dram_blocks": {"capacity": stats.dram.capacity, "cached": stats.dram.historical, "free": stats.dram.free},
        "swapped_out_blocks": stats.swapped_out_blocks,
        "swapped_in_blocks": stats.swapped_in_blocks,
        "evicted_blocks": stats.evicted_blocks,
        "curve": [
            {"prompt_tokens": point.prompt_tokens, "cached_tokens": point.cached_tokens, "ttft_s": point.ttft_s}
            for point in points
        ],
    }


def _gain(off: float, on: float) -> str:
    return f"{off / on:.1f}x faster" if off > 1.05 * on else "cold: not cached yet"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
