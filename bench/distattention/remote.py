"""Figure 12 of Infinite-LLM: remote compute against local compute, measured here between two processes.

Of a sequence half of the blocks lie with another process. Remote compute sends the query there (`where="there"`);
local compute fetches the blocks in each step and attends to them here. Both on CPUs of this machine, over shared
memory, where a fetch is as cheap as a copy: over a network it would cost more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import kvpool
from bench import plots
from bench.attention.peers import Split, in_turns
from bench.attention.shapes import BLOCK_TOKENS, HEADS, LAYOUT, filled_pool
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "Infinite-LLM Fig 12: remote compute against local compute, measured between two processes of this machine"
PEERS: tuple[str, ...] = ()


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report()
    lengths = (2048, 8192) if context.quick else (2048, 8192, 32_768, 65_536, 131_072)
    blocks = lengths[-1] // BLOCK_TOKENS
    points: list[dict[str, float]] = []
    with Remote("bench.attention.creditor") as creditor:
        address = creditor.ask("listen", name="creditor", layout=LAYOUT, blocks=blocks + 64, threads=1)
        settings = {"name": "borrower", "attend_threads": 1}
        with filled_pool(kvpool.KVLayout(**LAYOUT), 2 * blocks + 64, **settings) as here:
            here.peers.connect(address)
            for tokens in lengths:
                with report.guarded(f"{tokens:,} tokens"):
                    points.append(_point(here, tokens, context.pick(9, 40)))
        creditor.ask("close")
    for point in points:
        what = f"{point['tokens']:,} tokens: remote compute, times as fast as local compute"
        report.rows.append(Row(what, point["local_us"] / point["remote_us"], "x", 1.0, "higher", details=point))
    report.notes.append(
        f"bfloat16, {HEADS} query heads, {LAYOUT['kv_heads']} KV heads x {LAYOUT['head_dim']}; a layer."
    )
    report.series = {"points": points}
    paint = partial(_paint, points=points)
    report.plots += plots.draw(context.out / "dist-remote.png", "Remote and local compute, two processes", paint)
    return report


def _point(here: kvpool.Pool, tokens: int, rounds: int) -> dict[str, float]:
    split = Split(here, tokens)
    times = in_turns({"remote": lambda: split.step("there"), "local": split.fetch_step}, rounds)
    split.close()
    return {"tokens": tokens, "remote_us": 1e6 * times["remote"], "local_us": 1e6 * times["local"]}


def _paint(axes: Any, points: list[dict[str, float]]) -> None:
    lengths = [point["tokens"] for point in points]
    for number, key in enumerate(("local_us", "remote_us")):
        axes.plot(lengths, [point[key] for point in points], "o-", color=plots.shade(number, 2), label=key[:-3])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens, half with the other process")
    axes.set_ylabel("us a layer")
    axes.legend(frameon=False)
