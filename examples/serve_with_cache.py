"""The demo: a small Llama serves agent prompts from kvpool, with the prompt cache off and on.

    python examples/serve_with_cache.py [--quick] [--requests N] [--seed N] [--no-plot] [--json]

Exits with 1 when the cache changed a single generated token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comparison import Comparison, CurvePoint, Pair
    from llama import Llama
    from prompts import Conversation
    from rich.console import Console

_NEW_TOKENS = 12
# HBM holds one agent and its conversations, not four: prefixes must go to DRAM and come back. Both tiers together are
# less than all that is cached in the run, so in the end something is dropped for good.
_HBM_BLOCKS = 192
_DRAM_BLOCKS = 256
_PLOT = Path("build/demo/ttft_vs_cached.png")


def main() -> int:
    arguments = _arguments()
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        return _explain_missing(error)
    console = Console(quiet=arguments.json, highlight=False)
    console.print("\n[bold]kvpool demo[/bold]: what a prompt cache does for a language model\n")
    started = time.perf_counter()
    try:
        with console.status("loading PyTorch"):  # takes seconds; the first line should not wait for it
            from comparison import use_one_thread
            from llama import Llama, LlamaConfig
            from prompts import load_corpus, schedule
            from serving import kv_layout
            from show import as_json, blocks_table, results_table, verdict
    except ModuleNotFoundError as error:
        return _explain_missing(error)

    config = LlamaConfig()
    corpus = load_corpus()
    turns = schedule(corpus, arguments.requests, arguments.seed)
    lengths = () if arguments.no_plot else (256, 512, 1024) if arguments.quick else (256, 512, 1024, 2048)
    use_one_thread()
    block_kib = kv_layout(config).block_bytes / 1024
    console.print(
        f"  [dim]model[/dim]    Llama, {config.layers} layers, {config.parameters / 1e6:.1f} M parameters, "
        "float32 on one CPU thread\n"
        f"  [dim]pool[/dim]     {_HBM_BLOCKS} blocks of HBM (ordinary memory here), {_DRAM_BLOCKS} of DRAM:\n"
        f"           too few for all prefixes, so blocks move; {config.block_tokens} tokens, {block_kib:.0f} KiB each\n"
        f"  [dim]prompts[/dim]  {len(turns)} requests of {len(corpus.agents)} agents that answer questions;\n"
        f"           {corpus.source}\n"
    )
    console.print(
        "Each request is served twice, without and with the cache. Attention reads K\n"
        "and V out of the pool's blocks. The weights are random, so the answers mean\n"
        "nothing; the computation and its cache are real.\n"
    )
    result, points = _measure(console, Llama(config, seed=0), turns, lengths, arguments.seed)

    console.print(results_table(result))
    console.print(blocks_table(result))
    console.print()
    console.print(verdict(result), soft_wrap=not console.is_terminal)
    console.print()
    if points:
        _plot(console, points)
    elapsed = time.perf_counter() - started
    if arguments.json:
        setup: dict[str, Any] = {
            "prompts": corpus.source,
            "seed": arguments.seed,
            "threads": 1,
            "new_tokens": _NEW_TOKENS,
            "block_tokens": config.block_tokens,
            "elapsed_s": elapsed,
        }
        print(json.dumps(as_json(result, points, setup), indent=2))
    console.print(
        f"[dim]{elapsed:.0f} s in all.[/dim] Next:\n"
        "  examples/serving.py   how an engine uses kvpool, in one page\n"
        "  make bench            how fast the pool and its index are\n"
        "  kvpool info           what this machine offers, and all settings\n"
    )
    return 1 if result.different else 0


def _measure(
    console: Console, model: Llama, turns: list[Conversation], lengths: tuple[int, ...], seed: int
) -> tuple[Comparison, list[CurvePoint]]:
    from comparison import curve_requests, serve_off_and_on, ttft_curve
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        stream = progress.add_task("serving requests", total=len(turns), note="")
        curve = progress.add_task("TTFT by cached share", total=curve_requests(lengths), note="", visible=False)

        def served(pair: Pair) -> None:
            note = f"TTFT {1000 * pair.off.ttft_s:.0f} ms off, [green]{1000 * pair.on.ttft_s:.0f} ms on[/green]"
            progress.update(stream, advance=1, note=note)

        result = serve_off_and_on(model, turns, _NEW_TOKENS, _HBM_BLOCKS, _DRAM_BLOCKS, served)
        progress.update(curve, visible=bool(lengths))
        points = ttft_curve(model, lengths, seed, lambda: progress.advance(curve))
    return result, points


def _plot(console: Console, points: list[CurvePoint]) -> None:
    from show import save_plot

    longest = [point for point in points if point.prompt_tokens == max(point.prompt_tokens for point in points)]
    cold, hot = longest[0], longest[-1]
    console.print(
        f"First token of a prompt of {cold.prompt_tokens:,}: after {1000 * cold.ttft_s:.0f} ms when nothing is "
        "cached,\n"
        f"[green]{1000 * hot.ttft_s:.1f} ms[/green] when all but {hot.prompt_tokens - hot.cached_tokens} tokens are."
    )
    try:
        with console.status("drawing the plot"):
            save_plot(points, _PLOT)
        console.print(f"Plot of TTFT against the cached share: [bold]{_PLOT}[/bold]\n")
    except ModuleNotFoundError:
        console.print("For a plot of this, install matplotlib.\n")


def _arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        number = int(text)
        if number < 1:
            raise argparse.ArgumentTypeError(f"{number} is not positive")
        return number

    parser = argparse.ArgumentParser(description="Serve prompts with kvpool's prompt cache off and on, and compare.")
    parser.add_argument("--requests", type=positive, help="how many requests to serve (default 40; with --quick 20)")
    parser.add_argument("--seed", type=int, default=0, help="which questions, in which order (default 0)")
    parser.add_argument("--quick", action="store_true", help="half the requests, shorter prompts in the plot")
    parser.add_argument("--no-plot", action="store_true", help="do not measure and plot TTFT by cached share")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args()
    arguments.requests = arguments.requests or (20 if arguments.quick else 40)
    return arguments


def _explain_missing(error: ModuleNotFoundError) -> int:
    hint = "`make demo` installs all it needs; by hand: pip install '.[demo]' torch"
    print(f"The demo needs {error.name}. {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
