"""Figure 9 of Infinite-LLM: a request outgrows its GPU, and memory is borrowed, or the service moves to two GPUs.

Llama-2-7B on an A100 of 80 GB, a prompt of 105,000 tokens with its KV, and answers of 5,000 to 30,000. When the memory
is full one engine borrows from another; the other migrates: an engine over two GPUs is started, for which the model is
downloaded and loaded, and the KV is copied. Simulated, on assumed hardware: 1 GB/s of download, 2 GB/s into the GPUs,
20 s to start an engine. A third one, for comparison, has the two GPUs at hand: only the KV is copied.

After its migration a sequence has two GPUs to itself, so each step takes less time; borrowing leaves the other GPU to
its own requests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.result import Report, Row
from kvpool.policy import lending
from kvpool.sim.hardware import MODELS, weight_bytes
from kvpool.sim.lending_study import BLOCK_TOKENS, LEAF_BLOCKS, SETTINGS, machines
from kvpool.sim.lending_times import Part, Remote, Work

TITLE = f"Infinite-LLM Fig 9: borrowing against live migration; {LABEL}"
PEERS: tuple[str, ...] = ()
_PROMPT = 105_000
_ANSWERS = (5_000, 10_000, 20_000, 30_000)
_PAPER = (3.5, 2.2, 1.6, 1.4)
_DOWNLOAD_S, _LOAD_S, _START_S = 1e9, 2e9, 20.0  # bytes a second; seconds


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(notes=[NOTE, "Beside it: 1 GB/s of download, 2 GB/s into the GPUs, 20 s to start an engine."])
    borrowed, spent = _borrowing()
    migrated, moved_s = _migrating(started=False)
    ready, copied_s = _migrating(started=True)
    for answer, paper in zip(_ANSWERS, _PAPER, strict=True):
        gain = migrated[answer - 1] / borrowed[answer - 1]
        report.rows.append(
            Row(f"{answer:,} tokens: times as fast as migration", gain, "x", 1.0, "higher",
                peers={"migration to started GPUs": ready[answer - 1] / borrowed[answer - 1]},
                details={"paper": paper, "borrowing_s": borrowed[answer - 1], "migration_s": migrated[answer - 1]})
        )  # fmt: skip
    trips_s, copies_s, pause_s = spent
    details = {
        "paper": "25 and 45", "migration_s": moved_s, "copy_alone_s": copied_s, "round_trips_s": trips_s,
        "copies_s": copies_s, "longest_copy_s": pause_s,
    }  # fmt: skip
    over = "what migration costs, times"
    report.rows += [
        Row(f"{over} all round trips and copies of borrowing, 30,000 tokens, as if none were hidden",
            moved_s / (trips_s + copies_s), "x", details=details),
        Row(f"{over} the copies of borrowing", moved_s / copies_s, "x", details=details),
        Row("longest pause between two tokens: migration's, times that of borrowing", moved_s / pause_s, "x"),
    ]  # fmt: skip
    curves = {"borrowing": borrowed[::500], "migration": migrated[::500], "to started GPUs": ready[::500]}
    report.series = curves
    paint = partial(_paint, curves=curves)
    report.plots += plots.draw(context.out / "dist-migration.png", f"105,000 tokens of prompt; {LABEL}", paint)
    return report


def _borrowing() -> tuple[list[float], tuple[float, float, float]]:
    """When each token is there; seconds of all round trips, of all copies, and of the longest copy."""
    pair = machines(SETTINGS[0], "lending")
    times, at, trips, copies, longest, away = pair.times, 0.0, 0.0, 0.0, 0.0, 0
    found = []
    for made in range(1, _ANSWERS[-1] + 1):
        tokens = _PROMPT + made
        blocks = -(-tokens // BLOCK_TOKENS)
        if blocks - away > pair.blocks:
            held = lending.Held(0, blocks, ((away, blocks),), (2,) if away else ())
            plan = lending.plan_offload([held], LEAF_BLOCKS, {2: pair.blocks}, LEAF_BLOCKS, LEAF_BLOCKS)
            moved = sum(move.blocks for move in plan.moves)
            away += moved
            copy_s = pair.near.time_s(moved * BLOCK_TOKENS * times.kv_bytes)
            at += copy_s
            copies += copy_s
            longest = max(longest, copy_s)
        remote = away * BLOCK_TOKENS
        work = Work(1, local=Part(1, tokens - remote))
        trip = times.round_trip_s(1, pair.near)
        parts = [Remote(0.0, trip, times.part_s(Part(1, remote)))] if remote else []
        at += times.step_s(work, parts)
        trips += times.layers * trip if remote else 0.0
        found.append(at)
    return found, (trips, copies, longest)


def _migrating(started: bool) -> tuple[list[float], float]:
    """When each token is there, and what the migration costs."""
    alone, large = machines(SETTINGS[0], "independent"), machines(SETTINGS[0], "one")
    model = MODELS[SETTINGS[0].model]
    at, cost_s = 0.0, 0.0
    found = []
    for made in range(1, _ANSWERS[-1] + 1):
        tokens = _PROMPT + made
        if not cost_s and -(-tokens // BLOCK_TOKENS) > alone.blocks:
            cost_s = alone.far.time_s(tokens * model.kv_bytes_per_token)
            if not started:
                cost_s += _START_S + weight_bytes(model) / _DOWNLOAD_S + weight_bytes(model) / _LOAD_S
            at += cost_s
        at += (large if cost_s else alone).times.step_s(Work(1, local=Part(1, tokens)))
        found.append(at)
    return found, cost_s


def _paint(axes: Any, curves: dict[str, list[float]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        axes.plot([500 * at for at in range(len(points))], points, color=plots.shade(number, len(curves)), label=name)
    axes.set_xlabel("generated tokens")
    axes.set_ylabel("seconds")
    axes.legend(frameon=False, fontsize=7)
