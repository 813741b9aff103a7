"""The simulator itself: events a second, and that memory does not grow with the number of requests.

An event is a call of the simulation's clock: an arrival with its routing, the end of a batch of prefills, the end of a
run of decoding steps over which the batch stays the same, a transfer. Steps of decoding are not counted one by one:
they are not simulated one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any

from bench.context import Context
from bench.remote import Remote
from bench.result import Report, Row
from kvpool.policy import routing
from kvpool.sim.cluster import Cluster, ClusterSim
from kvpool.sim.generators import generate
from kvpool.sim.hardware import GPUS, MODELS, kv_room_gb, roofline

TITLE = "The simulator: events a second, and memory"
PEERS: tuple[str, ...] = ()
_GPU, _MODEL = GPUS["A100-80GB"], MODELS["llama-3-8b"]
_UNIT = 16
_EVENTS, _QUICK_EVENTS = 10_000_000, 100_000
_PART = 100_000  # events of a question, which must not take ten minutes
_FEED = 2_000  # requests between looks at the count
_GROWTH_MIB = 64.0  # from a tenth of the events to the end
# Name: workload, policy, colocated instances, instances that prefill and that decode, requests a second.
_CASES: dict[str, tuple[str, Callable[[], routing.Policy], int, int, int, float]] = {
    "chat, longest prefix, 8 instances": ("chat", routing.LongestPrefix, 8, 0, 0, 24.0),
    "poisson, least load, 8 instances": ("poisson", routing.LeastLoad, 8, 0, 0, 16.0),
    "chat, longest prefix, 256 instances": ("chat", routing.LongestPrefix, 256, 0, 0, 768.0),
    "agent, queue + exec, 4 prefill and 4 decode": ("agent", routing.QueuePlusExec, 0, 4, 4, 24.0),
}
_LONG = "chat, longest prefix, 8 instances"
_SHORT_EVENTS = 100_000


class Subject:
    """The simulator; see bench/remote.py."""

    def begin(self, case: str) -> None:
        workload, policy, colocated, prefill, decode, rate = _CASES[case]
        blocks = int(kv_room_gb(_MODEL, _GPU) * 1e9 / (_UNIT * _MODEL.kv_bytes_per_token))
        cluster = Cluster(
            roofline(_MODEL, _GPU),
            _UNIT,
            blocks,
            policy,
            dram_blocks=2 * blocks,
            colocated=colocated,
            prefill=prefill,
            decode=decode,
        )
        self._sim = ClusterSim(cluster)
        self._requests = generate(workload, rate=rate, requests=1 << 40, seed=1).start()

    def go_on(self, events: int) -> dict[str, float]:
        """So many events more, or some above."""
        until, started = self._sim.events + events, process_time()
        while self._sim.events < until:
            self._sim.feed(islice(self._requests, _FEED))
        return {"events": self._sim.events, "seconds": process_time() - started, "mib": _resident_mib()}

    def end(self) -> dict[str, Any]:
        measures = self._sim.finish()
        return {"requests": measures.arrived, "virtual_s": measures.end_s, "hit_ratio": measures.hit_ratio}


def run(context: Context) -> Report:
    report = Report()
    for case in _CASES:
        if case == _LONG:
            _long(report, case, context.pick(_QUICK_EVENTS, _EVENTS))
            continue
        with Remote(__name__) as subject:
            subject.ask("begin", case=case)
            before = subject.ask("go_on", events=_SHORT_EVENTS // 10)
            part = subject.ask("go_on", events=_SHORT_EVENTS)
            done = subject.ask("end")
        speed = (part["events"] - before["events"]) / part["seconds"]
        report.rows.append(Row(case, speed, "events/s", better="higher", details=done))
    report.notes.append(
        f"Llama-3-8B on A100-80GB by the roofline, blocks of {_UNIT} tokens, DRAM of twice the HBM. Processor "
        "time of one core; routing, trees and indexes are the real ones."
    )
    return report


def _long(report: Report, case: str, events: int) -> None:
    """The one that shows that memory stays."""
    points: list[dict[str, float]] = []
    with Remote(__name__) as subject:
        subject.ask("begin", case=case)
        while not points or points[-1]["events"] < events:
            points.append(subject.ask("go_on", events=min(_PART, events // 10)))
        done = subject.ask("end")
    total, seconds = points[-1]["events"], sum(point["seconds"] for point in points)
    early = next(point for point in points if point["events"] >= total / 10)
    growth = max(point["mib"] for point in points) - early["mib"]
    report.rows += [
        Row(case, total / seconds, "events/s", better="higher", details=done),
        Row(f"{case}: {total / 1e6:.1f} million events, {done['requests'] / 1e6:.2f} million requests", seconds, "s"),
        Row(f"{case}: memory at the end", points[-1]["mib"], "MiB"),
        Row(f"{case}: more than after a tenth of the events", growth, "MiB", _GROWTH_MIB),
    ]
    report.series = {"points": points}


def _resident_mib() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024
