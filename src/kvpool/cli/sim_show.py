"""The output of a simulation: progress, a table, JSON and plots."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from kvpool.errors import ArgumentError

__all__ = ["Progress", "table", "write"]

_LINE_EVERY_S = 5.0
_LEGEND = (
    "TTFT, TPOT, JCT: mean/p50/p99. Busy: share of the time in which instances compute; busiest: the busiest one's,\n"
    "for the mean. Tokens/s: generated, until the last one."
)
_LIMIT: Final = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
_PATIENCE_S = 10.0  # for a first token; a request that waits longer waits for others


class Progress:
    """Shows the progress on stderr: a bar if rich is installed and stderr is a terminal, otherwise occasional lines.

    Args:
        quiet: Show nothing.
        what: The name of the simulation.
        total: Requests, if known.
    """

    def __init__(self, quiet: bool, what: str, total: int | None) -> None:
        self._quiet, self._what, self._total = quiet, what, total
        self._bar: Any = None
        self._task: Any = None
        self._said_at = time.monotonic()
        if not quiet and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich import progress
            from rich.console import Console

            columns = (*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[done]}"))
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what, total=total, done="")

    def told(self, ended: int, now_s: float) -> None:
        """Called by `ClusterSim`: how many requests have ended at this virtual time."""
        if self._bar is not None:
            self._bar.update(self._task, completed=ended, done=f"{ended:,} requests, {now_s:,.0f} s of virtual time")
        elif not self._quiet and time.monotonic() - self._said_at >= _LINE_EVERY_S:
            self._said_at = time.monotonic()
            print(f"{self._what}: {ended:,} requests, {now_s:,.0f} s of virtual time", file=sys.stderr)

    def note(self, text: str) -> None:
        """Reports a finished step."""
        if self._bar is not None:
            self._bar.console.print(text)
        elif not self._quiet:
            print(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        """Shows it."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes it away."""
        if self._bar is not None:
            self._bar.stop()


# ---- text


def table(result: dict[str, Any]) -> str:
    """The result as a readable table."""
    head = (
        f"{result['workload']}: blocks of {result['block_tokens']} tokens; {result['model']} on {result['hardware']}, "
        f"{result['tp']} GPU(s) an instance, {result['hbm_gb_per_gpu']:.1f} GB of HBM for KV a GPU"
    )
    lines = [head, *(f"  {note}" for note in result["notes"]), ""]
    if "packed" in result:
        lines += _packed(result["policy"], result["packed"])
        return "\n".join(lines)
    lines += _columns([_row(result, run) for run in result["runs"]])
    lines += _warnings(result["runs"])
    if "gpus_needed" in result:
        lines += ["", _answer(result)]
    return "\n".join(lines)


def _row(result: dict[str, Any], run: dict[str, Any]) -> dict[str, str]:
    swept = {result["sweep"]: str(run["value"])} if result["sweep"] not in (None, "gpus", "policy", "dram") else {}
    gpus = f"{run['gpus']}" + (f" ({run['prefill']}P{run['decode']}D)" if run["prefill"] else "")
    row = {
        **swept,
        "policy": run["policy"],
        "GPUs": gpus,
        "DRAM GB": f"{run['dram_gb_per_gpu']:g}",
        "requests": f"{run['requests']['ended']:,}",
        "hits": f"{run['hit_ratio']:.1%}",
        "of DRAM": f"{run['hit_ratio_dram']:.1%}",
    }
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("JCT", "jct_s")):
        row[name] = "/".join(_short(run[key][of]) for of in ("mean", "p50", "p99"))
    row["busy"] = f"{run['utilisation']:.0%}"
    row["busiest"] = f"{run['imbalance']:.2f}x"
    row["tokens/s"] = f"{run['tokens_per_s']:,.0f}"
    for key, share in run.get("within", {}).items():
        row[f"{key.removesuffix('_s').upper()} <= {result['slo'][key]:g}s"] = f"{share:.2%}"
    if "kept" in run:
        row["SLO"] = "kept" if run["kept"] else "not kept"
    return row


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}ms" if seconds < 1 else f"{seconds:.3g}s"


