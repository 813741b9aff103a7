"""Notices when something else uses the machine while a bench runs: its figures are then worth less, and must say so."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, perf_counter_ns

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# Above these a figure counts as disturbed. A single busy process makes 1.0 cores; a quiet machine stays below 0.05.
_OTHERS_CORES_MAX = 0.10
_STEAL_CORES_MAX = 0.02
_DRIFT_MAX = 1.15
_PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>


@dataclass(frozen=True)
class Quiet:
    """How quiet the machine was during a bench.

    Attributes:
        others_cores: Cores that other processes kept busy, on average.
        steal_cores: Cores that the hypervisor gave to others.
        drift: A fixed loop took this many times longer before than after the bench, or after than before.
        load_1m: Load average at the end; the bench itself counts in it.
        busy: Why the figures count as disturbed; empty when the machine was quiet.
    """

    others_cores: float
    steal_cores: float
    drift: float
    load_1m: float
    busy: str


class Watch:
    """Watches the machine from its construction until `stop`."""

    def __init__(self) -> None:
        _keep_orphans()
        self._loop_us = _loop_us()
        self._busy_s, self._steal_s = _machine_cpu_s()
        self._own_s = _own_cpu_s()
        self._started = perf_counter()

    def stop(self) -> Quiet:
        elapsed = max(perf_counter() - self._started, 1e-3)
        busy_s, steal_s = _machine_cpu_s()
        # Ticks are counted by sampling, so on a quiet machine the difference may come out a little below zero.
        others = max(0.0, (busy_s - self._busy_s) - (_own_cpu_s() - self._own_s)) / elapsed
        steal = (steal_s - self._steal_s) / elapsed
        loop_us = _loop_us()
        drift = max(loop_us, self._loop_us) / min(loop_us, self._loop_us)
        reasons = []
        if others > _OTHERS_CORES_MAX:
            reasons.append(f"other processes kept {others:.2f} cores busy")
        if steal > _STEAL_CORES_MAX:
            reasons.append(f"the hypervisor took {steal:.2f} cores")
        if drift > _DRIFT_MAX:
            reasons.append(f"a fixed loop's time moved by {drift:.2f}x")
        return Quiet(round(others, 3), round(steal, 3), round(drift, 3), os.getloadavg()[0], "; ".join(reasons))


def _loop_us() -> float:
    """Median time of a fixed piece of work."""
    times = []
    for _ in range(21):
        start = perf_counter_ns()
        total = 0
        for number in range(10_000):
            total += number ^ total & 0xFF
        times.append((perf_counter_ns() - start) / 1000)
    return median(times)


def _machine_cpu_s() -> tuple[float, float]:
    """Seconds that all CPUs together were busy, and seconds that were stolen, since boot."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + softirq) * _TICK_S, steal * _TICK_S


def _own_cpu_s() -> float:
    """Seconds of this process and of all below it, whether they have ended or run."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + _descendants_ticks() * _TICK_S


def _keep_orphans() -> None:
    """What outlives the process that started it, as a server of forks does, comes below this one, and not to init."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants_ticks() -> int:
    """Ticks of the processes below this one that nobody has waited for, and of those that they have waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            # Fields 4 and 14 to 17 count from 1, and the second, the name, may hold blanks: count from its bracket.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    below, found = {os.getpid()}, 0
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += sum(ticks[pid] for pid in below)
    return found
