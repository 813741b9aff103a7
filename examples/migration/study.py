"""Runs policies on the same arrivals, and checks every token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import kvpool
from kvpool.policy.rebalancing import PolicyName
from migration.arrivals import Arrival, Load, arrivals
from migration.dispatcher import Dispatcher, Fault, Outcome
from migration.report import Figures, expected, figures, wrong
from migration.worker import Setting

__all__ = ["QUICK", "USUAL", "Size", "WrongTokens", "compare", "run_one"]


@dataclass(frozen=True)
class Size:
    """How large a run is.

    Attributes:
        load: What arrives.
        blocks: Of one instance, of 16 tokens each.
        step_s: An iteration of an instance takes so long.
        epoch_s: Between two plans.
        link_tokens: See `Setting`.
    """

    load: Load
    blocks: int
    step_s: float
    epoch_s: float
    link_tokens: int | None = None


USUAL = Size(Load(150, 30.0, 60, 1.0, 350, 1, waves=3), 64, 0.04, 0.2)
QUICK = Size(Load(60, 9.0, 60, 0.9, 300, 1, waves=2), 48, 0.03, 0.2)


class WrongTokens(AssertionError):
    """A request has other tokens than alone."""


def run_one(
    size: Size,
    policy: PolicyName,
    instances: int,
    requests: Sequence[Arrival],
    answers: Mapping[str, list[int]],
    faults: Sequence[Fault] = (),
    watch: Callable[[Dispatcher], None] = lambda dispatcher: None,
) -> tuple[Figures, Outcome]:
    """One run.

    Raises:
        WrongTokens: A request has other tokens than `answers`.
        TimeoutError: It has not ended in a time in which one instance alone could have done it.
    """
    url = f"local://kvpool-migration-{os.getpid()}-{time.monotonic_ns():x}"
    setting = Setting(url, policy, instances, size.blocks, size.step_s, size.epoch_s, size.link_tokens)
    needed = sum(each.new_tokens for each in requests) * size.step_s
    try:
        outcome = Dispatcher(setting, requests, faults, watch).run(60.0 + 2 * size.load.over_s + needed)
    finally:
        kvpool.Cluster.forget(url)
    if bad := wrong(outcome, answers):
        raise WrongTokens(f"{policy}: other tokens than alone: {', '.join(bad)}")
    return figures(setting, outcome), outcome


def compare(
    size: Size,
    policies: Sequence[PolicyName],
    instances: int,
    seed: int,
    faults: Sequence[Fault] = (),
    watch: Callable[[Dispatcher], None] = lambda dispatcher: None,
) -> list[tuple[Figures, Outcome]]:
    """Policies on the same arrivals, one after the other. Raises as `run_one`."""
    requests = arrivals(replace(size.load, seed=seed))
    answers = expected(requests)
    return [run_one(size, policy, instances, requests, answers, faults, watch) for policy in policies]
