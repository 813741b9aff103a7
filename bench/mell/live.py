"""MELL, BF, WF and LB at work on small instances, on the same arrivals: instance-seconds and the figures of the paper.

The instances, arrivals and checks are those of examples/migration: each instance is a process with a tiny transformer,
whose iterations are paced. BF and WF migrate nothing: what outgrows an instance is stopped, and begins again elsewhere.
The prediction comes from the same planner over instances that are only counted (live_model.py). Figures are medians
over seeds; a peer is another policy. Figures 11, 12, 14 and 15 are drawn from these runs (live_figures.py), with the
spread over seeds. Needs PyTorch, and the folder examples beside this one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.context import Context
from bench.mell.live_figures import FIGURES, Traced, draw_live, of_prediction, over_seeds, traced
from bench.mell.live_model import Predicted, predict
from bench.result import Report, Row, Skipped
from kvpool.policy.rebalancing import PolicyName

if TYPE_CHECKING:
    from migration.report import Figures

TITLE = "MELL live: instance-seconds beside BF, WF and LB, 8 small instances at most"
PEERS: tuple[str, ...] = ()
_EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
_POLICIES: tuple[PolicyName, ...] = ("bf", "wf", "lb", "mell")
_INSTANCES = 8
_START_S = 0.5  # until an instance serves, as measured here
_BLOCK_TOKENS = 16
_UNITS = {"gpus": "", "over_bound": "%", "utilisation": "%", "moves_s": "/s"}
_WHAT = {
    "gpus": "instances on average",
    "over_bound": "Fig 11: mean instances over the lower bound",
    "utilisation": "Fig 14: utilisation",
    "moves_s": "Fig 12: requests migrated a second",
}


class _Run(NamedTuple):
    """One run of a policy, and what was predicted of it."""

    figures: Figures
    seen: Traced
    predicted: Predicted
    thought: Traced


def run(context: Context) -> Report:
    """See the module's text."""
    if importlib.util.find_spec("torch") is None or not _EXAMPLES.is_dir():
        raise Skipped("needs PyTorch, and the folder examples")
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    from migration import study

    size = study.QUICK if context.quick else study.USUAL
    seeds = range(1, 1 + context.pick(1, 3))
    report = Report(
        notes=[
            f"{size.load.requests} requests in {size.load.waves} waves, {size.blocks} blocks an instance, steps of "
            f"{1000 * size.step_s:.0f} ms, epochs of {size.epoch_s:g} s, seeds 1 to {seeds[-1]}",
            "instance-seconds are of paced instances: several share a processor",
            "the tokens of every request were those that it gets alone",
        ]
    )
    with report.guarded("instance-seconds"):
        measured = {policy: [_measure(policy, seed, context.quick) for seed in seeds] for policy in _POLICIES}
        report.rows += _rows(measured)
        seen: dict[str, list[Traced]] = {policy: [run.seen for run in runs] for policy, runs in measured.items()}
        thought: dict[str, list[Traced]] = {policy: [run.thought for run in runs] for policy, runs in measured.items()}
        report.rows += _figures(seen, thought)
        report.series = {
            kind: {policy: over_seeds(runs) | {"over_time": runs[0].over_time} for policy, runs in found.items()}
            for kind, found in (("measured", seen), ("predicted", thought))
        }
        report.plots += draw_live(context.out, seen, thought)
    return report


def _measure(policy: PolicyName, seed: int, quick: bool) -> _Run:
    """One run, and its prediction."""
    from dataclasses import replace

    from migration import study
    from migration.arrivals import arrivals
    from migration.worker import Setting

    size = study.QUICK if quick else study.USUAL
    setting = Setting("local://unused", policy, _INSTANCES, size.blocks, size.step_s, size.epoch_s)
    predicted = predict(
        arrivals(replace(size.load, seed=seed)), setting.planner(), blocks=size.blocks, block_tokens=_BLOCK_TOKENS,
        step_s=size.step_s, epoch_s=size.epoch_s, growth=setting.growth, start_s=_START_S,
    )  # fmt: skip
    ((figures, outcome),) = study.compare(size, [policy], _INSTANCES, seed)
    moves = figures.moves_kv + figures.moves_tokens
    seen = traced(outcome, moves, blocks=size.blocks, block_tokens=_BLOCK_TOKENS, epoch_s=size.epoch_s)
    return _Run(figures, seen, predicted, of_prediction(predicted, size.blocks * _BLOCK_TOKENS))


