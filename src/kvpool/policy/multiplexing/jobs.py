"""What a scheduler of many models sees, and what it decides: jobs, each one step of a batch of one model's requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.quotas.arguments import known, share_of, whole

__all__ = [
    "PHASES",
    "SHARE_STEP",
    "Job",
    "ModelQueues",
    "Phase",
    "State",
    "Turns",
    "Waiting",
    "misfits",
    "started",
]

Phase = Literal["prefill", "decode"]

PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")

SHARE_STEP: Final = 1e-9  # shares that differ by less are equal: they are sums of floats


class Waiting(NamedTuple):
    """A request that could take part in a job.

    Attributes:
        request: Its name.
        units: Units that its step allocates: of its prompt, or of the next block; 0 if its last block has room.
        arrived: When it came, on any clock; for FCFS.
    """

    request: Hashable
    units: int
    arrived: float = 0.0


class Job(NamedTuple):
    """One step: the prefill of some prompts, or a token more for some requests.

    Attributes:
        model: Whose.
        phase: "prefill" or "decode".
        requests: Their names.
        share: The part of the compute units that it gets, above 0 and at most 1.
    """

    model: str
    phase: Phase
    requests: tuple[Hashable, ...]
    share: float


@dataclass(frozen=True)
class ModelQueues:
    """One model's work, and what it may use.

    Attributes:
        name: Of the model.
        prefill: Prompts that wait, the oldest first. Those above `limit` are passed over: see `misfits`.
        decode: Requests that are in no job and have their prompts computed, the oldest first.
        quota: Units.
        used: Active units, including those of running jobs.
        reserved: Units that are left of its reserve: nobody else can have them.
        prefill_share: Compute of a prefill job, from the placement.
        decode_share: Compute of a decode job.
        prefill_batch: Most prompts in a job.
        decode_batch: Most requests in a job.
        limit: Active units that it can have at most, from `Tier.most`; None: nothing bounds it.
        block: Units of a block, which each request that decodes will ask for again and again: prompts leave room for
            the next one of each. 0: they leave none.

    Raises:
        ArgumentError: A share is not above 0 and at most 1, or a number is negative.
        ArgumentTypeError: A value has the wrong type.
    """

    name: str
    prefill: Sequence[Waiting] = ()
    decode: Sequence[Waiting] = ()
    quota: int = 0
    used: int = 0
    reserved: int = 0
    prefill_share: float = 1.0
    decode_share: float = 0.5
    prefill_batch: int = 8
    decode_batch: int = 256
    limit: int | None = None
    block: int = 0

    def __post_init__(self) -> None:
        share_of(self.prefill_share, f"prefill_share of {self.name!r}")
        share_of(self.decode_share, f"decode_share of {self.name!r}")
        for what in ("quota", "used", "reserved", "block"):
            whole(getattr(self, what), f"{what} of {self.name!r}")
        for what in ("prefill_batch", "decode_batch"):
            whole(getattr(self, what), f"{what} of {self.name!r}", 1)
        if self.limit is not None:
            whole(self.limit, f"limit of {self.name!r}")
        for waiting in (self.prefill, self.decode):
            if waiting:
                whole(min(each.units for each in waiting), f"units of a request of {self.name!r}")

    def misfit(self, waiting: Waiting) -> bool:
        """Whether a request asks for more than the model can ever have."""
        return self.limit is not None and waiting.units > self.limit

    def queue(self, phase: Phase) -> Sequence[Waiting]:
        """The requests that wait for a job of this phase."""
        return self.prefill if phase == "prefill" else self.decode

    def share(self, phase: Phase) -> float:
        """The compute of a job of this phase."""
        return self.prefill_share if phase == "prefill" else self.decode_share

    def batch(self, phase: Phase) -> int:
        """The most requests in a job of this phase."""
        return self.prefill_batch if phase == "prefill" else self.decode_batch


@dataclass(frozen=True)
class Turns:
    """Whose turn it is; the memory of a scheduler from one step to the next.

    Attributes:
        prefill: The model of the last prefill job; "" before the first.
        decode: The model of the last decode job.
        last: The model of the last job of either phase.
        passed: By model and phase: jobs that started while requests of it waited. Of a prefill, only prefill jobs of
            other models; of a decode, all other jobs. A queue that is empty, or had its turn, is not named.
    """

    prefill: str = ""
    decode: str = ""
    last: str = ""
    passed: Mapping[tuple[str, Phase], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "passed", dict(self.passed))


@dataclass(frozen=True)
class State:
    """What a scheduler decides from. Immutable.

    Attributes:
        models: All of them, in the order of their turns.
        available: Units that any model can have: free, or evictable without touching a reserve. Of a `Tier`, that is
            capacity - committed.
        running: Jobs that have not ended.
        turns: From `started` after the last step.

    Raises:
        ArgumentError: Two models have one name, a running job is of an unknown model, its share is not above 0 and at
            most 1, or `available` is negative.
        ArgumentTypeError: A value has the wrong type.
    """

    models: Sequence[ModelQueues]
    available: int
    running: Sequence[Job] = ()
    turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        names = {model.name for model in self.models}
        if len(names) < len(self.models):
            raise ArgumentError("two models have the same name")
        whole(self.available, "available")
        for job in self.running:
            share_of(job.share, f"the share of a running job of {known(job.model, names)!r}")


def misfits(state: State) -> list[tuple[str, Hashable]]:
    """The model and name of each prompt above its model's limit: no scheduler starts it, so an engine refuses it."""
    return [(model.name, each.request) for model in state.models for each in model.prefill if model.misfit(each)]


