"""What is left to give out while one step is being decided."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, Literal

from kvpool.policy.multiplexing.jobs import PHASES, SHARE_STEP, Job, ModelQueues, Phase, State, Waiting

__all__ = ["Resources", "Verdict", "in_turn"]

_DECODE_LEAST: Final = 0.5  # of its share, for a decode job that begins with less

Verdict = Literal["started", "empty", "units", "compute"]  # what was missing: requests, units, or compute


def in_turn(models: Sequence[ModelQueues], last: str) -> list[ModelQueues]:
    """All models, beginning behind the one that had the last turn."""
    for at, model in enumerate(models):
        if model.name == last:
            return [*models[at + 1 :], *models[: at + 1]]
    return list(models)


class Resources:
    """Compute and memory during one step. `jobs` grows; the state that it was made from stays.

    Invariant: the shares of running jobs and of `jobs` sum up to at most 1 if those of running jobs do.

    Args:
        state: What the step sees.
        quotas: Whether quotas hold back; otherwise only memory does.
    """

    def __init__(self, state: State, quotas: bool = True) -> None:
        self.jobs: list[Job] = []
        self.share_left = 1.0 - sum(job.share for job in state.running)
        self.prefill_runs = any(job.phase == "prefill" for job in state.running)
        self._busy = {(job.model, job.phase) for job in state.running}
        self._models = state.models
        self._available = state.available
        self._quotas = quotas
        self._taken: dict[str, int] = {}  # units of the jobs of this step, by model
        self._kept_for: tuple[str, Phase] | None = None  # the queue that has first call on what all can have
        self._decode_free = False
        self._held: set[str] = set()  # models whose prompts wait until their decode has had its memory
        self._growth = self._next_blocks(state)  # units, by model
        self._shared_growth = sum(max(0, self._growth[model.name] - model.reserved) for model in state.models)

    def keep(self, model: ModelQueues, phase: Phase) -> None:
        """Keeps the memory that all can have for a queue that lacks it; others go on within their reserves.

        A prefill keeps it from prefills, a decode from all. What a model lacks only because of its limit, room for
        growth included, is kept from its own prompts alone: neighbours could not help it. Of several queues the first
        counts, a decode before a prefill.
        """
        units = next((each.units for each in model.queue(phase) if not model.misfit(each)), 0)
        if phase == "prefill":
            units += self._growth[model.name]  # as `room` asks for it
        if phase == "decode":
            self._held.add(model.name)
        first = self._kept_for is None or (self._kept_for[1] == "prefill" and phase == "decode")
        if first and units <= self._limit_left(model):
            self._kept_for = (model.name, phase)

    def let_decode(self) -> bool:
        """Lets all decode have what is kept for one; False if nothing is. Prompts still wait."""
        kept = self._kept_for is not None and self._kept_for[1] == "decode"
        self._decode_free |= kept
        return kept

    @staticmethod
    def _next_blocks(state: State) -> dict[str, int]:
        """Units of the next block of each request that decodes or is in a job, as far as the model's limit goes."""
        requests = {model.name: len(model.decode) for model in state.models}
        for job in state.running:
            requests[job.model] += len(job.requests)
        blocks = {model.name: model.block * requests[model.name] for model in state.models}
        for model in state.models:
            if model.limit is not None:
                blocks[model.name] = min(blocks[model.name], max(0, model.limit - model.used))
        return blocks

    def room(self, model: ModelQueues, phase: Phase) -> int:
        """Units that a job could have within the model's limit, whatever its quota says.

        A prompt leaves room for the next block of each request that decodes, whatever its model. Without it, prompts
        would fill the memory to the last unit, and decode would go on with the few requests that happen to need no
        block. Neighbours grow into what all can have and into their own reserves, never into this model's.
        """
        if phase == "prefill" and model.name in self._held:
            return 0
        taken = self._taken.get(model.name, 0)
        room = max(0, model.reserved - taken)
        limit = self._limit_left(model)
        growth = self._growth[model.name]
        if self._may_share(model, phase):
            others = self._shared_growth - max(0, growth - model.reserved) if phase == "prefill" else 0
            room += max(0, self._available - others)
        if phase == "prefill":
            room -= growth
            limit -= growth
        return int(max(0, min(room, limit)))

    def _may_share(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether a queue may have what all can have."""
        if self._kept_for is None or self._kept_for == (model.name, phase):
            return True
        return phase == "decode" and (self._decode_free or self._kept_for[1] == "prefill")

    def _limit_left(self, model: ModelQueues) -> float:
        return inf if model.limit is None else model.limit - model.used - self._taken.get(model.name, 0)

    def suffices(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether there is compute for a job of this phase.

        Decode begins with less than its share rather than wait: it mostly reads, and slows down by less. So it runs
        beside a prefill that leaves it a part of its share only.
        """
        least = model.share(phase) * (_DECODE_LEAST if phase == "decode" else 1.0)
        return least <= self.share_left + SHARE_STEP and self.share_left > SHARE_STEP

    def waits(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether requests wait for a job of this phase, and none runs."""
        return bool(model.queue(phase)) and (model.name, phase) not in self._busy

    def look(self, model: ModelQueues, phase: Phase) -> tuple[Verdict, list[Waiting]]:
        """What would become of a job now, and the requests that memory suffices for."""
        if not self.waits(model, phase):
            return "empty", []
        chosen = self._prompts(model) if phase == "prefill" else self._steps(model)
        if not chosen:
            return "units", []
        return ("started" if self.suffices(model, phase) else "compute"), chosen

    def lacks_memory(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether memory is what a queue lacks units of, and not its quota."""
        oldest = next((each for each in model.queue(phase) if not model.misfit(each)), None)
        return oldest is not None and oldest.units > self.room(model, phase)

    def start(self, model: ModelQueues, phase: Phase, share: float = 0.0) -> Verdict:
        """Adds a job if there is memory and compute for it; says what is missing otherwise.

        Args:
            model: Whose job.
            phase: Of the job.
            share: Its compute, in place of the model's; 0: the model's.
        """
        verdict, chosen = self.look(model, phase)
        if verdict != "started":
            return verdict
        share = share or min(model.share(phase), self.share_left)
        self.jobs.append(Job(model.name, phase, tuple([each.request for each in chosen]), share))
        self.share_left -= share
        self.prefill_runs |= phase == "prefill"
        self._busy.add((model.name, phase))
        units = sum([each.units for each in chosen])
        from_reserve = min(units, max(0, model.reserved - self._taken.get(model.name, 0)))
        self._available -= units - from_reserve
        self._taken[model.name] = self._taken.get(model.name, 0) + units
        return "started"

    def can_decode(self) -> bool:
        """Whether a job of this step runs, or a decode job has the memory to: then memory becomes free in time."""
        return bool(self.jobs) or any(self.waits(model, "decode") and self._steps(model) for model in self._models)

    def stretch(self) -> None:
        """Divides what is left of the compute among the jobs of this step, in proportion to their shares."""
        if self.jobs and self.share_left > SHARE_STEP:
            factor = 1 + self.share_left / sum(job.share for job in self.jobs)
            self.jobs = [job._replace(share=min(1.0, job.share * factor)) for job in self.jobs]
            self.share_left = 0.0

    def _quota_left(self, model: ModelQueues) -> int:
        return model.quota - model.used - self._taken.get(model.name, 0)

    def _prompts(self, model: ModelQueues) -> list[Waiting]:
        """Prompts from the front, as long as memory and quota suffice: none overtakes another of its model.

        Misfits are passed over. Where nothing of the model runs or decodes, one prompt may begin beyond the quota: it
        would never run otherwise. What the model uses is pinned then, and no job of it frees any.
        """
        room = self.room(model, "prefill")
        left = min(room, self._quota_left(model)) if self._quotas else room
        chosen: list[Waiting] = []
        limit = model.limit
        for each in model.prefill:
            if limit is not None and each.units > limit:  # a misfit
                continue
            if not chosen and each.units > left and each.units <= room and self._rests(model):
                return [each]
            left -= each.units
            if left < 0 or len(chosen) == model.prefill_batch:
                break
            chosen.append(each)
        return chosen

    def _rests(self, model: ModelQueues) -> bool:
        """Whether nothing of a model runs, starts in this step, or waits to decode."""
        return not model.decode and not any((model.name, phase) in self._busy for phase in PHASES)

    def _steps(self, model: ModelQueues) -> list[Waiting]:
        """Requests for which there is memory, whatever the quota says; one that does not fit holds nobody back.

        Requests free their blocks when they end. A model that stood still at its quota would never end one; and one
        that went on with the requests that need no block just then would end them ever more slowly.
        """
        left = self.room(model, "decode")
        waiting = model.decode[: model.decode_batch] if len(model.decode) > model.decode_batch else model.decode
        if sum([each.units for each in waiting]) <= left:
            return list(waiting)
        chosen: list[Waiting] = []
        for each in model.decode:
            if each.units <= left:
                chosen.append(each)
                left -= each.units
                if len(chosen) == model.decode_batch:
                    break
        return chosen
