"""How long a request stands still when it migrates live, by its context; beside stop-and-copy, and starting again.

Two engines in two processes, each on one processor, step all the time, and then every request of the batch gets a
token. The stop is the time from the last step at the source to the word that the destination decodes. The gap is the
time between the last token there and the first one here: beside the stop it has the rest of the step that the
destination's batch is in, and the step that gives the token. Both in steps. Blocks of 64 KiB, 4 KiB a token, go through
shared memory; rounds have a budget. A request that starts again is prefilled at the destination as fast as its engine
prefills a new one, 128 tokens beside each step: the gap is all of that.

In a step an engine either waits, as for its GPU, so that its processor is free for what migrates; or it computes, so
that every thread of ours waits for the processor. Then the steps of other requests are measured, too, while a request
migrates, as a multiple of those without: bytes that are copied take time of the same processor.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.context import Context
from bench.mell.live_side import BLOCK_TOKENS
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "MELL: the stop of live migration, by context, beside stop-and-copy and starting again"
PEERS: tuple[str, ...] = ()
STEP_MS = 25.0
STOP_STEPS, FOREGROUND = 1.2, 1.1
_BYTES_PER_S = 0.2e9
_CONTEXTS = (1024, 4096, 16384, 65536)
_MODULE = "bench.mell.live_side"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(
        notes=[
            f"steps of {STEP_MS:g} ms; rounds have {_BYTES_PER_S / 1e9:g} GB/s; processes on one processor each",
            "starting again is measured a few times only, once from 16k tokens on",
            "what stands as p99 is the largest of the repeats, which are too few for more",
        ]
    )
    blocks = max(_CONTEXTS) // BLOCK_TOKENS + 512
    for computes in (False, True):
        with ExitStack() as stack:
            sides = [stack.enter_context(Remote(_MODULE, environment=_ENVIRONMENT)) for _ in range(2)]
            for number, side in enumerate(sides):
                side.ask(
                    "start",
                    name=f"engine-{number}",
                    processor=number,
                    blocks=blocks,
                    step_ms=STEP_MS,
                    computes=computes,
                )
                side.ask("serve", bytes_per_s=_BYTES_PER_S)
                side.ask("begin", request=f"other-{number}", context=BLOCK_TOKENS)
            sides[0].ask("connect", address=sides[1].ask("listen"))
            stops = []
            for tokens in _CONTEXTS:
                what = f"{tokens} tokens, {'computes' if computes else 'waits'}"
                with report.guarded(what):
                    rows = _measure(sides, tokens, context.pick(7, 30), what)
                    report.rows += rows if computes else rows[:2]
                    stops.append(rows[0].value)
            if len(stops) == len(_CONTEXTS):
                mode, (least, *_, most) = "computes" if computes else "waits", _CONTEXTS
                what = f"{mode}: the stop at {most} tokens, beyond that at {least}"
                report.rows.append(Row(what, stops[-1] - stops[0], "steps", details={"stops": stops}))
    return report


def _measure(sides: list[Remote], tokens: int, rounds: int, what: str) -> list[Row]:
    alone, busy = [], []
    stops, gaps, copies = [], [], []
    agains = [
        _again(sides[0], sides[1], f"again {tokens} {number}", tokens) for number in range(3 if tokens < 16384 else 1)
    ]
    details: dict[str, Any] = {}
    for number in range(rounds):
        idle = [side.ask("now") for side in sides]
        source, destination = sides
        _begin(source, f"live {tokens} {number}", tokens)
        spans = [(side, since, side.ask("now")) for side, since in zip(sides, idle, strict=True)]
        alone.append([side.ask("steps_ms", begin=since, end=until) for side, since, until in spans])
        moved = source.ask("migrate", request=f"live {tokens} {number}", to="engine-1")
        first = destination.ask("await_tokens", request=f"live {tokens} {number}", tokens=1)[0]
        busy.append([side.ask("steps_ms", begin=moved["begin"], end=moved["end"]) for side in sides])
        stops.append(moved["stop_s"])
        gaps.append(first - moved["last"])
        details = {"rounds": moved["rounds"], "blocks": moved["blocks"], "total_s": moved["end"] - moved["begin"]}
        destination.ask("end", request=f"live {tokens} {number}")
        copies.append(_copy(source, destination, f"copied {tokens} {number}", tokens))
    step_s = median(each for pair in alone for side in pair for each in side) / 1e3
    ratios = [
        median(each for pair in busy for each in pair[side]) / median(each for pair in alone for each in pair[side])
        for side in range(2)
    ]
    details |= {"step_ms": 1e3 * step_s, "stops_ms": [1e3 * each for each in stops], "repeats": rounds}
    return [
        Row(f"{what}: the stop", median(stops) / step_s, "steps", STOP_STEPS, p99=max(stops) / step_s,
            details=details),
        Row(f"{what}: between two tokens", median(gaps) / step_s, "steps", p99=max(gaps) / step_s,
            peers={"stop-and-copy": median(copies) / step_s, "starting again": median(agains) / step_s}),
        Row(f"{what}: steps of others at the source", ratios[0], "x", FOREGROUND),
        Row(f"{what}: steps of others at the destination", ratios[1], "x", FOREGROUND),
    ]  # fmt: skip


def _begin(side: Remote, request: str, tokens: int) -> None:
    side.ask("begin", request=request, context=tokens)
    side.ask("await_tokens", request=request, tokens=8)


def _copy(source: Remote, destination: Remote, request: str, tokens: int) -> float:
    """Stop and copy: seconds between two tokens."""
    _begin(source, request, tokens)
    halted = source.ask("halt", request=request)
    first: float = destination.ask(
        "copy", request=request, peer="engine-0", length=halted["length"], blocks=halted["blocks"]
    )
    source.ask("end", request=request)
    destination.ask("end", request=request)
    return first - float(halted["last"])


def _again(source: Remote, destination: Remote, request: str, tokens: int) -> float:
    """Starting again: seconds between two tokens."""
    _begin(source, request, tokens)
    halted = source.ask("halt", request=request)
    source.ask("end", request=request)
    first: float = destination.ask("again", request=request, length=halted["length"])
    destination.ask("end", request=request)
    return first - float(halted["last"])
