"""Figure 14 of the MemServe paper: how well the cost model predicts the time to first token.

(a) The operator-level model, fitted to operators that ran alone, against whole prefills of lengths and cached shares
that it has not seen. (b) The same model and the architecture-level one for one rank of two, four and eight, without
measuring again.

The rank computes with NumPy on one core: what is timed is the processor time of its thread, so that other processes
disturb it little. What a rank of several does not do here is the all-reduce, which neither model predicts.
"""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import partial
from time import thread_time
from typing import Any

import numpy as np

from bench import plots
from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.control import profile_ops
from kvpool.control.numpy_rank import NumpyRank
from kvpool.policy import cost
from kvpool.policy.cost.fit import solve
from kvpool.policy.cost.operators import paper_attention

TITLE = "MemServe Fig 14: the cost model, on lengths and parallelism that it has not seen"
PEERS: tuple[str, ...] = ()
_MODEL = cost.ModelShape(layers=4, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=259)  # the demo's, as in fig13
_BLOCK_TOKENS = 16
_TP = (1, 2, 4, 8)
_LENGTHS, _QUICK_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048), (16, 64, 256, 512)
_HELD_OUT, _QUICK_HELD_OUT = 36, 12
_SEED = 14
_ERROR_MAX = 10.0  # per cent
_QUANTILE = 0.25  # of the rounds: what disturbs only adds, and a minimum would favour what is short
_ONE_CORE = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Subject:
    """The machine that is profiled; see bench/remote.py."""

    def start(self, longest: int) -> None:
        self._ranks = {tp: NumpyRank(_MODEL, longest, tp, _BLOCK_TOKENS) for tp in _TP}
        self._ids = np.random.default_rng(_SEED).integers(0, _MODEL.vocab, longest)

    def profile(self, lengths: list[int]) -> dict[str, Any]:
        """One round of it."""
        return profile_ops(_MODEL, lengths=lengths, block_tokens=_BLOCK_TOKENS, units=1, rounds=1).as_json()

    def prefills(self, points: list[list[int]], seed: int) -> list[list[float]]:
        """Seconds of one round: for each tp, of each (tokens, cached)."""
        seconds = {}
        order = [(tp, at) for tp in _TP for at in range(len(points))]
        random.Random(seed).shuffle(order)
        for tp, at in order:
            tokens, cached = points[at]
            start = thread_time()
            self._ranks[tp].prefill(self._ids[:tokens], cached)
            seconds[tp, at] = thread_time() - start
        return [[seconds[tp, at] for at in range(len(points))] for tp in _TP]


def run(context: Context) -> Report:
    lengths = _QUICK_LENGTHS if context.quick else _LENGTHS
    points = _held_out(lengths, _QUICK_HELD_OUT if context.quick else _HELD_OUT)
    rounds = context.pick(3, 7)
    profiles, prefills = [], []
    with Remote(__name__, environment=_ONE_CORE) as subject:
        subject.ask("start", longest=max(lengths))
        subject.ask("prefills", points=points, seed=0)  # warms up
        for round_ in range(rounds):  # in turns, so that what disturbs one disturbs the other
            profiles.append(cost.Profile.from_json(subject.ask("profile", lengths=lengths)))
            prefills.append(subject.ask("prefills", points=points, seed=round_))
    profile = _combined(profiles)
    seconds = np.quantile(np.array(prefills), _QUANTILE, axis=0)
    operators = cost.CostModel.fit(profile)
    one_operator = cost.CostModel.fit(profile, waves_from=("gate_up",))
    architecture = cost.ArchitectureModel.fit(profile.prefills)
    report = Report()
    series = []
    for tp, times in zip(_TP, seconds.tolist(), strict=True):
        measured = [_sample(point, time) for point, time in zip(points, times, strict=True)]
        models: dict[str, cost.CostModel | cost.ArchitectureModel] = {
            "operator level": operators.spread(cost.Parallel(tp=tp)),
            "architecture level": architecture.scaled(tp),
            "operator level, waves from gate_up alone": one_operator.spread(cost.Parallel(tp=tp)),
        }
        errors = {name: model.report(measured) for name, model in models.items()}
        for name, error in errors.items():
            target = _ERROR_MAX if name == "operator level" else None
            report.rows.append(
                Row(f"tp {tp}: {name}, mean error", 100 * error.mean, "%", target, details=asdict(error))
            )
        series.append(
            {
                "tp": tp,
                "points": points,
                "seconds": times,
                "predicted": {name: [model.exec_s(*point) for point in points] for name, model in models.items()},
                "mean_error_percent": {name: 100 * error.mean for name, error in errors.items()},
            }
        )
    report.rows += [
        Row(f"alone: {name}, mean error of its fit", 100 * error.mean, "%", details=asdict(error))
        for name, error in operators.operator_reports(profile).items()
    ]
    attention = profile.operators["attention"]
    features = paper_attention([sample.work for sample in attention])
    times_s = np.array([sample.seconds for sample in attention])
    error = cost.ErrorReport.of(features @ solve(features, times_s), times_s)
    what = "alone: attention as a x^2 y + b x^2 + c x + d, mean error of its fit"
    report.rows.append(Row(what, 100 * error.mean, "%", details=asdict(error)))
    report.series = {"model": _MODEL.as_json(), "by_tp": series, "profile": profile.as_json()}
    report.plots += plots.draw(
        context.out / "fig14.png",
        "The cost model (MemServe, Fig 14)",
        partial(_paint_accuracy, points=points, line=series[0]),
        partial(_paint_parallel, series=series),
    )
    report.notes.append(
        f"Fitted: {len(profile.prefills)} prefills for the architecture level, the operators alone for the operator "
        f"level, tp 1 both times. Tested: {len(points)} other (tokens, cached). Model: {_MODEL.layers} layers, hidden "
        f"{_MODEL.hidden}; {profile.machine.library}, one core."
    )
    return report


