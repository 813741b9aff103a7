"""What the scheduler's side tells the worker's side, once a step, and what the workers tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.engines.vllm.groups import Named

__all__ = [
    "NULL_BLOCK",
    "GroupBlocks",
    "LoadPlan",
    "SavePlan",
    "SendPlan",
    "StepPlan",
    "WorkerReport",
    "ids",
    "needed_from",
]


GroupBlocks = Sequence[Sequence[int]]  # vLLM's blocks of a request, for each group of layers
NULL_BLOCK = 0  # stands in the place of a block that a group does not need (sliding window)


@dataclass(frozen=True)
class LoadPlan:
    """A load of one request and one group: blocks of its pinned match, from `first` on, into vLLM's `blocks`.

    To workers in other processes goes, instead of `first`:

    Attributes:
        group: Of layers.
        number: By which they report its end.
        source: Numbers of the blocks in DRAM, one for each of `blocks`; None: the match was given up.
    """

    request_id: str
    first: int
    blocks: npt.NDArray[np.int64]
    number: int = 0
    source: npt.NDArray[np.int64] | None = None
    group: int = 0


@dataclass(frozen=True)
class SavePlan:
    """A prompt of whole blocks, and vLLM's blocks of one group that hold it, from `first` on, when the step has ended.

    To workers in other processes goes, instead of the tokens:

    Attributes:
        number: By which they report its end.
        target: Numbers of the blocks in DRAM, for the last of `blocks`; the others are cached.
    """

    request_id: str
    namespace: str
    tokens: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int64]
    number: int = 0
    target: npt.NDArray[np.int64] | None = None
    first: int = 0


@dataclass(frozen=True)
class SendPlan:
    """The beginning of a prompt in whole blocks, for another engine, and vLLM's blocks that hold it after the step.

    Attributes:
        peer: The other engine's name in the cluster.
        id: Of the prompt, for the receiver; where there are several groups, of the prompt and the group.
        last: Nothing of the prompt follows for this group.
        group: Of layers.
        saved: Of a tail: the whole prompt of which it is the end, as this engine has saved it.
    """

    request_id: str
    namespace: str
    tokens: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int64]
    peer: str
    id: str
    last: bool
    group: int = 0
    saved: Named | None = None


@dataclass
class StepPlan:
    """What a step does besides computing.

    Attributes:
        loads: Before it, or beside it.
        saves: After it.
        written: Blocks that it may write; None: any.
        restored: Blocks that it computes anew, after a load into them has failed.
        sends: After it, or layer by layer during it. Not for workers in other processes.
        emptied: Numbers of blocks in DRAM that a save has failed to fill, and that nobody loads as such any more.
        tickets: With which the workers join the scheduler's pool, by their numbers; in the first plan.
    """

    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    written: set[int] | None = field(default_factory=set)
    restored: set[int] = field(default_factory=set)
    sends: list[SendPlan] = field(default_factory=list)
    emptied: set[int] = field(default_factory=set)
    tickets: dict[int, str] = field(default_factory=dict)


@dataclass
class WorkerReport:
    """What has ended at workers since their last report.

    Attributes:
        loads: The numbers of loads, and at how many workers they have ended, well or not.
        saves: The same of saves.
        failed: Numbers of saves that were not carried out by some worker.
        unfilled: vLLM's blocks that loads should have filled and did not.
        joins: How many workers have used their tickets, well or not.
    """

    loads: dict[int, int] = field(default_factory=dict)
    saves: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    unfilled: set[int] = field(default_factory=set)
    joins: int = 0

    def add(self, other: WorkerReport) -> None:
        """Adds what has ended at other workers."""
        for mine, theirs in ((self.loads, other.loads), (self.saves, other.saves)):
            for number, workers in theirs.items():
                mine[number] = mine.get(number, 0) + workers
        self.failed |= other.failed
        self.unfilled |= other.unfilled
        self.joins += other.joins

    def __bool__(self) -> bool:
        """Whether anything has ended."""
        return bool(self.loads or self.saves or self.joins)


def ids(blocks: Iterable[int]) -> npt.NDArray[np.int64]:
    """Block ids of vLLM as an array."""
    return np.fromiter(blocks, np.int64)


def needed_from(blocks: Sequence[int]) -> int:
    """How many of a group's first blocks vLLM has dropped. Those that it needs are the last ones, without a gap."""
    if NULL_BLOCK not in blocks:
        return 0
    needed = 0
    while blocks[-1 - needed] != NULL_BLOCK:
        needed += 1
    return len(blocks) - needed
