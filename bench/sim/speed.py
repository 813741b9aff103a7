"""The simulator itself: events a second, and that memory does not grow with the number of requests.

An event is a call of the simulation's clock: an arrival with its routing, the end of a step that computes prompts, the
end of a run of decoding steps over which the batch stays the same, a transfer. Steps of decoding alone are not counted
one by one: they are not simulated one by one.

An arrival costs many times what other events do, so the time of an event depends on how many of them are arrivals. Of
prompts of 92,000 tokens in chunks of 2,048, one event in fifty is one: these are the cases with a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import process_time
from typing import Any, Final

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
_FEED = 500  # requests between looks at the count
_GROWTH_MIB = 64.0  # from a tenth of the events to the end


@dataclass(frozen=True)
class _Case:
    """What is simulated.

    Attributes:
        workload: A name of PRESETS.
        policy: Makes the policy.
        colocated: Instances that do both.
        apart: Instances that prefill, and as many that decode.
        rate: Requests a second.
        changes: Of the workload's shape.
        target_s: For 10 million events; None for no target.
    """

    workload: str
    policy: Callable[[], routing.Policy]
    colocated: int
    rate: float
    apart: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    target_s: float | None = None


_LONG_PROMPTS: Final = {"prompt": 92_000, "output": 200, "sigma": 0, "longest": 131_072}
_CASES: dict[str, _Case] = {
    "chat, longest prefix, 8 instances": _Case("chat", routing.LongestPrefix, 8, 24.0),
    "poisson, least load, 8 instances": _Case("poisson", routing.LeastLoad, 8, 16.0),
    "chat, longest prefix, 256 instances": _Case("chat", routing.LongestPrefix, 256, 768.0),
    "agent, queue + exec, 4 prefill and 4 decode": _Case("agent", routing.QueuePlusExec, 0, 24.0, 4),
    "long prompts, keep hits, 8 instances": _Case(
        "poisson", routing.KeepHits, 8, 0.4, changes=_LONG_PROMPTS, target_s=200.0
    ),
    "long prompts, keep hits, 1,000 instances": _Case(
        "poisson", routing.KeepHits, 1000, 50.0, changes=_LONG_PROMPTS, target_s=400.0
    ),
}
_LONG = "chat, longest prefix, 8 instances"
_SHORT_EVENTS, _TARGET_EVENTS = 100_000, 1_000_000


class Subject:
    """The simulator; see bench/remote.py."""

    def begin(self, case: str) -> None:
        shape = _CASES[case]
        blocks = int(kv_room_gb(_MODEL, _GPU) * 1e9 / (_UNIT * _MODEL.kv_bytes_per_token))
        cluster = Cluster(
            roofline(_MODEL, _GPU),
            _UNIT,
            blocks,
            shape.policy,
            dram_blocks=2 * blocks,
            colocated=shape.colocated,
            prefill=shape.apart,
            decode=shape.apart,
        )
        self._sim = ClusterSim(cluster)
        workload = generate(shape.workload, rate=shape.rate, requests=1 << 40, seed=1, **shape.changes)
        self._requests = workload.start()

    def go_on(self, events: int) -> dict[str, float]:
        """So many events more, or some above."""
        until, started = self._sim.events + events, process_time()
        while self._sim.events < until:
            self._sim.feed(islice(self._requests, _FEED))
        return {
            "events": self._sim.events,
            "arrivals": self._sim.measures.arrived,
            "seconds": process_time() - started,
            "mib": _resident_mib(),
        }

    def end(self) -> dict[str, Any]:
        measures = self._sim.finish()
        return {"requests": measures.arrived, "virtual_s": measures.end_s, "hit_ratio": measures.hit_ratio}


def run(context: Context) -> Report:
    report = Report()
    for case, shape in _CASES.items():
        if case == _LONG:
            _long(report, case, context.pick(_QUICK_EVENTS, _EVENTS))
            continue
        target_s = shape.target_s
        count = _SHORT_EVENTS if target_s is None or context.quick else _TARGET_EVENTS
        with Remote(__name__) as subject:
            subject.ask("begin", case=case)
            before = subject.ask("go_on", events=_SHORT_EVENTS // 10)
            parts = [subject.ask("go_on", events=min(count, _PART)) for _ in range(max(1, count // _PART))]
            done = subject.ask("end")
        events, seconds = parts[-1]["events"] - before["events"], sum(part["seconds"] for part in parts)
        done["arrivals_share"] = (parts[-1]["arrivals"] - before["arrivals"]) / events
        report.rows.append(Row(case, events / seconds, "events/s", better="higher", details=done))
        if target_s is not None:
            what = f"{case}: 10 million events, at the speed of {count / 1e6:g} million"
            report.rows.append(Row(what, 1e7 * seconds / events, "s", target_s))
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
