"""The input and the output of a run: sessions of turns in, answers with their times and bytes out.

Plain data. The workloads make sessions, the dispatcher serves them, the report reads answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

import kvpool

Tokens = npt.NDArray[np.int32]

COLOCATED: Final = ("PD", "PD-CC")
DISAGGREGATED: Final = ("PD-Basic", "PD-Caching-1", "PD-Caching-2", "PD-Caching-3")
DESIGNS: Final = (*COLOCATED, *DISAGGREGATED)
_KEEP_PROMPTS: Final = ("PD-CC", "PD-Caching-1", "PD-Caching-2", "PD-Caching-3")  # where they are prefilled
_KEEP_ANSWERS: Final = ("PD-CC", "PD-Caching-3")  # there, too
STRATEGIES: Final = ("by_request_agg", "by_layer")

EventKind: TypeAlias = Literal["killed", "lost", "joined", "served", "noticed", "went_on"]


@dataclass(frozen=True, eq=False)
class Turn:
    """What the user adds, and how much is generated.

    Attributes:
        added: Tokens; at least one where the session has no prefix.
        new_tokens: How many are generated: exactly these, at least one.
    """

    added: Tokens
    new_tokens: int


@dataclass(frozen=True, eq=False)
class Session:
    """Turns of one user. They are causal: a turn is asked when the one before it was answered.

    Attributes:
        number: Of the session; each number once in a run.
        arrival_s: Of the first turn, in seconds from the start of the run.
        prefix: Part of every prompt: a document, instructions.
        turns: In order.
        remembers: True: prompt k is the prefix, all that was added and answered so far, and what turn k adds. False
            (questions on a document): prompt k is the prefix and what turn k adds.
        think_s: Seconds from an answer to the next turn.
    """

    number: int
    arrival_s: float
    prefix: Tokens
    turns: tuple[Turn, ...]
    remembers: bool
    think_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """One turn, served. Times in seconds from the start of the run.

    Attributes:
        session: Its number.
        turn: From 0.
        prompt_tokens: Of the prompt.
        cached_at_prefill: Of these, found in the cache where the prompt was prefilled.
        cached_at_decode: Of these, held by the decode instance already, so not sent. Colocated: 0.
        tokens: Generated.
        asked_s: When the dispatcher had it.
        first_s: When the dispatcher had its first token.
        second_s: And its second; None where one was generated.
        done_s: And its last.
        prefill: Name of the instance that prefilled it, the last one if it was tried more than once.
        decode: And that decoded it: the same one when colocated.
        bytes_to_decode: KV that was sent from prefill to decode.
        bytes_to_prefill: KV that was sent back.
        kvpool_s: Spent in calls of kvpool for this request: index, alloc, transfer, and what follows the last token.
        attempts: More than 1: an instance was lost on the way.
    """

    session: int
    turn: int
    prompt_tokens: int
    cached_at_prefill: int
    cached_at_decode: int
    tokens: tuple[int, ...]
    asked_s: float
    first_s: float
    second_s: float | None
    done_s: float
    prefill: str
    decode: str
    bytes_to_decode: int
    bytes_to_prefill: int
    kvpool_s: float
    attempts: int = 1


@dataclass(frozen=True)
class Setting:
    """Which design, on how many instances.

    Attributes:
        design: One of `DESIGNS`. "PD" is colocated, "PD-CC" colocated with a context cache.
        prefill: Instances that prefill; of a colocated design, all instances.
        decode: Instances that decode; of a colocated design 0.
        strategy: "by_request_agg": the KV of a prompt is sent when all of it is computed. "by_layer": each layer as
            soon as it is, while the next one is computed.
    """

    design: str
    prefill: int
    decode: int
    strategy: str = "by_request_agg"

    def __post_init__(self) -> None:
        """Checks it.

        Raises:
            ValueError: There is no such design or strategy, or it cannot run on so many instances.
        """
        if self.design not in DESIGNS:
            raise ValueError(f"design is {self.design!r}; it must be one of {', '.join(DESIGNS)}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy is {self.strategy!r}; it must be one of {', '.join(STRATEGIES)}")
        enough = self.decode == 0 if self.colocated else self.decode >= 1
        if self.prefill < 1 or not enough:
            wanted = "none that decode" if self.colocated else "at least one that decodes"
            raise ValueError(
                f"{self.design} needs at least one instance that prefills and {wanted}: "
                f"got {self.prefill} and {self.decode}"
            )

    @property
    def colocated(self) -> bool:
        """Whether every instance does both."""
        return self.design in COLOCATED

    @property
    def keeps_prompts(self) -> bool:
        """Whether instances that prefill keep what they have computed."""
        return self.design in _KEEP_PROMPTS

    @property
    def keeps_answers(self) -> bool:
        """Whether they have the answers, too."""
        return self.design in _KEEP_ANSWERS

    @property
    def name(self) -> str:
        """For people: "PD-Caching-3 1P1D", "PD-CC x2"."""
        where = f"x{self.prefill}" if self.colocated else f"{self.prefill}P{self.decode}D"
        return f"{self.design} {where}" + (" by layer" if self.strategy == "by_layer" else "")

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of all instances: "prefill-0", ..., "decode-0", ...; of a colocated design "instance-0", ..."""
        first = "instance" if self.colocated else "prefill"
        return (
            *(f"{first}-{number}" for number in range(self.prefill)),
            *(f"decode-{number}" for number in range(self.decode)),
        )


@dataclass(frozen=True)
class Kill:
    """An instance is killed (-9) in the middle of a run; the dispatcher starts it again.

    Attributes:
        instance: Its name: see `Setting.instances`.
        after_tokens: When so many tokens of the run have been streamed.
    """

    instance: str
    after_tokens: int


@dataclass(frozen=True)
class Event:
    """Something that happened to an instance.

    Attributes:
        at_s: Seconds from the start of the run.
        instance: Its name.
        kind: "killed": by order of the run. "lost": the dispatcher has noticed that it ended. "joined": the
            cluster has told that it is there; also at the beginning, before 0. "served": the first token of it since
            it joined. "noticed": kvpool has told it that a peer is lost. "went_on": the first token of it after another
            was killed, and the first one after it noticed that.
        peer: Of "noticed": whose loss it was. Otherwise empty.
        since_s: Of "served" and "went_on": since when there had been something to do for it. None otherwise.
    """

    at_s: float
    instance: str
    kind: EventKind
    peer: str = ""
    since_s: float | None = None


@dataclass(frozen=True)
class RunResult:
    """A run that has ended.

    Attributes:
        setting: What ran.
        answers: Of all turns of all sessions, in the order in which they were done.
        wall_s: From the start to the last answer.
        audits: Of each instance at the end, by name: its pool, audited.
        events: What happened to instances, in order.
        verified: Whether every token was compared with that of a single process. (A difference raises.)
    """

    setting: Setting
    answers: list[Answer]
    wall_s: float
    audits: dict[str, kvpool.PoolStats]
    events: list[Event] = field(default_factory=list)
    verified: bool = False

    @property
    def lost_blocks(self) -> int:
        """Blocks that are neither free nor cached at the end, in all instances. Must be 0."""
        return sum(
            medium.capacity - medium.free - medium.historical + medium.pinned
            for stats in self.audits.values()
            for medium in (stats.hbm, stats.dram)
        )
