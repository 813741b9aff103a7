"""The cost of match grows with the prompt, not with the tree; and the memory that the index takes for a token."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.measure import summarize
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.workload import Prompts

TITLE = "Scale: match against the size of the tree, and memory a token"
_BYTES_TARGET = 6.0
_ROUNDS = 3


def run(context: Context) -> Report:
    report = Report()
    long_sizes = (1, 1000, context.pick(10_000, 100_000))
    short_sizes = (1, 1000, *((20_000,) if context.quick else (100_000, 1_000_000)))
    lines: dict[str, list[dict[str, Any]]] = {}
    for shape, sizes in ((Prompts(4096, 2048), long_sizes), (Prompts(512, 256), short_sizes)):
        with Remote("bench.api.index_subject") as tree:
            tree.ask("build", kind="index", prompts=1, tokens=shape.tokens, shared=shape.shared)
            line = []
            for prompts in sizes:
                tree.ask("grow", prompts=prompts)
                row = _match_row(context, tree, shape, prompts)
                report.rows.append(row)
                line.append({"prompts": prompts, "median_us": row.value, "p99_us": row.p99})
            lines[str(shape.tokens)] = line
            report.rows += _memory_rows(tree, shape, sizes[-1])
    report.series = {"match_us_by_prompt_tokens": lines}
    title = "match of a random prompt against the size of the tree"
    report.plots += plots.draw(context.out / "scale.png", title, partial(_paint, lines=lines))
    report.notes.append(
        "The prompts that are asked for are new arrays each time. A larger tree does not fit the CPU's caches: the "
        "time of a memory access grows, not their number."
    )
    return report


def _match_row(context: Context, tree: Remote, shape: Prompts, prompts: int) -> Row:
    times: list[float] = []
    for seed in range(_ROUNDS):
        times += tree.ask("collect_random", n=context.pick(200, 1000), seed=seed)
    what = f"match of {shape.tokens:,} tokens, random prompt of {prompts:,}"
    return timed_row(what, {"kvpool": summarize(times)}, prompts=prompts, tokens=shape.tokens)


def _memory_rows(tree: Remote, shape: Prompts, prompts: int) -> list[Row]:
    memory = tree.ask("memory")
    target = _BYTES_TARGET if shape.tokens == 4096 else None
    return [
        Row(
            what=f"memory a stored token, {prompts:,} prompts of {shape.tokens:,}, {how}",
            value=memory[field] / memory["tokens"],
            unit="B",
            target=target,
            details=memory,
        )
        for how, field in (("growth of the process", "resident_bytes"), ("by its own account", "reported_bytes"))
    ]


def _paint(axes: Any, lines: dict[str, list[dict[str, Any]]]) -> None:
    for tokens, line in lines.items():
        sizes = [point["prompts"] for point in line]
        axes.plot(sizes, [point["median_us"] for point in line], marker="o", label=f"prompts of {int(tokens):,} tokens")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompts in the tree")
    axes.set_ylabel("match and addresses (us, median)")
    axes.legend(frameon=False)