def _held_out(lengths: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """Random lengths between the profiled ones and random cached shares, none of which was profiled."""
    dice = random.Random(_SEED)
    points: set[tuple[int, int]] = set()
    while len(points) < count:
        tokens = round(2 ** dice.uniform(5, np.log2(max(lengths))))
        cached = round(dice.random() * 0.9 * tokens) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if tokens not in lengths:
            points.add((tokens, cached))
    return sorted(points)


def _combined(profiles: list[cost.Profile]) -> cost.Profile:
    """Of profiles of the same plan, each measurement's quantile."""

    def middle(*samples: cost.Sample) -> cost.Sample:
        times = [sample.seconds for sample in samples]
        return cost.Sample(samples[0].work, float(np.quantile(times, _QUANTILE)))

    operators = {
        name: list(map(middle, *(profile.operators[name] for profile in profiles))) for name in profiles[0].operators
    }
    whole = list(map(middle, *(profile.prefills for profile in profiles)))
    return replace(profiles[0], operators=operators, prefills=whole)


def _sample(point: tuple[int, int], seconds: float) -> cost.Sample:
    tokens, cached = point
    return cost.Sample(cost.Work(tokens - cached, cached, -(-tokens // _BLOCK_TOKENS)), seconds)


def _paint_accuracy(axes: Any, points: list[tuple[int, int]], line: dict[str, Any]) -> None:
    measured, predicted = np.array(line["seconds"]), np.array(line["predicted"]["operator level"])
    shares = [cached / tokens for tokens, cached in points]
    dots = axes.scatter(1e3 * measured, 1e3 * predicted, c=shares, cmap="viridis", s=18)
    edge = np.array([measured.min(), measured.max()]) * 1e3
    axes.plot(edge, edge, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured prefill (ms)")
    axes.set_ylabel("predicted by operators (ms)")
    axes.set_title("(a) operator level, tp 1", loc="left", fontsize=10)
    axes.figure.colorbar(dots, ax=axes, label="cached share")


def _paint_parallel(axes: Any, series: list[dict[str, Any]]) -> None:
    names = ("operator level", "architecture level")
    places = np.arange(len(series))
    for number, name in enumerate(names):
        axes.bar(
            places + 0.38 * (number - 0.5),
            [line["mean_error_percent"][name] for line in series],
            width=0.36,
            color=plots.shade(number, 3),
            label=name,
        )
    axes.set_xticks(places, [f"tp {line['tp']}" for line in series])
    axes.set_ylabel("mean error (%)")
    axes.set_title("(b) another parallelism, not measured again", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
