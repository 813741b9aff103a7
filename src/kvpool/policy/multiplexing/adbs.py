"""Adaptive batch scheduling (MuxServe's Algorithm 3), with its misprints mended.

A step takes prefill first, one job at a time over all models, round robin; then decode jobs of one model after the
other, round robin, as long as compute is left. As printed it stands still in some cases; here:

  - A model whose prefill queue is empty is passed over. As printed, `prefill_waiting` stays true and decode stops.
  - A decode job that does not fit does not end the round: the next models are asked. As printed, the loop ends.
  - A prefill that waits for *memory* or for its quota holds no decode back, since only requests that end free memory.
    A prefill that waits for *compute* does: running jobs end soon, and then it has the compute that it needs.
  - A prefill that waits for memory lets the prefills of other models go before it for one round, no longer: then they
    wait until it has started. Otherwise small prompts would take all memory that becomes free. A decode that waits for
    memory keeps it from decode as well. Nobody is kept from his own reserve.

No queue starves. Each counts the jobs that start while it waits (`Turns.passed`): a prefill those of other models'
prefills, a decode all. A *round* is as many jobs as there are queues with work. A queue that has waited for a round is
due: due queues go first, those that have waited longest before others, and if one lacks compute, nothing else starts.
Each of the other queues can go before it once more. So each has its turn after two rounds at most, if it has memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvpool.policy.multiplexing.jobs import PHASES, Job, ModelQueues, Phase, State
from kvpool.policy.multiplexing.resources import Resources, in_turn

__all__ = ["ADBS", "preemption"]

Missing = Literal["", "compute"]


@dataclass(frozen=True)
class ADBS:
    """Prefill first, decode fills what is left, within quotas.

    Attributes:
        stretch: Whether the jobs of a step divide compute that nobody waits for.
    """

    stretch: bool = True

    def step(self, state: State) -> list[Job]:
        """The jobs to start now; empty if there is nothing to do, or nothing to do it with. Pure.

        Hand the result to `started` to have the state for the next step.
        """
        resources = Resources(state)
        if self._due(state, resources) != "compute" and self._prefill(state, resources) != "compute":
            left_out = self._decode(state, resources)
            if not resources.jobs and not state.running and resources.let_decode():
                left_out = self._decode(state, resources)
            if self.stretch and not left_out:
                resources.stretch()
        return resources.jobs

    def _due(self, state: State, resources: Resources) -> Missing:
        """Starts what has waited for a round, and keeps memory for what lacks it.

        For a prefill it is kept only while jobs run or decode, since these free some. For a decode it is kept anyway:
        if nothing else can go on, then other decode may have it, and if that does not help, a request is preempted.

        Returns:
            "compute" if one lacks compute: everything else waits for it. "" otherwise.
        """
        passed = state.turns.passed
        prompts = sum([bool(model.prefill) for model in state.models])
        if not passed or max(passed.values()) < max(1, prompts - resources.prefill_runs):
            return ""  # no round is shorter
        waiting = [(model, phase) for model in state.models for phase in PHASES if resources.waits(model, phase)]
        prefills = sum(phase == "prefill" for _, phase in waiting)
        round_of: dict[Phase, int] = {"prefill": prefills, "decode": len(waiting)}
        due = [each for each in waiting if passed.get((each[0].name, each[1]), 0) >= round_of[each[1]]]
        for model, phase in sorted(due, key=lambda each: -passed[each[0].name, each[1]]):
            if phase == "prefill" and resources.prefill_runs:
                continue
            verdict = resources.start(model, phase)
            if verdict == "compute":
                return "compute"
            if verdict != "units" or not resources.lacks_memory(model, phase):
                continue
            if phase == "decode" or state.running or resources.can_decode():
                resources.keep(model, phase)
        return ""

    def _prefill(self, state: State, resources: Resources) -> Missing:
        """Starts the next prefill if none runs; "compute" if it lacks that, and decode is held back for it."""
        if resources.prefill_runs:
            return ""
        for model in in_turn(state.models, state.turns.prefill):
            verdict = resources.start(model, "prefill")
            if verdict == "compute":
                return "compute"
            if verdict == "started":
                break
        return ""

    def _decode(self, state: State, resources: Resources) -> bool:
        """Starts decode jobs while compute is left; True if one could not start for want of compute."""
        left_out = False
        for model in in_turn(state.models, state.turns.decode):
            if not left_out or resources.suffices(model, "decode"):
                left_out |= resources.start(model, "decode") == "compute"
        return left_out


def preemption(state: State) -> Job | None:
    """Advice when a model cannot go on, or none can: whose request to stop, so that others have its memory.

    A model that no neighbour can help, because it has all that its limit allows, is asked for first, also while others
    run: theirs may always have work. Otherwise it is the model that is furthest beyond its quota, once nothing goes on.
    Of either it is the youngest request that decodes. The pool never preempts; an engine may swap the request out, or
    compute it again later. Ask after each step, with the state after its jobs have started.

    Returns:
        None if no model is at its limit like that, and a job runs, or one could start, or nothing waits for memory.
    """
    model = _stands_at_limit(state)
    if model is None:
        holding = [each for each in state.models if each.decode]
        if not holding or state.running or ADBS().step(state):
            return None
        model = max(holding, key=lambda each: each.used - each.quota)
    return Job(model.name, "decode", (model.decode[-1].request,), model.decode_share)


def _stands_at_limit(state: State) -> ModelQueues | None:
    """A model of which nothing runs, and each request that decodes wants more than its limit leaves."""
    busy = {job.model for job in state.running}
    for model in state.models:
        if model.decode and model.limit is not None and model.name not in busy:
            left = model.limit - model.used
            if all(each.units > left for each in model.decode):
                return model
    return None