def _columns(rows: list[dict[str, str]]) -> list[str]:
    names = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    lines = ["  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True))]
    lines += ["  ".join(row[name].rjust(width) for name, width in zip(names, widths, strict=True)) for row in rows]
    return [*lines, _LEGEND]


def _warnings(runs: list[dict[str, Any]]) -> list[str]:
    """Reasons why the figures are of little value."""
    lines = []
    for run in runs:
        name = f"{run['value']}: " if run["value"] is not None and len(runs) > 1 else ""
        refused, arrived = run["requests"]["refused"], run["requests"]["arrived"]
        if refused:
            lines.append(f"! {name}{refused:,} of {arrived:,} requests were refused: no instance has HBM for them")
        # A cluster that keeps up ends soon after the last arrival. One of sessions slows them down instead.
        late = run["behind_s"] > max(3 * run["jct_s"]["p50"], 0.2 * run["last_arrival_s"])
        if run["ttft_s"]["p50"] > _PATIENCE_S or (late and run["ttft_s"]["p99"] > _PATIENCE_S):
            longest = max(each["longest_queue"] for each in run["instances"])
            lines.append(
                f"! {name}overloaded: up to {longest:,} prompts waited at an instance; times say how long the workload "
                "is, not how good the cluster"
            )
    return lines


def _answer(result: dict[str, Any]) -> str:
    slo, needed = result["slo"], result["gpus_needed"]
    promised = " and ".join(
        f"{name} of {slo[key]:g} s" for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")) if slo[key] is not None
    )
    answer = f"{needed} GPUs keep" if needed is not None else f"{result['gpus_max']} GPUs do not keep"
    if result["out_of_reach"]:
        return f"No number of GPUs keeps {promised} for {slo['share']:.3g} of requests: {result['out_of_reach']}."
    line = f"{answer} {promised} for {slo['share']:.3g} of requests."
    refused = max(run["requests"]["refused"] for run in result["runs"])
    return line + (f" {refused:,} refused requests count as broken promises." if refused else "")


def _packed(policy: str, packed: dict[str, Any]) -> list[str]:
    instances, bound, gpus = packed["instances"], packed["lower_bound"], packed["gpus"]
    requests = packed["requests"]
    skipped_s = packed["measured_from_s"]
    return [
        f"{policy}: {requests['arrived']:,} requests, {requests['refused']:,} of them longer than an instance: refused",
        *([f"measured       from {skipped_s:,.0f} s on"] if skipped_s else []),
        f"GPUs           {gpus['mean']:.2f} on average, {gpus['peak']} at most",
        f"instances      {instances['mean']:.2f} on average, no packing less than {bound['mean']:.2f}; "
        f"{instances['peak']} at most, no packing less than {bound['peak']}",
        f"utilisation    {packed['utilisation']:.1%} of {packed['capacity_tokens']:,} tokens of KV an instance",
        f"migrations     {packed['moves_per_s']:.2f}/s, {packed['requests_moved_per_s']:.2f} requests/s, "
        f"{packed['moved_gb_per_s']:.2f} GB/s",
        f"stopped        {packed['redispatched']:,} requests, and computed again",
        f"A step of decoding takes {1e3 * packed['step_s']:.0f} ms; prefills are done elsewhere.",
    ]


# ---- files


def write(folder: Path, result: dict[str, Any]) -> list[str]:
    """Writes sim.json, and sim.png if matplotlib is installed.

    Returns the names of the files. Raises ArgumentError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sim.json").write_text(json.dumps(result, indent=1) + "\n")
        names = ["sim.json"]
        if importlib.util.find_spec("matplotlib") is not None:
            (_draw_packed if "packed" in result else _draw)(folder / "sim.png", result)
            names.append("sim.png")
    except OSError as error:
        raise ArgumentError(f"--out {folder}: {error}") from error
    return names


def _draw(path: Path, result: dict[str, Any]) -> None:
    """Plots the distribution of TTFT, and hits and waiting times against swept values."""
    _save(_figure(result), path, result)


def _figure(result: dict[str, Any]) -> Any:
    """A panel for the distribution; with a sweep one for times, and one for hits if anything hit."""
    from matplotlib.figure import Figure

    runs, sweep, slo = result["runs"], result["sweep"], result.get("slo")
    swept = bool(sweep) and len(runs) > 1
    hits = swept and any(run["hit_ratio"] > 0 for run in runs)
    panels = 1 + swept + hits
    figure = Figure(figsize=(5.2 * panels, 3.9), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for number, run in enumerate(runs):
        label = f"{sweep} {run['value']}" if swept else run["policy"]
        axes[0].plot(*zip(*run["ttft_cdf"], strict=True), label=label, **_told_apart(number, len(runs)))
    axes[0].set(xlabel="time to first token (s)", ylabel="share of requests", xscale="log", ylim=(0, 1))
    if slo and slo["ttft_s"] is not None:
        axes[0].axvline(slo["ttft_s"], **_LIMIT, label=f"promised: {slo['share']:.3g} within {slo['ttft_s']:g} s")
        axes[0].axhline(slo["share"], **_LIMIT)
    if swept:
        _draw_times(axes[-1], runs, slo)
        if hits:
            _draw_hits(axes[1], runs)
        for panel in axes[1:]:
            panel.set_xticks(range(len(runs)), [str(run["value"]) for run in runs])
            panel.set_xlabel(sweep)
    for panel in axes:
        panel.legend(frameon=False, fontsize=7)
    return figure


def _told_apart(number: int, of: int) -> dict[str, Any]:
    """Curves that coincide are seen all the same: the first ones are wide, the later ones narrow and broken."""
    return {
        "linewidth": 1 + 3 * (of - 1 - number) / max(1, of - 1),
        "linestyle": "-" if not number else (0, (5, number)),
    }


def _draw_hits(panel: Any, runs: list[dict[str, Any]]) -> None:
    both, hbm = ([run[key] for run in runs] for key in ("hit_ratio", "hit_ratio_hbm"))
    panel.plot(both, marker="o", label="HBM" if both == hbm else "HBM and DRAM")
    if both != hbm:
        panel.plot(hbm, marker="s", linestyle="--", label="HBM")
    panel.set(ylabel="share of prompt tokens cached", ylim=(0, 1))


def _draw_times(panel: Any, runs: list[dict[str, Any]], slo: dict[str, Any] | None) -> None:
    for of in ("p50", "p99"):
        panel.plot([run["ttft_s"][of] for run in runs], marker="o", label=f"TTFT {of}")
        panel.plot([run["jct_s"][of] for run in runs], marker="s", linestyle="--", label=f"JCT {of}")
    if slo and slo["ttft_s"] is not None:
        panel.axhline(slo["ttft_s"], **_LIMIT, label=f"promised TTFT, {slo['ttft_s']:g} s")
    panel.set(ylabel="seconds", yscale="log")


def _draw_packed(path: Path, result: dict[str, Any]) -> None:
    """Plots GPUs over time, with the lower bound; times that the figures leave out are shaded."""
    from matplotlib.figure import Figure

    packed = result["packed"]
    series, tp = packed["gpus_over_time"], result["tp"]
    figure = Figure(figsize=(7.8, 3.9), layout="constrained")
    axes = figure.subplots()
    edges = [series["step_s"] * at for at in range(len(series["mean"]) + 1)]
    axes.stairs(series["mean"], edges, label=result["policy"])
    if series["peak"] != series["mean"]:
        axes.stairs(series["peak"], edges, color="C0", alpha=0.4, label=f"{result['policy']}, peaks")
    axes.stairs(series["lower_bound"], edges, color="0.4", linestyle="--", label="no packing less")
    if packed["measured_from_s"]:
        axes.axvspan(0, packed["measured_from_s"], color="0.9", zorder=0, label="not measured")
    axes.set(xlabel="time (s)", ylabel="GPUs" if tp == 1 else f"GPUs, {tp} an instance", xlim=(0, edges[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)
    _save(figure, path, result)


def _save(figure: Any, path: Path, result: dict[str, Any]) -> None:
    """Saves a figure in the common format."""
    for panel in figure.axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['workload']}, {result['model']} on {result['hardware']}", x=0.02, ha="left", fontsize=11)
    # Without metadata: it would name the version that drew it, and change the file for nothing.
    figure.savefig(path, dpi=130, metadata={"Software": None})
