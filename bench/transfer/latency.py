"""The time of one block, with and without work of the receiver, and the cost of an idle connection."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bench.context import Context
from bench.measure import Sample, summarize
from bench.remote import Remote
from bench.result import Report, Row

_SUBJECT = "bench.transfer.latency_side"
_PAUSE_S = 0.02
_TAKEN_S = 1e-4
_ROUNDS = 5

# What the issue asks for, in microseconds and wake-ups a second.
_NAMED_US = 5.0
_ACTIVE_US, _ASLEEP_US = 40.0, 150.0
_WAKEUPS_PER_S = 5.0


def run(context: Context, report: Report) -> None:
    with Remote(_SUBJECT) as receiver, Remote(_SUBJECT) as sender:
        pids = [remote.ask("start", routes=["shm", "sock"]) for remote in (receiver, sender)]
        facts = sender.ask("connect", address=receiver.ask("listen", link="unix"))
        _named(context, report, sender)
        _inserted(context, report, sender)
        _idle(context, report, pids, "wake-ups of an idle, connected pool", _WAKEUPS_PER_S)
        receiver.ask("attend")
        _notified(context, report, sender, receiver)
        _idle(context, report, pids, "wake-ups, application waits in received()", None)
        sender.ask("end_attention")
        report.series["latency"] = facts


def _named(context: Context, report: Report, sender: Remote) -> None:
    rounds = [sender.ask("named", n=context.pick(500, 2000), pause_s=0.0) for _ in range(_ROUNDS)]
    report.rows.append(_row("4 KiB block, named destination", rounds, _NAMED_US))
    # Nobody else has a part in it: what the caller's own processor takes to wake, in the rows below as well.
    rounds = [sender.ask("named", n=context.pick(10, 30), pause_s=_PAUSE_S) for _ in range(_ROUNDS)]
    report.rows.append(_row("4 KiB block, named destination, out of sleep", rounds, None))


def _inserted(context: Context, report: Report, sender: Remote) -> None:
    for when, pause_s, n, target in _moods(context):
        rounds = [sender.ask("insert", n=n, pause_s=pause_s) for _ in range(_ROUNDS)]
        report.rows.append(_row(f"4 KiB block, reserved and inserted, {when}", rounds, target))


def _notified(context: Context, report: Report, sender: Remote, receiver: Remote) -> None:
    for when, pause_s, n, target in _moods(context):
        rounds = []
        for _ in range(_ROUNDS):
            # A short pause for the application to take the item; else the next one would wait behind it.
            sender.ask("notify", n=n, pause_s=pause_s or _TAKEN_S)
            rounds.append(receiver.ask("one_way_us", n=n + 1)[1:])
        report.rows.append(_row(f"4 KiB block, application told, {when}", rounds, target))
    rounds = [sender.ask("echo", n=context.pick(100, 400)) for _ in range(_ROUNDS)]
    report.rows.append(_row("4 KiB block, application told, half of an echo", rounds, None))


def _moods(context: Context) -> tuple[tuple[str, float, int, float], ...]:
    """When the receiver was active just before, and when it sleeps: what, pause, calls a round, target."""
    return (
        ("active before", 0.0, context.pick(100, 400), _ACTIVE_US),
        ("out of sleep", _PAUSE_S, context.pick(10, 30), _ASLEEP_US),
    )


def _idle(context: Context, report: Report, pids: list[int], what: str, target: float | None) -> None:
    """Both processes are connected, and nobody asks them anything."""
    seconds = context.pick(2, 5)
    time.sleep(0.2)  # what the last question woke has gone to sleep
    before = [_wakeups(pid) for pid in pids]
    started = time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - started
    rates = [(_wakeups(pid) - count) / elapsed for pid, count in zip(pids, before, strict=True)]
    report.rows.append(Row(what, max(rates), "a second", target, details={"of_each": rates}))


def _wakeups(pid: int) -> int:
    """How often threads of a process went to sleep until now: each time something had woken them."""
    total = 0
    for status in Path("/proc", str(pid), "task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def _row(what: str, rounds: list[list[float]], target: float | None) -> Row:
    """The median of the rounds' medians; p99 and the rest of all calls."""
    whole = summarize([time_us for times in rounds for time_us in times])
    sample = Sample(median([median(times) for times in rounds]), whole.p99_us, whole.min_us, whole.n)
    details = {"sample": asdict(sample), "rounds_us": [median(times) for times in rounds]}
    return Row(what, sample.median_us, target=target, p99=sample.p99_us, details=details)