def started(state: State, jobs: Sequence[Job]) -> State:
    """The state when these jobs of a step have started: their requests no longer wait, and their units are used.

    Raises:
        ArgumentError: A job names a model or a request that does not wait.
    """
    models = {model.name: model for model in state.models}
    available = state.available
    for job in jobs:
        model = models[known(job.model, models)]
        waiting = {each.request: each.units for each in model.queue(job.phase)}
        chosen = set(job.requests)
        if not chosen <= waiting.keys() or len(chosen) < len(job.requests):
            raise ArgumentError(
                f"a {job.phase} job of {job.model!r} has requests that do not wait for one, or one twice"
            )
        units = sum(waiting[request] for request in job.requests)
        from_reserve = min(units, model.reserved)
        available -= units - from_reserve
        left = tuple(each for each in model.queue(job.phase) if each.request not in chosen)
        model = replace(model, used=model.used + units, reserved=model.reserved - from_reserve)
        models[job.model] = replace(model, prefill=left) if job.phase == "prefill" else replace(model, decode=left)
    return replace(
        state,
        models=tuple(models.values()),
        available=available,
        running=(*state.running, *jobs),
        turns=_turns_after(state, jobs),
    )


def _turns_after(state: State, jobs: Sequence[Job]) -> Turns:
    turns = state.turns
    served = {(job.model, job.phase) for job in jobs} | {(job.model, job.phase) for job in state.running}
    passed: dict[tuple[str, Phase], int] = {}
    for model in state.models:
        prefills = sum(job.phase == "prefill" and job.model != model.name for job in jobs)
        if model.prefill and (model.name, "prefill") not in served:
            passed[model.name, "prefill"] = turns.passed.get((model.name, "prefill"), 0) + prefills
        if model.decode and (model.name, "decode") not in served:
            passed[model.name, "decode"] = turns.passed.get((model.name, "decode"), 0) + len(jobs)
    last: dict[Phase, str] = {job.phase: job.model for job in jobs}
    return Turns(
        last.get("prefill", turns.prefill),
        last.get("decode", turns.decode),
        jobs[-1].model if jobs else turns.last,
        passed,
    )
