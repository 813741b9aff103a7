"""What a run has shown: checked, counted, as a table, as JSON, and as plots."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from migration.arrivals import Arrival
from migration.dispatcher import Outcome, counted
from migration.model import answer
from migration.worker import Setting

__all__ = ["Figures", "as_json", "draw", "expected", "figures", "table", "wrong"]

_TITLES = {"mell": "MELL", "bf": "BF", "wf": "WF", "lb": "LB"}
_COLOURS = {"mell": "#2a9d5c", "bf": "#f2b134", "wf": "#9a9a9a", "lb": "#1f77b4"}


@dataclass(frozen=True)
class Figures:
    """The figures of one run.

    Attributes:
        policy: The scheduler's name.
        seconds: From the first arrival to the last token.
        instance_seconds: Of all processes, from their start to their end.
        instances_max: That ran at once.
        moves_kv: Requests that have moved by their KV cache.
        moves_tokens: Requests that have moved by their tokens.
        moves_failed: Requests that were to move, and have stayed.
        plans: That were made.
        stop_ms: How long a request that has moved was stopped, on average.
        ttft_ms: From the arrival of a request to its first token, on average.
        tpot_ms: From one token to the next, on average over requests.
        gap_ms_max: The longest time between two tokens of one request.
        restarts: Requests that started again, because their instance had ended.
        hit: Instances that were killed or stopped.
    """

    policy: str
    seconds: float
    instance_seconds: float
    instances_max: int
    moves_kv: int
    moves_tokens: int
    moves_failed: int
    plans: int
    stop_ms: float
    ttft_ms: float
    tpot_ms: float
    gap_ms_max: float
    restarts: int
    hit: int


def expected(arrivals: Sequence[Arrival]) -> dict[str, list[int]]:
    """What each request gets that is computed alone, without instances and without migration."""
    return {each.name: answer(each.prompt, each.new_tokens) for each in arrivals}


def wrong(outcome: Outcome, answers: Mapping[str, list[int]]) -> list[str]:
    """The requests whose tokens are others than alone."""
    return [each.arrival.name for each in outcome.answers if each.tokens != answers[each.arrival.name]]


def figures(setting: Setting, outcome: Outcome) -> Figures:
    """The figures of a run."""
    moves = counted(outcome)
    totals = [each.totals for each in outcome.instances if each.totals is not None]
    stopped = sum(each.migrations.stop_seconds for each in totals)
    answers = outcome.answers
    gaps = [later - earlier for each in answers for earlier, later in zip(each.times, each.times[1:], strict=False)]
    spans = [(each.times[-1] - each.times[0]) / max(1, len(each.times) - 1) for each in answers]
    used = sum(min(each.ended_s or outcome.seconds, outcome.seconds) - each.started_s for each in outcome.instances)
    return Figures(
        setting.policy,
        round(outcome.seconds, 2),
        round(used, 2),
        max(count for _, count in outcome.in_use),
        moves["kv"],
        moves["tokens"],
        moves["failed"],
        sum(each.plans_made for each in totals),
        round(1000 * stopped / max(1, moves["kv"] + moves["tokens"]), 1),
        round(1000 * _mean([each.times[0] - each.arrival.at_s for each in answers]), 1),
        round(1000 * _mean(spans), 1),
        round(1000 * max(gaps, default=0.0), 1),
        outcome.restarts,
        len(outcome.hit),
    )


def table(runs: Sequence[Figures]) -> str:
    """One line for each policy."""
    titles = ("", "instance-s", "at most", "by KV", "by tokens", "failed", "stop ms", "TTFT ms", "TPOT ms", "restarts")
    rows = [titles] + [
        (
            _TITLES[one.policy], f"{one.instance_seconds:.1f}", str(one.instances_max), str(one.moves_kv),
            str(one.moves_tokens), str(one.moves_failed), f"{one.stop_ms:.0f}", f"{one.ttft_ms:.0f}",
            f"{one.tpot_ms:.1f}", str(one.restarts),
        )
        for one in runs
    ]  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(titles))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def as_json(one: Figures) -> dict[str, object]:
    """The figures of a run, for a file."""
    return asdict(one)


def draw(runs: Sequence[tuple[Figures, Outcome]], folder: Path) -> str:
    """Writes the instances in use over time and the instance-seconds; the name of the file, "" without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return ""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces on the screen that it looks for fonts
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    over_time, total = figure.subplots(1, 2, width_ratios=(2, 1))
    for one, outcome in runs:
        at = [*outcome.in_use, (outcome.seconds, outcome.in_use[-1][1])]
        over_time.step(
            [second for second, _ in at if second <= outcome.seconds],
            [count for second, count in at if second <= outcome.seconds],
            where="post", label=_TITLES[one.policy], color=_COLOURS[one.policy],
        )  # fmt: skip
    over_time.set_xlabel("seconds")
    over_time.set_ylabel("instances")
    over_time.legend()
    total.bar(
        [_TITLES[one.policy] for one, _ in runs],
        [one.instance_seconds for one, _ in runs],
        color=[_COLOURS[one.policy] for one, _ in runs],
    )
    total.set_ylabel("instance-seconds")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "migration.png", dpi=110)
    return "migration.png"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
