"""Live migration by KV and by tokens, each beside what the measured cost model predicts, and the way that it chooses.

The engines are those of bench/mell/live_stop.py, which compute, each on one processor. The destination first measures
its link, by fetches, and its steps with 0 to 64 tokens of a prompt beside them: from these `WayCosts` predicts either
way. Once rounds have 0.2 GB/s, where blocks are sooner there; once 1 MB/s, where prefilling them is. What is predicted
is the time until everything is there; what is measured is the whole migration, in which the request also grows. What a
migration takes beside that, for messages and until the end of a step, is measured with requests of one block, and
added to the prediction of either way.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from bench.context import Context
from bench.mell.live_side import BLOCK_TOKENS, SLOWDOWN
from bench.mell.live_stop import STEP_MS
from bench.remote import Remote
from bench.result import Report, Row

TITLE = "MELL: migration by KV and by tokens, beside the prediction of the cost model"
PEERS: tuple[str, ...] = ()
_BUDGETS = {"0.2 GB/s": (0.2e9, (1024, 2048, 4096)), "1 MB/s": (1e6, (256, 1024))}  # and contexts
_LONGEST = 4096
_SIZES, _TOKENS = (1, 4, 16, 64), (8, 16, 32, 64)  # blocks of a fetch; tokens beside a step
_ERROR, _CHOICE = 15.0, 1.15
_MODULE = "bench.mell.live_side"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def run(context: Context) -> Report:
    """See the module's text."""
    report = Report(
        notes=[
            f"steps of {STEP_MS:g} ms, {100 * SLOWDOWN:.0f} % longer with what is prefilled beside them; processes on "
            "one processor each",
            "a peer is the other way; the error is that of the prediction, in percent of what was measured",
        ]
    )
    for name, (bytes_per_s, contexts) in _BUDGETS.items():
        with report.guarded(name), ExitStack() as stack:
            sides = [stack.enter_context(Remote(_MODULE, environment=_ENVIRONMENT)) for _ in range(2)]
            profile = _begin(sides, bytes_per_s, context.pick(3, 9))
            report.series[name] = profile
            beside = median(_migrate(sides, "kv", BLOCK_TOKENS, at)["total_s"] for at in range(context.pick(5, 21)))
            report.rows.append(Row(f"{name}: what a migration takes beside its blocks", 1e3 * beside, "ms"))
            for tokens in contexts[:2] if context.quick else contexts:
                report.rows += _measure(sides, tokens, context.pick(1, 3), beside, f"{tokens} tokens, {name}")
    return report


def _begin(sides: list[Remote], bytes_per_s: float, rounds: int) -> dict[str, Any]:
    """Two engines, connected, of which the second knows its costs."""
    source, destination = sides
    for number, side in enumerate(sides):
        side.ask(
            "start", name=f"engine-{number}", processor=number, step_ms=STEP_MS, computes=True,
            blocks=2 * (_LONGEST + 1024) // BLOCK_TOKENS,
        )  # fmt: skip
        side.ask("begin", request=f"other-{number}", context=BLOCK_TOKENS)
    source.ask("connect", address=destination.ask("listen"))
    held = source.ask("hold", blocks=_SIZES[-1])
    profile: dict[str, Any] = destination.ask(
        "profile", peer="engine-0", blocks=held, sizes=list(_SIZES), tokens=list(_TOKENS), rounds=rounds
    )
    source.ask("give_back", blocks=held)
    source.ask("serve", bytes_per_s=bytes_per_s)
    destination.ask("serve", bytes_per_s=bytes_per_s, costs=True)
    return profile


def _migrate(sides: list[Remote], by: str, tokens: int, number: int) -> dict[str, Any]:
    """One request, which ends when it has arrived."""
    source, destination = sides
    request = f"{by} {tokens} {number}"
    source.ask("begin", request=request, context=tokens)
    source.ask("await_tokens", request=request, tokens=4)
    moved: dict[str, Any] = source.ask("migrate", request=request, to="engine-1", by=by)
    destination.ask("await_tokens", request=request, tokens=1)
    destination.ask("end", request=request)
    return moved


def _measure(sides: list[Remote], tokens: int, repeats: int, beside: float, what: str) -> list[Row]:
    costs = sides[1].ask("choose", peer="engine-0", tokens=tokens)
    predicted = {by: beside + seconds for by, seconds in costs.items()}
    took: dict[str, list[float]] = {"kv": [], "tokens": [], "auto": []}
    ways = set()
    for number in range(repeats):
        for by, times in took.items():
            moved = _migrate(sides, by, tokens, number)
            times.append(moved["total_s"])
            if by == "auto":
                ways.add(moved["way"])
    kv, by_tokens = median(took["kv"]), median(took["tokens"])
    details = {"predicted_s": predicted, "times_s": took, "chosen": sorted(ways)}
    return [
        Row(f"{what}: by KV", kv, "s", peers={"by tokens": by_tokens}, details=details),
        Row(f"{what}: error of what is predicted by KV", 100 * abs(predicted["kv"] / kv - 1), "%", _ERROR),
        Row(f"{what}: error of what is predicted by tokens", 100 * abs(predicted["tokens"] / by_tokens - 1), "%",
            _ERROR),
        Row(f"{what}: the way that is chosen, over the faster one", median(took["auto"]) / min(kv, by_tokens), "x",
            _CHOICE, details=details),
    ]  # fmt: skip
