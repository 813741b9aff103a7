"""Instance-seconds of MELL, BF, WF and LB at work on small instances, on the same arrivals; beside their prediction.

The instances, arrivals and checks are those of examples/migration: each instance is a process with a tiny transformer,
whose iterations are paced. BF and WF migrate nothing: what outgrows an instance is stopped, and begins again elsewhere.
The prediction comes from the same planner over instances that are only counted (live_model.py). Figures are medians
over seeds; a peer is another policy. Needs PyTorch, and the folder examples beside this one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.context import Context
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


def run(context: Context) -> Report:
    """See the module's text."""
    if importlib.util.find_spec("torch") is None or not _EXAMPLES.is_dir():
        raise Skipped("needs PyTorch, and the folder examples")
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    from migration import study

    size = study.QUICK if context.quick else study.USUAL
    seeds = range(1, 1 + context.pick(1, 2))
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
    return report


def _measure(policy: PolicyName, seed: int, quick: bool) -> tuple[Figures, Predicted]:
    """One run, and its prediction."""
    from dataclasses import replace

    from migration import study
    from migration.arrivals import arrivals
    from migration.worker import Setting

    size = study.QUICK if quick else study.USUAL
    setting = Setting("local://unused", policy, _INSTANCES, size.blocks, size.step_s, size.epoch_s)
    predicted = predict(
        arrivals(replace(size.load, seed=seed)), setting.planner(), blocks=size.blocks, block_tokens=16,
        step_s=size.step_s, epoch_s=size.epoch_s, growth=setting.growth, start_s=_START_S,
    )  # fmt: skip
    ((figures, _),) = study.compare(size, [policy], _INSTANCES, seed)
    return figures, predicted


def _rows(measured: dict[PolicyName, list[tuple[Figures, Predicted]]]) -> list[Row]:
    used = {policy: [one.instance_seconds for one, _ in runs] for policy, runs in measured.items()}
    thought = {policy: [two.instance_seconds for _, two in runs] for policy, runs in measured.items()}
    rows = [
        Row(
            "instance-seconds, measured", median(used["mell"]), "s",
            peers={policy: median(used[policy]) for policy in _POLICIES if policy != "mell"},
            details={"runs": {policy: [_json(*each) for each in runs] for policy, runs in measured.items()}},
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
    moves = {policy: median(one.moves_kv + one.moves_tokens for one, _ in runs) for policy, runs in measured.items()}
    rows.append(
        Row("moves", moves["mell"], "", peers={policy: moves[policy] for policy in _POLICIES if policy != "mell"})
    )
    return rows


def _json(figures: Figures, predicted: Predicted) -> dict[str, Any]:
    from dataclasses import asdict

    return {"measured": asdict(figures), "predicted": asdict(predicted)}
