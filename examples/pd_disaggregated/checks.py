"""The promises of the study, and whether a run keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pd_disaggregated.study import LEASE_S, ONE_EACH, Measured

_TTFT_GAIN_MIN = 1.8
_KVPOOL_SHARE_MAX = 3.0  # per cent
_SURVIVE_S = 1.0  # and a lease: until those that are left serve on
_SERVES_S_MAX = 2.0  # until one that was started again serves


@dataclass(frozen=True)
class Check:
    """One promise and its figure.

    Attributes:
        what: For people.
        value: As measured.
        unit: Of value and target; may be empty.
        target: At least, or at most, see `better`. None: a figure to compare with, which promises nothing.
        better: Which way is good.
    """

    what: str
    value: float
    unit: str
    target: float | None
    better: Literal["lower", "higher"]

    @property
    def met(self) -> bool | None:
        """Whether the value is on the right side of the target, or on it; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def check(runs: Sequence[Measured]) -> list[Check]:
    """All promises that these runs can say something about."""
    return [
        *_hits(runs),
        *_bytes(runs),
        *_ttft(runs),
        *_kvpool(runs),
        *_sameness(runs),
        *_deaths(runs),
    ]


def _hits(runs: Sequence[Measured]) -> Iterator[Check]:
    """Caching at prefill by turn, in conversations: all of their sessions have the same number of turns.

    What PD-Caching-3 adds to PD-Caching-2 is what decode computed; of this, one finds more with every turn, the other
    nothing. The whole hit ratio of PD-Caching-2 is not flat, whatever the paper says: an instance keeps all that it
    prefills, so with every turn the prompt of the turn before is a greater share of the prompt.
    """
    designs = _by_design(runs, "chat")
    if "PD-Caching-2" in designs:
        turns = designs["PD-Caching-2"].summary.turns
        what = "chat, PD-Caching-2: found at prefill of what decode computed, at most in any turn"
        yield Check(what, max(turn.decoded_tokens for turn in turns), "tokens", 0.0, "lower")
        what = "chat, PD-Caching-2: prefill hit ratio in all, from the second turn to the last"
        yield Check(what, 100 * (turns[-1].hit_at_prefill - turns[1].hit_at_prefill), "points", None, "lower")
    if "PD-Caching-3" in designs:
        turns = designs["PD-Caching-3"].summary.turns
        what = "chat, PD-Caching-3: found at prefill of what decode computed, smallest step from turn to turn"
        yield Check(what, _smallest_step([turn.decoded_tokens for turn in turns]), "tokens", 1.0, "higher")
        what = "chat, PD-Caching-3: prefill hit ratio in all, smallest step from turn to turn"
        yield Check(what, 100 * _smallest_step([turn.hit_at_prefill for turn in turns]), "points", 0.0, "higher")


def _smallest_step(values: Sequence[float]) -> float:
    return min(after - before for before, after in itertools.pairwise(values))


def _bytes(runs: Sequence[Measured]) -> Iterator[Check]:
    """The target is a figure of the run itself: the share of the sent blocks that decode instances held already."""
    for name in dict.fromkeys(run.cell.workload for run in runs):
        designs = _by_design(runs, name)
        if not {"PD-Caching-1", "PD-Caching-2"} <= set(designs):
            continue
        all_of_it, new = designs["PD-Caching-1"].summary, designs["PD-Caching-2"].summary
        saved = all_of_it.bytes_to_decode - new.bytes_to_decode
        share = new.cached_at_decode * _bytes_per_token()
        yield Check(
            f"{name}: bytes to decode saved from PD-Caching-1 to -2, against what decode held",
            100 * saved / all_of_it.bytes_to_decode,
            "%",
            100 * share / all_of_it.bytes_to_decode,
            "higher",
        )


def _ttft(runs: Sequence[Measured]) -> Iterator[Check]:
    """The worst of all loads, for each pair that differs by the cache alone."""
    for without, cached in (("PD", "PD-CC"), ("PD-Basic", "PD-Caching-3")):
        gains = [
            run.summary.ttft_s.mean / other.summary.ttft_s.mean
            for run in runs
            for other in runs
            if (run.cell.workload, run.cell.setting.design) == ("react", without)
            and other.cell.setting.design == cached
            and _asked(run) == _asked(other)
            and (run.cell.setting.prefill, run.cell.setting.decode)
            == (other.cell.setting.prefill, other.cell.setting.decode)
        ]
        if gains:
            what = f"react: mean TTFT of {without} over that of {cached}, worst of {len(gains)}"
            yield Check(what, min(gains), "times", _TTFT_GAIN_MIN, "higher")


