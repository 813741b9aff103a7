"""MELL's study (§VIII, Fig 6 and 11 to 15): GPUs, moves and utilisation of MELL, BF, WF and LB; simulated, seeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bench.context import Context
from bench.mell import figures
from bench.mell.carry import Carrier
from bench.mell.cells import (
    A100,
    AZURE,
    RTX4090,
    Hardware,
    Workload,
    azure_workload,
    measured,
    over_seeds,
    poisson_workload,
    policies,
)
from bench.result import Report, Row
from kvpool.policy import mell
from kvpool.sim.packing import Scheduler, replay, served

TITLE = "MELL Fig 6, 11-15: GPUs, moves and utilisation of MELL, BF, WF and LB"
PEERS: tuple[str, ...] = ()
_RATES = (0.5, 0.8, 1.1)
# Parts of C: slack, and reserve. Each step has fewer moves and more GPUs than the one before.
_SETTINGS = ((0.0, 0.0), (0.01, 0.0), (0.02, 0.0), (0.04, 0.02), (0.04, 0.08), (0.08, 0.08), (0.08, 0.16))
_DRAINS = (0.6, 0.7, 0.8, 0.9, 0.95)
_FLEETS = (6, 8, 10, 12, 14)
_BASELINES = ("BF", "WF", "LB")


def run(context: Context) -> Report:
    report = Report()
    report.series["cells"] = _cells(context, report)
    report.series["scale"] = _scale(context, report)
    report.series["curve"] = _curve(context, report)
    report.series["links"] = _links(context, report)
    report.series["fleet"] = _fleet(context, report)
    report.plots += figures.draw_all(context.out, report.series)
    report.notes += [
        "A lower bound holds for every policy in every second (L2 of Martello and Toth); means and peaks are above it.",
        "BF and WF dispatch the newest request anew when a GPU overflows: prefilled again, which counts as no move.",
        "LB drains a GPU when the others would be at most 80 % full without it; a line beside it, at most 95 %.",
    ]
    if not AZURE.exists():
        report.notes.append(f"Without the Azure trace: {AZURE} is not there (KVPOOL_TRACES).")
    return report


def _workloads(context: Context, hardware: Hardware) -> dict[str, Callable[[int], Workload]]:
    seconds, warm_up = context.pick(300, 1000), 200

    def poisson(rate: float) -> Callable[[int], Workload]:
        return lambda seed: poisson_workload(hardware, rate, seed, seconds, warm_up)

    made = {f"Poisson {rate:g}/s": poisson(rate) for rate in _RATES}
    if AZURE.exists():
        part = context.pick(200, 300)
        made["Azure arrivals"] = lambda seed: azure_workload(hardware, seed, part, warm_up, False)
        made["Azure, own lengths"] = lambda seed: azure_workload(hardware, seed, part, warm_up, True)
    return made


def _cells(context: Context, report: Report) -> list[dict[str, Any]]:
    """Fig 11 to 15: every policy on every workload and hardware, over some seeds."""
    found = []
    seeds = range(1, 1 + context.pick(1, 3))
    for hardware in (A100, RTX4090):
        for name, make in _workloads(context, hardware).items():
            runs: dict[str, list[dict[str, float]]] = {}
            over_time: dict[str, list[int]] = {}
            refused = []
            for seed in seeds if name.startswith("Poisson") else seeds[:2]:
                workload = make(seed)
                refused.append(100 * workload.refused / len(workload.requests))
                schedulers: dict[str, tuple[Callable[[], Scheduler], bool]] = {
                    policy: (maker, False) for policy, maker in policies(workload).items()
                }
                schedulers["MELL, one by one"] = schedulers["MELL"][0], True
                for policy, (maker, one_by_one) in schedulers.items():
                    outcome = replay(workload.epochs, maker(), one_by_one)
                    runs.setdefault(policy, []).append(measured(workload, outcome))
                    over_time[policy] = outcome.gpus
            cell = {policy: over_seeds(figures_of) for policy, figures_of in runs.items()}
            found.append(
                {
                    "hardware": hardware.name,
                    "workload": name,
                    "seeds": len(refused),
                    "refused_percent": float(np.median(refused)),
                    "policies": cell,
                }
            )
            if (hardware, name) == (A100, "Poisson 1.1/s"):
                report.series["gpus_over_time"] = {policy: over_time[policy][::5] for policy in ("MELL", *_BASELINES)}
            _report_cell(report, hardware, name, runs, cell)
    return found


def _report_cell(
    report: Report,
    hardware: Hardware,
    name: str,
    runs: dict[str, list[dict[str, float]]],
    cell: dict[str, dict[str, dict[str, float]]],
) -> None:
    where = f"{hardware.name}, {name}"
    own = cell["MELL"]

    def peers(key: str) -> dict[str, float]:
        return {policy: figures_of[key]["median"] for policy, figures_of in cell.items() if policy != "MELL"}

    for key, what, target, better in (
        ("over_bound", "mean GPUs over the lower bound", 6.0, "lower"),
        ("peak_over_bound", "peak over the lower bound's", 10.0, "lower"),
        ("utilisation", "utilisation", 90.0, "higher"),
    ):
        report.rows.append(
            Row(
                f"{where}: {what}",
                own[key]["median"],
                "%",
                target,
                better,  # type: ignore[arg-type]
                peers=peers(key),
                details={"spread": own[key]},
            )
        )
    saved = [
        100 * (1 - batched["moves_s"] / single["moves_s"])
        for batched, single in zip(runs["MELL"], runs["MELL, one by one"], strict=True)
    ]
    report.rows.append(Row(f"{where}: moves saved by batching", float(np.median(saved)), "%", 25.0, "higher"))
    fewest = min(cell[policy]["gpus"]["median"] for policy in cell if not policy.startswith("MELL"))
    report.rows.append(
        Row(f"{where}: GPUs, as a part of the best other policy's", 100 * own["gpus"]["median"] / fewest, "%", 100.0)
    )


def _scale(context: Context, report: Report) -> list[dict[str, Any]]:
    """Ten and a hundred times the load, where rounding no longer counts."""
    found = []
    for times in (10, 100)[: context.pick(1, 2)]:
        seconds = context.pick(200, 300 if times == 10 else 200)
        workload = poisson_workload(A100, 1.1 * times, 1, seconds, 160)
        cell = {}
        for policy, maker in policies(workload, pairs=times, never_more=False).items():
            cell[policy] = measured(workload, replay(workload.epochs, maker()))
        found.append({"times": times, "policies": cell})
        for key, what, target, better in (
            ("over_bound", "mean GPUs over the lower bound", 4.0, "lower"),
            ("utilisation", "utilisation", 95.0, "higher"),
        ):
            peers = {policy: each[key] for policy, each in cell.items() if policy != "MELL"}
            name = f"{A100.name}, Poisson {1.1 * times:g}/s: {what}"
            report.rows.append(Row(name, cell["MELL"][key], "%", target, better, peers=peers))  # type: ignore[arg-type]
    return found


def _curve(context: Context, report: Report) -> list[dict[str, Any]]:
    """GPUs against migrations a second, by slack and reserve; the balancer by when it drains."""
    found = []
    for rate, seconds in ((1.1, context.pick(300, 500)), (11.0, context.pick(200, 230))):
        workload = poisson_workload(A100, rate, 1, seconds, 180)
        capacity = A100.capacity
        points: dict[str, list[dict[str, float]]] = {"MELL": [], "LB": []}
        for slack, reserve in _SETTINGS:
            settings = mell.Settings(slack=int(slack * capacity), reserve=int(reserve * capacity), never_more=False)
            figures_of = measured(workload, replay(workload.epochs, mell.Mell(capacity, settings)))
            points["MELL"].append({"slack_percent": 100 * slack, "reserve_percent": 100 * reserve, **figures_of})
        for drain in _DRAINS:
            balancer = mell.LoadBalance(capacity, scale_in=drain, pairs=max(1, int(rate)))
            figures_of = measured(workload, replay(workload.epochs, balancer))
            points["LB"].append({"drains_at_percent": 100 * drain, **figures_of})
        found.append({"rate": rate, "points": points})
        least, most = points["MELL"][0], points["MELL"][3]
        what = f"Poisson {rate:g}/s: moves saved by a slack of 4 % of C and a reserve of 2 %"
        more = 100 * (most["gpus"] / least["gpus"] - 1)
        report.rows.append(
            Row(what, 100 * (1 - most["moves_s"] / least["moves_s"]), "%", better="higher", details={"gpus": more})
        )
    return found


def _links(context: Context, report: Report) -> list[dict[str, Any]]:
    """What the paper's links carry, with and without the token path, and with a weight on distance."""
    found = []
    for hardware in (A100, RTX4090):
        workload = poisson_workload(hardware, 5.5, 1, context.pick(220, 260), 180)
        machine = hardware.per_machine

        def apart(first: int, second: int, machine: int = machine) -> float:
            return float(first // machine != second // machine)

        for near in (False, True):
            weights = mell.Weights(distance=1.0 if near else 0.0)
            settings = mell.Settings(
                slack=hardware.capacity // 48, never_more=False, weights=weights, distance=apart, candidates=16
            )
            for computing in (False, True):
                carrier = Carrier(hardware, computing)
                replay(workload.epochs, mell.Mell(hardware.capacity, settings), watch=carrier.watch)
                entry = {"hardware": hardware.name, "near_first": near, "token_path": computing, **carrier.summary()}
                found.append(entry)
                if computing:
                    what = f"{hardware.name}, 5.5/s: moves by PCIe or network{', near GPUs first' if near else ''}"
                    carried = carrier.summary()
                    report.rows.append(
                        Row(what, carried["pcie"] + carried["network"], "%", better="higher", details=carried)
                    )
    return found


def _fleet(context: Context, report: Report) -> list[dict[str, int]]:
    """Fig 6: how many requests a fixed fleet serves to their end."""
    found = []
    workload = poisson_workload(A100, 1.1, 1, context.pick(300, 900), 0)
    for fleet in _FLEETS:
        with_migration, _ = served(
            workload.epochs, mell.Mell(A100.capacity, mell.Settings(slack=0, never_more=False)), fleet
        )
        without, _ = served(workload.epochs, mell.BestFit(A100.capacity), fleet)
        found.append({"gpus": fleet, "with": with_migration, "without": without})
    best = max(found, key=lambda entry: entry["with"] / entry["without"])
    more = {f"{int(entry['gpus'])} GPUs": 100 * (entry["with"] / entry["without"] - 1) for entry in found}
    report.rows.append(
        Row(
            f"Fig 6: requests that {int(best['gpus'])} GPUs serve more with migration",
            100 * (best["with"] / best["without"] - 1),
            "%",
            better="higher",
            details=more,
        )
    )
    return found
