"""The border between migration and lending: an instance is full, and one of its requests goes on growing.

Live migration moves the request to an instance that has room for all of it: it stands still for a stop, and its KV
crosses a link once, ahead of that. Lending leaves it where it is, and every token from then on lies at a creditor: a
round trip for each layer of each step, as far as the attention at home does not hide it. So migration costs once, and
lending by the tokens that are still to come, until the context is so long that its attention hides the round trips.
Beyond the free room of one instance there is nowhere to move to: only lending, or an engine over more GPUs
(dist-migration), serves the request.

Llama-2-7B on A100s of 80 GB, one request of each context, alone: a batch hides more. Simulated, on assumed hardware;
the stop is the bound of 1.2 steps that live-stop measures, the copy goes between two machines. The attention itself is
done once either way, by one instance or by two, and does not count.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

from bench import plots
from bench.context import Context
from bench.distattention.assumed import LABEL, NOTE
from bench.mell.live_stop import STOP_STEPS
from bench.result import Report, Row
from kvpool.policy import cost
from kvpool.sim.hardware import MODELS
from kvpool.sim.lending_fleet import Machines
from kvpool.sim.lending_study import BLOCK_TOKENS, SETTINGS, machines
from kvpool.sim.lending_times import Part, Remote, Work

TITLE = f"The border between live migration and borrowing; {LABEL}"
PEERS: tuple[str, ...] = ()
CONTEXTS = (256, 512, 1_024, 1_536, 2_048, 2_560, 3_072, 4_096, 65_536)
TOKENS = 10_000  # to come, at most


def run(context: Context) -> Report:
    """See the module's text."""
    pair = machines(SETTINGS[0], "lending")
    room = pair.blocks * BLOCK_TOKENS
    links = {"near": pair.near, "far": pair.far}
    report = Report(notes=[NOTE, "After 10,000 tokens: not within so many, borrowing costs less."])
    report.rows.append(Row("longest context that an instance has room for: beyond it, borrowing", room, "tokens"))
    hidden = {name: hidden_from(pair, link) for name, link in links.items()}
    report.rows.append(
        Row("context whose attention hides the round trips: beyond it, borrowing costs a request nothing",
            hidden["near"], "tokens", peers={"a creditor in another machine": hidden["far"]})
    )  # fmt: skip
    curves: dict[int, dict[str, int]] = {}
    for tokens in CONTEXTS:
        lost = {name: borrowing_s(pair, link, tokens, TOKENS) for name, link in links.items()}
        stop_s, copy_s = migration_s(pair, tokens)
        curves[tokens] = {name: border(each, stop_s) for name, each in lost.items()}
        curves[tokens]["copied"] = border(lost["near"], stop_s + copy_s)
        details = {"stop_s": stop_s, "copy_s": copy_s, "borrowing_s": lost["near"][-1], "of_tokens": TOKENS}
        report.rows.append(
            Row(
                f"{tokens:,} tokens of context: borrowing costs more than a live migration after",
                border(lost["near"], stop_s), "tokens",
                peers={
                    "a creditor in another machine": border(lost["far"], stop_s),
                    "stop-and-copy instead": border(lost["near"], stop_s + copy_s),
                },
                details=details,
            )
        )  # fmt: skip
    report.series = {str(tokens): curve for tokens, curve in curves.items()}
    title = f"An instance that is full: above the line a request loses less by migration; {LABEL}"
    report.plots += plots.draw(context.out / "dist-border.png", title, partial(_paint, curves=curves))
    return report


def borrowing_s(pair: Machines, link: cost.Link, context: int, tokens: int) -> list[float]:
    """Seconds that a request has lost behind each of its next tokens, which lie at a creditor behind this link."""
    return list(accumulate(_late_s(pair, link, context, away) for away in range(1, tokens + 1)))


def hidden_from(pair: Machines, link: cost.Link) -> int:
    """The shortest context at which the first token at a creditor costs a step nothing; none later costs more."""
    least, most = 0, pair.blocks * BLOCK_TOKENS
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if _late_s(pair, link, middle, 1) == 0 else (middle, most)
    return most


def _late_s(pair: Machines, link: cost.Link, context: int, away: int) -> float:
    """How much longer a step takes with so many tokens at a creditor than with all at home; never below 0."""
    times = pair.times
    remote = times.part_s(Part(1, -(-away // BLOCK_TOKENS) * BLOCK_TOKENS))
    lent_s = times.step_s(Work(1, local=Part(1, context)), [Remote(0.0, times.round_trip_s(1, link), remote)])
    return max(0.0, lent_s - times.step_s(Work(1, local=Part(1, context + away))))


def migration_s(pair: Machines, context: int) -> tuple[float, float]:
    """Seconds of the stop, and of the copy ahead of it."""
    step_s = pair.times.step_s(Work(1, local=Part(1, context)))
    return STOP_STEPS * step_s, pair.far.time_s(context * MODELS[SETTINGS[0].model].kv_bytes_per_token)


def border(lost: list[float], cost_s: float) -> int:
    """Behind how many tokens more is lost than a migration costs; all of them, if that never happens."""
    return next((number for number, seconds in enumerate(lost, 1) if seconds > cost_s), len(lost))


def _paint(axes: Any, curves: dict[int, dict[str, int]]) -> None:
    names = {"near": "borrowing", "far": "borrowing from another machine", "copied": "borrowing, beside stop-and-copy"}
    shown = [tokens for tokens in curves if tokens <= 4_096]
    for number, (key, name) in enumerate(names.items()):
        points = [curves[tokens][key] for tokens in shown]
        axes.plot(shown, points, "o-", label=name, color=plots.shade(number, len(names)))
    axes.axhline(TOKENS, color="grey", linewidth=0.8)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(f"tokens to come, of {TOKENS:,} at most")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=7)
