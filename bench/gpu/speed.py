"""The CUDA kernels against the runtime's own copies in the same run, beside torch's indexing where it has a GPU.

The measuring is done by the program kvpool_gpu_bench (kernels_bench.cpp), which `make bench-gpu` builds;
KVPOOL_GPU_BENCH names another one. Ceilings are of the same run: what counts is the ratio to what cudaMemcpyAsync does
with the same number of bytes in one piece.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.context import Context
from bench.gpu import pool_swap, torch_indexing
from bench.remote import RemoteError
from bench.result import Report, Row, Skipped, failed_row

TITLE = "GPU: gather, scatter, swap and layouts against one cudaMemcpyAsync of as many bytes; launch cost"
PEERS: set[str] = set()
_CEILING = "cudaMemcpyAsync"
_NO_GPU = 77
_RUN_S_MAX = 400
_PARTS = ("device", "layouts", "bus", "launch")  # of the program
# Of the ceiling, by case; and from which length of a piece on.
_TARGETS = {
    "gather": (0.9, 16 << 10),
    "scatter": (0.9, 16 << 10),
    "swap within the device": (0.9, 16 << 10),
    "discrete to aggregated": (0.9, 16 << 10),
    "pinned to device": (0.95, 64 << 10),
    "device to pinned": (0.95, 64 << 10),
    "both ways": (0.9, 64 << 10),
}
_BUS = ("pinned to device", "device to pinned", "both ways")
_LAUNCH_US = 15.0


def run(context: Context) -> Report:
    """Runs the program and torch.

    Raises:
        Skipped: There is no GPU, or the program was not built.
        RemoteError: The program has measured nothing.
    """
    report = Report()
    device, figures = _measure(context.quick, report)
    report.series = {"device": device, "figures": figures}
    torch_rates = _torch_rates(context.quick, report)
    cases: dict[tuple[str, int], dict[str, list[float]]] = {}
    for figure in figures:
        cases.setdefault((figure["case"], figure["piece"]), {}).setdefault(figure["way"], []).extend(figure["values"])
    with report.guarded("device copy"):
        copies = cases.pop(("device copy", max(piece for case, piece in cases if case == "device copy")))
        report.notes.append(
            f"One cudaMemcpyAsync on the device moves {median(copies[_CEILING]):.0f} GB/s, read and written."
        )
    for (case, piece), ways in cases.items():
        with report.guarded(f"{case}, {_size(piece)}"):
            report.rows += _launch_rows(case, ways) if case.startswith("launch") else [_rate_row(case, piece, ways)]
            for name, rate in torch_rates.get((case, piece), {}).items():
                report.rows[-1].peers[name] = rate
    _add_pool_rows(cases, context.quick, report)
    report.notes.append(
        f"{device['device']}, sm_{device['sm']}, driver {device['driver']}, kernels for {device['kernels']}. On the "
        "device bytes read and written count, over the bus those that cross it. Pieces are scattered: no two are "
        "neighbours."
    )
    return report


def _torch_rates(quick: bool, report: Report) -> torch_indexing.Rates:
    try:
        found = torch_indexing.rates(quick)
    except Exception as error:  # a peer's: the figures are kvpool's
        found = f"torch failed: {type(error).__name__}: {error}"
    if isinstance(found, str):
        report.notes.append(found)
        return {}
    return found


def _measure(quick: bool, report: Report) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The device and all figures; each part in a separate process, so that a failure does not stop the others.

    Raises:
        Skipped: There is no GPU.
        RemoteError: No part has measured anything.
    """
    program = _program()
    device: dict[str, Any] = {}
    figures: list[dict[str, Any]] = []
    until = time.monotonic() + _RUN_S_MAX
    for part in _PARTS:
        command = [str(program), *(["--quick"] if quick else []), part]
        left_s = until - time.monotonic()
        said, error = _output_of(command, left_s if part == _PARTS[-1] else left_s / 2)  # one that hangs leaves time
        found = [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]  # the last is cut
        device = device or (found[0] if found else {})
        figures += found[1:]
        if error:
            report.rows.append(failed_row(f"{part}: what this program has not measured", error))
    if not figures:
        raise RemoteError("; ".join(row.error for row in report.rows) or f"{program.name} said nothing")
    return device, figures


def _output_of(command: list[str], seconds: float) -> tuple[str, str]:
    """What the program says, and what ended it before its time, "" for nothing."""
    error = ""
    try:
        ran = subprocess.run(command, capture_output=True, check=False, timeout=max(seconds, 0.1))
        said = ran.stdout
        why = ran.stderr.decode(errors="replace").strip()
        if ran.returncode == _NO_GPU:
            raise Skipped(why)
        if ran.returncode != 0:
            error = f"{' '.join(command)} ended with {ran.returncode}: {why[-300:]}"
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        error = f"{' '.join(command)} was not over after {seconds:.0f} s"
    return said.decode(errors="replace"), error


def _program() -> Path:
    named = os.environ.get("KVPOOL_GPU_BENCH")
    root = Path(__file__).resolve().parents[2]
    places = [Path(named)] if named else [root / "build" / part / "kvpool_gpu_bench" for part in ("gpu", "release")]
    for place in places:
        if place.is_file():
            return place
    raise Skipped("kvpool_gpu_bench is not built: `make bench-gpu` builds it where there is nvcc")


def _rate_row(case: str, piece: int, ways: dict[str, list[float]]) -> Row:
    """One rate, its ceiling, and what else does the same. Over the bus the best way of kvpool's counts."""
    rates = {way: median(values) for way, values in ways.items()}
    ceiling = rates[_CEILING]
    own = {way: rate for way, rate in rates.items() if way.startswith("kvpool")}
    best = max(own, key=lambda way: own[way]) if case in _BUS else next(iter(own))
    share, from_piece = _TARGETS.get(case, (0.0, 0))
    return Row(
        what=f"{case}, {_size(piece)}",
        value=own[best],
        unit="GB/s",
        target=share * ceiling if share and piece >= from_piece else None,
        better="higher",
        peers={way: rate for way, rate in rates.items() if way != best and not way.startswith("kvpool,")},
        details={"way": best, "of_the_ceiling": own[best] / ceiling, "medians": rates, "samples": ways},
    )


def _add_pool_rows(cases: dict[tuple[str, int], dict[str, list[float]]], quick: bool, report: Report) -> None:
    """Swap through a pool, against the same ceilings as the kernels alone."""
    for piece in pool_swap.PIECES:
        with report.guarded(f"swap through a pool, {_size(piece)}"):
            for way, values in pool_swap.rates(piece, quick).items():
                ceiling = median(cases[way, piece][_CEILING])
                share, from_piece = _TARGETS[way]
                report.rows.append(
                    Row(
                        what=f"swap through a pool, {way}, {_size(piece)}",
                        value=median(values),
                        unit="GB/s",
                        target=share * ceiling if piece >= from_piece else None,
                        better="higher",
                        peers={_CEILING: ceiling},
                        details={"of_the_ceiling": median(values) / ceiling, "samples": values},
                    )
                )


def _launch_rows(case: str, ways: dict[str, list[float]]) -> list[Row]:
    rows = []
    for way, values in ways.items():
        ordered = sorted(values)
        rows.append(
            Row(
                what=f"{case}, {way}",
                value=median(ordered),
                target=_LAUNCH_US if case == "launch" else None,
                p99=ordered[len(ordered) * 99 // 100],
                details={"n": len(ordered), "min": ordered[0]},
            )
        )
    return rows


def _size(piece: int) -> str:
    return f"{piece >> 20} MiB" if piece >= 1 << 20 else f"{piece >> 10} KiB"
