"""The schedulers that MuxServe compares ADBS with (§4.1, §4.4, Fig 10). None knows quotas."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.policy.multiplexing.jobs import PHASES, Job, ModelQueues, State
from kvpool.policy.multiplexing.resources import Resources, in_turn

__all__ = ["FCFS", "RoundRobin", "Temporal"]


@dataclass(frozen=True)
class FCFS:
    """First come, first served: temporal multiplexing. One job at a time, with all compute.

    The request that came first decides whose model is next. Of that model prompts go first as far as there is memory,
    otherwise all decode: continuous batching, as an engine of one model does it. A model that lacks memory for either
    lets the next request decide: memory comes from requests that end.
    """

    def step(self, state: State) -> list[Job]:
        """At most one job; as `ADBS.step`."""
        if state.running:
            return []
        resources = Resources(state, quotas=False)
        oldest: list[tuple[float, int, ModelQueues]] = []
        for at, model in enumerate(state.models):
            arrivals = [each.arrived for phase in PHASES for each in model.queue(phase) if not model.misfit(each)]
            if arrivals:
                oldest.append((min(arrivals), at, model))
        for _, _, model in sorted(oldest, key=lambda each: each[:2]):
            if any(resources.start(model, phase, share=1.0) == "started" for phase in PHASES):
                break
        return resources.jobs


@dataclass(frozen=True)
class RoundRobin:
    """Models in turn, each with one job: its prefill if one waits and has memory, otherwise its decode.

    Jobs run beside each other with the shares of the placement. Whose turn it is waits for compute, and so do those
    behind it.
    """

    def step(self, state: State) -> list[Job]:
        """The jobs of the models whose turn it is; as `ADBS.step`."""
        resources = Resources(state, quotas=False)
        for model in in_turn(state.models, state.turns.last):
            verdict = resources.start(model, "prefill")
            if verdict in ("empty", "units"):
                verdict = resources.start(model, "decode")
            if verdict == "compute":
                break
        return resources.jobs


@dataclass(frozen=True)
class Temporal:
    """Temporal multiplexing by steps: one job at a time, with all compute, first come, first served.

    A job comes when its model's last one has ended, so models take turns, step by step. Of a model prompts go first as
    far as there is memory, otherwise all decode. With `FCFS` a long answer holds up all other models until its end.
    """

    def step(self, state: State) -> list[Job]:
        """At most one job; as `ADBS.step`."""
        resources = Resources(state, quotas=False)
        if not state.running:
            for model in in_turn(state.models, state.turns.last):
                if any(resources.start(model, phase, share=1.0) == "started" for phase in PHASES):
                    break
        return resources.jobs