def _kvpool(runs: Sequence[Measured]) -> Iterator[Check]:
    undisturbed = [run for run in runs if not run.cell.kill]
    if undisturbed:
        worst = max(undisturbed, key=lambda run: run.summary.kvpool_share)
        what = f"kvpool's share of a request's time, worst run: {worst.cell.name}"
        yield Check(what, 100 * worst.summary.kvpool_share, "%", _KVPOOL_SHARE_MAX, "lower")


def _sameness(runs: Sequence[Measured]) -> Iterator[Check]:
    """The questions of a workload do not depend on setting or load, so neither may the answers."""
    expected: dict[tuple[str, int, int], dict[tuple[int, int], tuple[int, ...]]] = {}
    different = answers = 0
    for run in runs:
        first = expected.setdefault((run.cell.workload, run.cell.sessions, run.cell.seed), run.tokens)
        answers += len(run.tokens)
        different += sum(first[place] != tokens for place, tokens in run.tokens.items())
    if runs:
        yield Check(f"answers that differ between settings, of {answers:,}", different, "", 0, "lower")
        yield Check(
            "runs that were not compared with one process", sum(not run.verified for run in runs), "", 0, "lower"
        )
        yield Check("blocks that are neither free nor cached at the end of a run", _lost(runs), "", 0, "lower")


def _lost(runs: Sequence[Measured]) -> int:
    return max(run.lost_blocks for run in runs)


def _deaths(runs: Sequence[Measured]) -> Iterator[Check]:
    """Each run with kills. Who had nothing to do after a kill has its time count from when it had; see `deaths`."""
    for run in runs:
        if not run.cell.kill:
            continue
        yield from _whole(run)
        yield from _survivors(run)
        what = "kills: instances that were started again and have served"
        yield Check(what, len(run.returns_s), "", len(run.cell.kill), "higher")
        if run.returns_s:
            what = (
                f"kills: from joining to the first token of one that was started again, worst of {len(run.returns_s)}"
            )
            yield Check(what, max(run.returns_s), "s", _SERVES_S_MAX, "lower")


def _whole(run: Measured) -> Iterator[Check]:
    """What the kills must not have done to requests, tokens and blocks."""
    killed = sum(event.kind == "killed" for event in run.events)
    yield Check("kills: instances killed (-9) in the middle of a run", killed, "", len(run.cell.kill), "higher")
    ended = run.summary.requests if run.verified else 0
    what = "kills: requests that ended with the tokens of one process"
    yield Check(what, ended, "", run.cell.made().requests, "higher")
    # Else the killed ones had nothing to do, and the run shows nothing.
    yield Check("kills: of these, begun again after a kill", run.summary.retried, "", 1, "higher")
    yield Check("kills: instances whose pool was audited at the end", run.audited, "", run.cell.instances, "higher")
    yield Check("kills: blocks lost in all of them", run.lost_blocks, "", 0, "lower")


def _survivors(run: Measured) -> Iterator[Check]:
    """What the kills must not have done to the others."""
    yield Check("kills: instances that ended and were not killed", run.strays, "", 0, "lower")
    if run.noticed_s:
        what = f"kills: until an instance that had met a killed one is told, worst of {len(run.noticed_s)}"
        yield Check(what, max(run.noticed_s), "s", LEASE_S, "lower")
    what = "kills: other instances that gave tokens after it, of all kills"
    yield Check(what, len(run.silences_s), "", len(run.cell.kill), "higher")
    if run.silences_s:
        what = f"kills: from a kill to the next token of another instance, worst of {len(run.silences_s)}"
        yield Check(what, max(run.silences_s), "s", LEASE_S + _SURVIVE_S, "lower")


def _by_design(runs: Sequence[Measured], workload: str) -> dict[str, Measured]:
    """The undisturbed 1P1D run of each design, sent by request, at the load at which all designs ran."""
    chosen: dict[float, dict[str, Measured]] = {}
    for run in runs:
        cell = run.cell
        if cell.workload == workload and not cell.kill and cell.setting in ONE_EACH:
            chosen.setdefault(cell.rate, {})[cell.setting.design] = run
    return max(chosen.values(), key=len, default={})


def _asked(run: Measured) -> tuple[object, ...]:
    cell = run.cell
    return cell.workload, cell.rate, cell.sessions, cell.seed, cell.instances, cell.setting.strategy


def _bytes_per_token() -> int:
    from llama import LlamaConfig
    from serving import kv_layout

    layout = kv_layout(LlamaConfig())
    return layout.block_bytes // layout.block_tokens
