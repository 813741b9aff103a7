"""What a change of one member costs all the others, against the number of members: on one machine and over etcd.

The members are made up (crowd.py); who watches them is a `Cluster` as every member and every router has one, in a
separate process. If each of N members reports its load once a heartbeat, each pays N times the figure of one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Any

import kvpool
from bench.cluster import etcd
from bench.cluster.crowd import Crowd, EtcdCrowd, LocalCrowd
from bench.context import Context
from bench.measure import summarize
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "Members of a cluster: what a change costs the others"
PEERS: set[str] = set()

_SIZES, _QUICK_SIZES = (10, 100, 1000), (10, 100)
_CHANGES, _QUICK_CHANGES = 1000, 100
_ALONE = 50  # changes that are published one by one, and waited for
_WAIT_S = 60.0
_HEARTBEAT_S = 600.0  # of the one that watches: what it does at each is measured by itself


class Subject:
    """One that watches; see bench/remote.py."""

    def join(self, url: str, members: int) -> float:
        """Seconds until it has seen all."""
        begun = time.perf_counter()
        self._cluster = kvpool.Cluster.join(url, lease=2 * _HEARTBEAT_S, heartbeat=_HEARTBEAT_S, timeout=_WAIT_S)
        self._cluster.wait_for(n=members, timeout=_WAIT_S)
        seconds = time.perf_counter() - begun
        self._heard: list[tuple[int, int]] = []
        self._handle = self._cluster.on_change(self._hear)
        self._until(lambda: len(self._heard) >= members)
        return seconds

    def _hear(self, event: kvpool.MemberEvent) -> None:
        self._heard.append((event.member.load.requests, time.monotonic_ns()))

    def begin(self) -> None:
        """Of a measurement."""
        self._heard.clear()
        self._cpu_s = time.process_time()

    def end(self, requests: int) -> dict[str, float]:
        """When the change to this number of requests arrived, and the processor time since the beginning."""
        self._until(lambda: any(heard == requests for heard, _ in self._heard))
        (at_ns,) = (at_ns for heard, at_ns in self._heard if heard == requests)
        return {"at_ns": at_ns, "cpu_s": time.process_time() - self._cpu_s, "heard": len(self._heard)}

    def look(self, times: int) -> float:
        """Milliseconds of processor time of what is done at each heartbeat."""
        directory: Any = self._cluster._directory
        taken = []
        for _ in range(times):
            directory._look_at = 0.0
            begun = time.thread_time()
            directory.update()
            taken.append(1e3 * (time.thread_time() - begun))
        return median(taken)

    def enter(self) -> float:
        """Milliseconds until this one is a member, too; it leaves again."""
        begun = time.perf_counter()
        registration = self._cluster.register(name="newcomer", role="both", incarnation=1, timeout=_WAIT_S)
        seconds = time.perf_counter() - begun
        registration.leave()
        return 1e3 * seconds

    def _until(self, true: Any) -> None:
        until = time.monotonic() + _WAIT_S
        while not true():
            if time.monotonic() > until:
                raise TimeoutError("not heard in time")
            time.sleep(0.001)


def run(context: Context) -> Report:
    report = Report()
    sizes = _QUICK_SIZES if context.quick else _SIZES
    changes = context.pick(_QUICK_CHANGES, _CHANGES)
    with closing(LocalCrowd()) as crowd:
        for size in sizes:
            crowd.grow(size)
            with Remote(__name__) as subject:
                _observe(report, "one machine", crowd, subject, changes)
                look_ms = subject.ask("look", times=10)
                report.rows.append(Row(f"one machine, {size:,} members: a look at all, each heartbeat", look_ms, "ms"))
                _enter(report, "one machine", size, subject)
    program = etcd.find()
    if program is None:
        report.notes.append("etcd is not installed: one machine only.")
        return report
    for size in sizes:
        with etcd.Etcd(program) as server, closing(EtcdCrowd(server.port)) as many:
            many.grow(size)
            with Remote(__name__) as subject:
                _observe(report, "etcd", many, subject, changes)
                _enter(report, "etcd", size, subject)
            _watch(report, server, many, size, context.pick(10, 50))
    report.notes += _notes(report, sizes[-1])
    return report


def _observe(report: Report, where: str, crowd: Crowd, subject: Remote, changes: int) -> None:
    """One that watches: latency of a change alone, and processor time of many."""
    size = crowd.size
    joined_s = subject.ask("join", url=crowd.url, members=size)
    report.rows.append(Row(f"{where}, {size:,} members: join and see all", 1e3 * joined_s, "ms"))
    latencies, requests = [], 0
    for number in range(_ALONE):
        requests += 1
        subject.ask("begin")
        told_ns = crowd.change(1 + number % size, requests)
        latencies.append((subject.ask("end", requests=requests)["at_ns"] - told_ns) / 1e3)
    told = summarize(latencies)
    what = f"{where}, {size:,} members: a change alone, until a callback of one that watches"
    report.rows.append(Row(what, told.median_us, "us", p99=told.p99_us))
    subject.ask("begin")
    for number in range(changes):
        requests += 1
        crowd.change(1 + number % size, requests)
    seen = subject.ask("end", requests=requests)
    report.rows.append(
        Row(
            f"{where}, {size:,} members: a change, processor time of each that watches",
            1e6 * seen["cpu_s"] / changes,
            "us",
            details={"changes": changes, "heard": seen["heard"]},  # on one machine two of one member may be one
        )
    )


def _enter(report: Report, where: str, size: int, subject: Remote) -> None:
    times = [subject.ask("enter") for _ in range(5)]
    report.rows.append(Row(f"{where}, {size:,} members: register one more", median(times), "ms"))


@contextmanager
def _watching(server: etcd.Etcd, crowd: EtcdCrowd, count: int) -> Iterator[etcd.Watchers]:
    watchers = etcd.Watchers(server.port, crowd.prefix, count)
    try:
        yield watchers
    finally:
        watchers.close()


def _watch(report: Report, server: etcd.Etcd, crowd: EtcdCrowd, size: int, changes: int) -> None:
    """As many that watch as there are members: what etcd pays, and when the last of them has it."""
    with _watching(server, crowd, size) as watchers:
        cpu_s, last = server.cpu_s(), []
        for number in range(changes):
            told_ns = crowd.change(1 + number % size, 1_000_000 + number)
            last.append((watchers.wait_for_all() - told_ns) / 1e6)
        cpu_s = server.cpu_s() - cpu_s
    report.rows += [
        Row(f"etcd, {size:,} members: a change, until all {size:,} have it", median(last), "ms"),
        Row(f"etcd, {size:,} members: a change, processor time of etcd", 1e3 * cpu_s / changes, "ms"),
    ]


def _notes(report: Report, size: int) -> list[str]:
    figures = {row.what: row.value for row in report.rows}
    notes = []
    for where in ("one machine", "etcd"):
        each_us = figures[f"{where}, {size:,} members: a change, processor time of each that watches"]
        notes.append(
            f"{where}: if each of {size:,} members tells a new load every second, each spends "
            f"{each_us * size / 1e4:.0f} % of a core on hearing it."
        )
    served_ms = figures[f"etcd, {size:,} members: a change, processor time of etcd"]
    notes.append(f"etcd: then etcd itself would need {served_ms * size / 1e3:.1f} cores.")
    return notes
