"""What a peer that dies or stops costs the others, in time.

Two or three processes on this machine. One is killed or stopped at a moment that this process notes; the clocks are the
same. Tests assert the order of these events and ten times these bounds; here are the figures.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from bench.context import Context
from bench.measure import summarize
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "Faults: time until it is noticed, deadlines, blocks of a dead owner, and the other peers"
PEERS: set[str] = set()

_SIDE = "bench.faults.side"
_ROUTES = {"shm": ["shm"], "sock": ["sock"]}
_LEASE_S = 1.0

# From reliability: milliseconds, and a ratio.
_TOLD_MS = 100.0
_RELEASED_MS = 5000.0
_SILENT_EXTRA_MS = 1000.0
_OVERSHOOT_MS = 50.0
_OTHERS_RATIO = 1.5


@dataclass(frozen=True)
class Side:
    """A process with a pool, and its pid."""

    remote: Remote
    pid: int

    def signal(self, number: int) -> int:
        """Sends it, and says when; nanoseconds of the clock that all processes have."""
        os.kill(self.pid, number)
        return time.monotonic_ns()


@contextmanager
def _sides(route: str, names: str, lease_s: float = _LEASE_S) -> Iterator[list[Side]]:
    """Processes of which the first knows all others; they are ended whatever state they are in."""
    remotes = [Remote(_SIDE) for _ in names]
    sides: list[Side] = []
    try:
        for name, remote in zip(names, remotes, strict=True):
            sides.append(Side(remote, remote.ask("start", name=name, routes=_ROUTES[route], lease_s=lease_s)))
        address = remotes[0].ask("listen")
        for remote in remotes[1:]:
            remote.ask("connect", address=address)
        yield sides
    finally:
        for side in sides[1:]:
            side.signal(signal.SIGKILL)
        for remote in remotes:
            remote.close()


def run(context: Context) -> Report:
    report = Report()
    rounds = context.pick(3, 8)
    for route in _ROUTES:
        killed = [_killed(route) for _ in range(rounds)]
        report.rows += [
            _row(f"{route}: receiver killed, until its sender is told", [told for told, _ in killed], _TOLD_MS),
            _row(f"{route}: sender killed, until all of its blocks are free", [_of_dead(route) for _ in range(rounds)],
                 _RELEASED_MS),
        ]  # fmt: skip
        stopped = [_stopped(route) for _ in range(context.pick(2, 4))]
        report.rows += [
            _row(f"{route}: peer stopped, until it is lost (lease {_LEASE_S:.0f} s)", [told for told, _, _ in stopped],
                 _LEASE_S * 1e3 + _SILENT_EXTRA_MS),
            _row(f"{route}: stopped peer ends, until what it could write is free", [free for _, free, _ in stopped],
                 _RELEASED_MS),
        ]  # fmt: skip
        if any(kept for _, _, kept in stopped):
            report.notes.append(f"{route}: {stopped[0][2]} blocks stayed in quarantine until the stopped peer ended.")
        report.rows += _deadlines(context, route)
        report.rows.append(_others(context, route))
    report.notes.append(
        "Best of the others, from their sources: UCX notices after 20 s, Mooncake after 60 s, SGLang after 300 s; vLLM "
        "releases after 30 s, Mooncake after 10 s."
    )
    return report


def _row(what: str, times_ms: list[float], target: float | None) -> Row:
    sample = summarize(times_ms)
    return Row(what, median(times_ms), "ms", target, p99=sample.p99_us, details={"all_ms": times_ms})


def _killed(route: str) -> tuple[float, float]:
    """The receiver dies within a transfer: until the sender knows, and until nothing of the receiver is left."""
    with _sides(route, "ab") as (a, b):
        b.remote.ask("attend")
        a.remote.ask("watch", peer="b", send=True)
        time.sleep(0.05)
        at = b.signal(signal.SIGKILL)
        seen = a.remote.ask("seen", wait_s=30)
    return (seen["told_ns"] - at) / 1e6, (seen["released_ns"] - at) / 1e6


def _of_dead(route: str) -> float:
    """A sender dies that had blocks lent and reserved here."""
    with _sides(route, "ab") as (a, b):
        b.remote.ask("take_blocks", peer="a")
        a.remote.ask("watch", peer="b", send=False)
        at = b.signal(signal.SIGKILL)
        seen = a.remote.ask("seen", wait_s=30)
    return float(seen["released_ns"] - at) / 1e6


def _stopped(route: str) -> tuple[float, float, int]:
    """Until a stopped peer is lost; from its end until its blocks are free; how many were kept until then."""
    with _sides(route, "ab") as (a, b):
        b.remote.ask("take_blocks", peer="a")
        a.remote.ask("watch", peer="b", send=False)
        stopped = b.signal(signal.SIGSTOP)
        kept = a.remote.ask("seen", wait_s=_LEASE_S + 1.5)
        ended = b.signal(signal.SIGKILL)
        seen = a.remote.ask("seen", wait_s=30)
    free = max(seen["released_ns"] - ended, 0) / 1e6
    return (seen["told_ns"] - stopped) / 1e6, free, kept["quarantined"]


def _deadlines(context: Context, route: str) -> list[Row]:
    """By how much a transfer to a peer that does not answer outlives its deadline."""
    rows = []
    with _sides(route, "ab", lease_s=60) as (a, b):
        b.signal(signal.SIGSTOP)
        for how, waits in (("its caller waits", True), ("nobody waits in it", False)):
            late = a.remote.ask("overshoot", peer="b", n=context.pick(60, 300), waits=waits)
            sample = summarize(late)
            rows.append(
                Row(f"{route}: deadline overshoot, p99, {how}", sample.p99_us, "ms", _OVERSHOOT_MS,
                    details={"median_ms": sample.median_us, "worst_ms": max(late), "n": sample.n})
            )  # fmt: skip
    return rows


def _others(context: Context, route: str) -> Row:
    """The 99th percentile of transfers to one peer, beside a stopped one with transfers under way and without."""
    n = context.pick(2000, 10000)
    alone, beside, stuck = [], [], 0
    with _sides(route, "abc", lease_s=60) as (a, b, c):
        for side in (b, c):
            side.remote.ask("attend")
        a.remote.ask("send", peer="b", n=n)
        for _ in range(context.pick(3, 5)):  # in turns: what disturbs the machine disturbs both
            alone.append(a.remote.ask("send", peer="b", n=n))
            c.signal(signal.SIGSTOP)
            stuck = a.remote.ask("load", peer="c", n=6)
            beside.append(a.remote.ask("send", peer="b", n=n))
            c.signal(signal.SIGCONT)
            a.remote.ask("unload")
    without = median(one["p99_us"] for one in alone)
    ratio = median(one["p99_us"] for one in beside) / without
    return Row(f"{route}: another peer's p99 beside a stopped one", ratio, "x", _OTHERS_RATIO,
               details={"alone": alone, "beside": beside, "transfers_stuck": stuck})  # fmt: skip