def _rows(measured: dict[PolicyName, list[_Run]]) -> list[Row]:
    used = {policy: [run.figures.instance_seconds for run in runs] for policy, runs in measured.items()}
    thought = {policy: [run.predicted.instance_seconds for run in runs] for policy, runs in measured.items()}
    rows = [
        Row(
            "instance-seconds, measured", median(used["mell"]), "s",
            peers={policy: median(used[policy]) for policy in _POLICIES if policy != "mell"},
            details={"runs": {policy: [_json(each) for each in runs] for policy, runs in measured.items()}},
        ),
        Row(
            "instance-seconds, predicted", median(thought["mell"]), "s",
            peers={policy: median(thought[policy]) for policy in _POLICIES if policy != "mell"},
        ),
    ]  # fmt: skip
    for policy in _POLICIES[:3]:
        ratios = [mine / theirs for mine, theirs in zip(used["mell"], used[policy], strict=True)]
        rows.append(
            Row(
                f"MELL's instance-seconds over those of {policy.upper()}", median(ratios), "x", 1.0,
                details={"by seed": ratios},
            )
        )  # fmt: skip
    moves = {
        policy: [run.figures.moves_kv + run.figures.moves_tokens for run in runs] for policy, runs in measured.items()
    }
    counted = {policy: [run.predicted.moves for run in runs] for policy, runs in measured.items()}
    rows.append(
        Row(
            "moves", median(moves["mell"]), "",
            peers={policy: median(moves[policy]) for policy in _POLICIES if policy != "mell"},
        )
    )  # fmt: skip
    rows += [
        _error("instance-seconds: error of the prediction", used, thought, 10.0),
        _error("moves: error of the prediction", moves, counted, 25.0),
    ]
    return rows


def _error(
    what: str, measured: Mapping[PolicyName, Sequence[float]], predicted: Mapping[PolicyName, Sequence[float]],
    target: float,
) -> Row:  # fmt: skip
    """Of MELL, the median over seeds in percent; a peer is another policy that has any."""
    errors = {
        policy: [100 * abs(two / one - 1) for one, two in zip(measured[policy], predicted[policy], strict=True) if one]
        for policy in _POLICIES
    }
    own = errors.pop("mell")
    peers: dict[str, float] = {policy: median(values) for policy, values in errors.items() if values}
    return Row(what, median(own) if own else 0.0, "%", target, peers=peers, details={"by seed": own})


def _figures(seen: Mapping[str, list[Traced]], thought: Mapping[str, list[Traced]]) -> list[Row]:
    """The figures of the paper: a row each, with the spread over seeds and the prediction."""
    found = {policy: over_seeds(runs) for policy, runs in seen.items()}
    expected = {policy: over_seeds(runs) for policy, runs in thought.items()}
    return [
        Row(
            _WHAT[key], found["mell"][key]["median"], _UNITS[key],
            better="higher" if key == "utilisation" else "lower",
            peers={policy: found[policy][key]["median"] for policy in _POLICIES if policy != "mell"},
            details={
                "spread": {policy: found[policy][key] for policy in _POLICIES},
                "predicted": {policy: expected[policy][key]["median"] for policy in _POLICIES},
            },
        )
        for key in FIGURES
    ]  # fmt: skip


def _json(run: _Run) -> dict[str, Any]:
    from dataclasses import asdict

    predicted = asdict(run.predicted)
    del predicted["over_time"]  # it is in the series
    return {"measured": asdict(run.figures), "predicted": predicted}
