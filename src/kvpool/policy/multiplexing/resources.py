"""What is left to give out while one step is being decided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvpool.policy.multiplexing.jobs import SHARE_STEP, Job, ModelQueues, Phase, State, Waiting

__all__ = ["Resources", "Verdict", "in_turn"]

Verdict = Literal["started", "empty", "memory", "quota", "compute"]


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

    def room(self, model: ModelQueues) -> int:
        """Units that a model could have, whatever its quota says."""
        return self._available + max(0, model.reserved - self._taken.get(model.name, 0))

    def suffices(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether there is compute for a job of this phase."""
        return model.share(phase) <= self.share_left + SHARE_STEP

    def waits(self, model: ModelQueues, phase: Phase) -> bool:
        """Whether requests wait for a job of this phase, and none runs."""
        return bool(model.queue(phase)) and (model.name, phase) not in self._busy

    def look(self, model: ModelQueues, phase: Phase) -> tuple[Verdict, list[Waiting]]:
        """What would become of a job now, and the requests that memory suffices for."""
        if not self.waits(model, phase):
            return "empty", []
        chosen = self._prompts(model) if phase == "prefill" else self._steps(model)
        if not chosen:
            return ("memory" if model.queue(phase)[0].units > self.room(model) else "quota"), []
        return ("started" if self.suffices(model, phase) else "compute"), chosen

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

        A model that uses nothing may begin one prompt beyond its quota: it would never run otherwise.
        """
        room = self.room(model)
        left = min(room, self._quota_left(model)) if self._quotas else room
        chosen: list[Waiting] = []
        for each in model.prefill[: model.prefill_batch]:
            left -= each.units
            if left < 0:
                break
            chosen.append(each)
        if not chosen and not model.used and not self._taken.get(model.name) and model.prefill[0].units <= room:
            return [model.prefill[0]]
        return chosen

    def _steps(self, model: ModelQueues) -> list[Waiting]:
        """Requests for which memory and quota suffice; one that does not fit holds nobody back.

        If none fits into the quota, the oldest for which there is memory goes on beyond it: requests free their blocks
        when they end, so a model that stood still at its quota would stand for ever.
        """
        room = self.room(model)
        left = min(room, self._quota_left(model)) if self._quotas else room
        waiting = model.decode[: model.decode_batch] if len(model.decode) > model.decode_batch else model.decode
        if sum([each.units for each in waiting]) <= left:
            return list(waiting)
        chosen: list[Waiting] = []
        for each in model.decode:
            if each.units <= max(0, left):
                chosen.append(each)
                left -= each.units
                if len(chosen) == model.decode_batch:
                    break
        if not chosen:
            chosen = [each for each in model.decode if each.units <= room][:1]
        return chosen
