"""Runs the named benches, or all, and writes their results."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.context import Context
from bench.peers.find import SINGLE, Peers
from bench.quiet import Watch
from bench.remote import RemoteError
from bench.result import Report, Skipped
from bench.show import Screen

# In this order. Each module has a TITLE and `run(context)`; PEERS, where it has it, names the peers that it asks.
BENCHES = {
    "alloc": "bench.api.alloc",
    "index": "bench.api.index",
    "keyed-index": "bench.api.keyed",
    "scale": "bench.api.scale",
    "swap": "bench.api.swap",
    "storage": "bench.tiers.storage",
    "disk": "bench.tiers.disk",
    "runs": "bench.api.runs",
    "attention": "bench.attention.decode",
    "attention-peers": "bench.attention.peers",
    "transfer": "bench.transfer.speed",
    "remote-match": "bench.transfer.remote_match",
    "fetch-into": "bench.transfer.fetch_into",
    "faults": "bench.faults.survive",
    "cluster": "bench.cluster.fanout",
    "fig8": "bench.memserve.fig8",
    "fig9": "bench.memserve.fig9_api",
    "fig10": "bench.memserve.fig10_index",
    "fig11": "bench.memserve.fig11_layouts",
    "fig12": "bench.memserve.fig12_strategies",
    "fig13": "bench.memserve.fig13_ttft",
    "fig14": "bench.memserve.fig14_cost",
    "fig15": "bench.memserve.fig15_routing",
    "mooncake": "bench.memserve.mooncake",
    "routing-load": "bench.memserve.routing_load",
    "decision": "bench.memserve.decision",
    "mell": "bench.mell.study",
    "scaling": "bench.mell.scaling",
    "live-stop": "bench.mell.live_stop",
    "live-ways": "bench.mell.live_ways",
    "live": "bench.mell.live",
    "settle": "bench.lending.settlement",
    "multiplexing": "bench.multiplexing.policies",
    "space": "bench.multiplexing.space",
    "mux-loads": "bench.multiplexing.loads",
    "mux-popularity": "bench.multiplexing.popularity",
    "mux-shifts": "bench.multiplexing.shifts",
    "mux-placements": "bench.multiplexing.placements",
    "mux-resources": "bench.multiplexing.resources",
    "mux-schedulers": "bench.multiplexing.schedulers",
    "dist-contexts": "bench.distattention.contexts",
    "dist-serving": "bench.distattention.serving",
    "dist-migration": "bench.distattention.migration",
    "dist-border": "bench.distattention.border",
    "dist-fragments": "bench.distattention.fragments",
    "dist-breakdown": "bench.distattention.breakdown",
    "dist-remote": "bench.distattention.remote",
    "vllm-ttft": "bench.engines.vllm_ttft",
    "vllm-tiers": "bench.engines.vllm_tiers",
    "vllm-pd": "bench.engines.vllm_pd",
    "vllm-router": "bench.engines.vllm_router",
    "vllm-fit": "bench.engines.vllm_fit",
    "sim": "bench.sim.speed",
    "gpu": "bench.gpu.speed",
    "gpu-links": "bench.gpu.links",
    "gpu-fig11": "bench.gpu.fig11",
}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.list:
        for name, module in BENCHES.items():
            print(f"{name:17}{importlib.import_module(module).TITLE}")
        return 0
    screen = Screen()
    described = machine.describe()
    screen.line(f"kvpool bench{' --quick' if options.quick else ''}: {machine.one_line(described)}", style="bold")
    started = time.perf_counter()
    missed: list[str] = []
    failed: list[str] = []
    names = options.names or BENCHES
    with Peers(_peers_of(names), wanted=not options.no_peers, quick=options.quick) as peers:
        peers.wait()
        described["peers"] = peers.versions
        for name, version in peers.versions.items():
            screen.line(f"  {name}: {version}", style="dim")
        told = _tell(screen, peers, 0)
        context = Context(options.quick, options.out, peers)
        for name in names:
            try:
                report = _run(name, context, screen, described)
            except Skipped as reason:
                screen.line(f"\n{name} skipped: {reason}", style="yellow")
                continue
            except RemoteError as error:
                failed.append(name)
                screen.line(f"\n{name} failed: {error}", style="bold red")
                continue
            except Exception as error:  # a bug in one must not cost the figures of the others
                failed.append(name)
                screen.line(f"\n{name} failed: {type(error).__name__}: {error}", style="bold red")
                screen.line(traceback.format_exc(), style="dim")
                continue
            failed += [f"{name}: {row.what}" for row in report.rows if row.error]
            missed += [f"{name}: {row.what}" for row in report.rows if row.met is False]
            told = _tell(screen, peers, told)
    screen.line()
    screen.line(f"{time.perf_counter() - started:.0f} s. Figures and plots: {options.out}")
    for row in missed:
        screen.line(f"  target missed: {row}", style="red")
    for row in failed:
        screen.line(f"  failed: {row}", style="bold red")
    return 1 if failed else 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py", description="Measures kvpool, beside the peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benches: {', '.join(BENCHES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="smaller trees and fewer repetitions: about a minute")
    parser.add_argument("--no-peers", action="store_true", help="kvpool alone")
    parser.add_argument("--list", action="store_true", help="name the benches and leave")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for JSON and plots")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in BENCHES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; the benches are {', '.join(BENCHES)}")
    return options


def _peers_of(names: Iterable[str]) -> set[str]:
    """The peers that these benches ask."""
    return {peer for name in names for peer in getattr(importlib.import_module(BENCHES[name]), "PEERS", SINGLE)}


def _tell(screen: Screen, peers: Peers, told: int) -> int:
    """Prints what has been noted about peers since; returns how many notes there are."""
    for note in peers.notes[told:]:
        screen.line(f"  {note}", style="dim")
    return len(peers.notes)


def _run(name: str, context: Context, screen: Screen, described: dict[str, Any]) -> Report:
    module = importlib.import_module(BENCHES[name])
    watch = Watch()
    started = time.perf_counter()
    report: Report = module.run(context)
    seconds = time.perf_counter() - started
    quiet = watch.stop()
    screen.report(f"{module.TITLE}  [{name}, {seconds:.0f} s]", report, quiet.busy)
    _write(
        context.out / f"{name}.json",
        {
            "bench": name,
            "title": module.TITLE,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "quick": context.quick,
            "seconds": seconds,
            "machine": described,
            "quiet": dataclasses.asdict(quiet),
            "peers_left_out": context.peers.notes,
            "rows": [row.as_json() for row in report.rows],
            "notes": report.notes,
            "series": report.series,
            "plots": report.plots,
        },
    )
    return report


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(content), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Floats to five significant digits: more are noise, and make the files hard to compare."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
