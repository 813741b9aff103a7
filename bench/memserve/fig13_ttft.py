"""Figure 13 of the MemServe paper: what caching saves of the time to first token, with the demo's transformer.

Against the cached share of the prompt, for (a) prompts of several lengths, (b) batches of several prompts, (c) blocks
of several sizes, (d) what is cached lying in HBM or in DRAM, from where it is swapped in first. The engine serves one
prompt after another, so the time of a batch is that until the last of its prompts has its first token.

Needs PyTorch, and the folder examples beside this one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvpool
from bench import plots
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row, Skipped
from bench.workload import Tokens

TITLE = "MemServe Fig 13: TTFT saved against the cached ratio, with the demo's transformer"
_EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a prompt; the last stands for all but the last block, which is computed anew

_TABLE_SHARE = 3  # the others are in the plot and the JSON


@dataclass(frozen=True)
class _Line:
    """One line of a panel."""

    label: str
    tokens: int
    batch: int = 1
    block_tokens: int = 16
    in_dram: bool = False


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: tuple[_Line, ...]


class Subject:
    """The demo's engine with the cache off and on; see bench/remote.py."""

    def __init__(self) -> None:
        sys.path.insert(0, str(_EXAMPLES))
        self._llama = importlib.import_module("llama")
        self._serving = importlib.import_module("serving")
        # A tile's matrices are small: threads would wait for each other more than they compute.
        importlib.import_module("torch").set_num_threads(1)
        self._random = np.random.default_rng(1)

    def measure(
        self, tokens: int, batch: int, block_tokens: int, in_dram: bool, repeats: int
    ) -> dict[str, list[list[float]]]:
        """Times to first token: {"off": [repeats times], "on": [repeats times, for each share]}."""
        model = self._llama.Llama(self._llama.LlamaConfig(block_tokens=block_tokens))
        layout = self._serving.kv_layout(model.config)
        blocks = tokens // block_tokens
        room = (batch + 1) * (blocks + 1) * 2
        with (
            kvpool.Pool(layout, hbm_blocks=room) as pool_off,
            kvpool.Pool(layout, hbm_blocks=room, dram_blocks=room) as pool_on,
        ):
            off, on = self._serving.Engine(model, pool_off, cache=False), self._serving.Engine(model, pool_on)
            off.serve(self._text(100), 2)  # the first call of a kernel is slow
            known = [self._text(tokens) for _ in range(batch)]
            for prompt in known:
                on.serve(prompt, 1)
            times_off: list[float] = []
            times_on: list[list[float]] = [[] for _ in _SHARES]
            for _ in range(repeats):
                times_off.append(sum(off.serve(self._text(tokens), 1).ttft_s for _ in known))
                for share, times in zip(_SHARES, times_on, strict=True):
                    cached = min(round(share * blocks), blocks - 1) * block_tokens
                    times.append(self._serve_batch(pool_on, on, known, cached, in_dram))
        return {"off": [times_off], "on": times_on}

    def _serve_batch(self, pool: kvpool.Pool, engine: Any, known: list[Tokens], cached: int, in_dram: bool) -> float:
        """Serves one prompt for each known one, which begins with its first `cached` tokens."""
        prompts = [np.concatenate([prompt[:cached], self._text(len(prompt) - cached)]) for prompt in known]
        if in_dram:
            pool.swap_out(pool.stats().hbm.historical)
        total = 0.0
        for prompt in prompts:
            served = engine.serve(prompt, 1)
            swapped_in = cached // pool.kv_layout.block_tokens if in_dram else 0
            if served.cached_tokens != cached or served.swapped_in_blocks != swapped_in:
                raise AssertionError(
                    f"{served.cached_tokens} tokens cached of {cached}, {served.swapped_in_blocks} swapped in"
                )
            total += served.ttft_s
        for prompt in prompts:
            pool.delete(prompt)  # what it does not share with a known prompt
        return total

    def _text(self, tokens: int) -> Tokens:
        return self._random.integers(0, 256, tokens, dtype=np.int32)  # the time does not depend on what it says


def run(context: Context) -> Report:
    if importlib.util.find_spec("torch") is None:
        raise Skipped("PyTorch is not installed")
    report = Report()
    panels = _panels(context)
    saved: dict[str, dict[str, list[float]]] = {}
    with Remote(__name__) as subject:
        for panel in panels:
            saved[panel.title] = {}
            for line in panel.lines:
                saved[panel.title][line.label] = points = _measure(context, subject, line)
                report.rows.append(_row(panel, line, points))
    report.series = {"cached_share": list(_SHARES), "ttft_saved_percent": saved}
    paint = [partial(_paint, title=title, lines=lines) for title, lines in saved.items()]
    report.plots += plots.draw(
        context.out / "fig13.png", "Time to first token saved by the cache (MemServe, Fig 13)", *paint
    )
    report.notes.append(
        "Saved of the time with the cache off. 100 % cached is all but the last block: its logits are wanted. The "
        "model is small and runs on one CPU thread; a batch takes until its last prompt has its first token."
    )
    return report


def _panels(context: Context) -> tuple[_Panel, ...]:
    lengths = (256, 1024) if context.quick else (256, 512, 1024, 2048)
    batches = (1, 4) if context.quick else (1, 2, 4, 8)
    sizes = (8, 32) if context.quick else (8, 16, 32, 64)
    tokens = 512 if context.quick else 1024
    return (
        _Panel("(a) prompt length", tuple(_Line(f"{length:,} tokens", length) for length in lengths)),
        _Panel("(b) batch size", tuple(_Line(f"{batch} x 256 tokens", 256, batch=batch) for batch in batches)),
        _Panel("(c) block size", tuple(_Line(f"{size} tokens a block", tokens, block_tokens=size) for size in sizes)),
        _Panel("(d) cached in", (_Line("HBM", tokens), _Line("DRAM, swapped in", tokens, in_dram=True))),
    )


def _measure(context: Context, subject: Remote, line: _Line) -> list[float]:
    """Per cent of the TTFT that are saved, for each share."""
    times = subject.ask(
        "measure",
        tokens=line.tokens,
        batch=line.batch,
        block_tokens=line.block_tokens,
        in_dram=line.in_dram,
        repeats=context.pick(2, 5),
    )
    off_s = median(times["off"][0])
    return [100 * (1 - median(on_s) / off_s) for on_s in times["on"]]


def _row(panel: _Panel, line: _Line, points: list[float]) -> Row:
    what = f"{panel.title}: {line.label}, {_SHARES[_TABLE_SHARE]:.0%} cached, TTFT saved"
    return Row(what=what, value=points[_TABLE_SHARE], unit="%", better="higher")


def _paint(axes: Any, title: str, lines: dict[str, list[float]]) -> None:
    for number, (label, saved) in enumerate(lines.items()):
        axes.plot(
            [100 * share for share in _SHARES], saved, marker="o", color=plots.shade(number, len(lines)), label=label
        )
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_ylim(top=102)
    axes.set_xlabel("cached share of the prompt (%)")
    axes.set_ylabel("TTFT saved (%)")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
