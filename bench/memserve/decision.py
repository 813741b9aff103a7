"""How long the global scheduler takes to decide: 1,000 instances, 100,000 cached prompts of 4,096 tokens.

Each prompt is held by one instance; the system prompt that it begins with is held by ten of them ("spread"), or by all
("hot"): then all have to be weighed by what they hold. Asked for are new arrays of cached prompts, in random order.

Processor time, since a decision waits for nothing: the wall time of a core that nobody else wants. The 99th percentile
is that of the batch in which it is least: what other processes do to the caches and to the clock of the core is worth
several times a decision. An effect that recurs in every batch stays in it. The percentile of all decisions has a
separate row.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from time import thread_time_ns

import numpy as np

from bench.context import Context
from bench.measure import no_collections, summarize
from bench.memserve.assumed import MODEL, TRANSFER
from bench.remote import Remote
from bench.result import Report, Row, timed_row
from bench.workload import Prompts
from kvpool.policy import routing

TITLE = "Global scheduler: one decision, 4,096 tokens"
PEERS: tuple[str, ...] = ()
TARGET_US = 100.0
_SHAPE = Prompts(4096, 2048)
_GROUPS = 100  # system prompts of _SHAPE
HOLDERS = ("spread", "hot")
_POLICIES = {
    "default": routing.KeepHits,
    "queue plus execution": routing.QueuePlusExec,
    "longest prefix": routing.LongestPrefix,
    "session": routing.SessionId,
    "least load": routing.LeastLoad,
}
BATCHES = 8
BATCH = 400


class Subject:
    """A router in its process; see bench/remote.py."""

    def build(self, instances: int, prompts: int, hot: bool) -> None:
        self._now = 1e6
        self._schedulers = {
            name: routing.GlobalScheduler(MODEL, lambda: self._now, policy=policy(), transfer=TRANSFER)
            for name, policy in _POLICIES.items()
        }
        # Nothing gets too old, but is looked at.
        tree = routing.PromptTree(MODEL.block_tokens, lambda: self._now, ttl_s=1e5)
        for scheduler in self._schedulers.values():
            for instance in range(instances):
                scheduler.add_instance(instance)
            scheduler._trees[routing.Kind.COLOCATED] = tree  # one tree for all, to which they add little
        self._tree, self._instances, self._prompts = tree, instances, prompts
        for number in range(prompts):
            tree.insert(_SHAPE.prompt(number), number % instances)
        if hot:
            for group in range(_GROUPS):
                for instance in range(instances):
                    tree.insert(_SHAPE.prompt(group)[: _SHAPE.shared], instance)
        self._now += 1e4  # nobody is new any more

    def decide(self, policy: str, n: int, seed: int) -> list[float]:
        """Processor times of n decisions; microseconds. Nine of ten requests are computed before the next round."""
        dice = np.random.default_rng(seed)
        scheduler = self._schedulers[policy]
        numbers = dice.integers(self._prompts, size=n).tolist()
        requests = [routing.Request(_SHAPE.prompt(number), session=str(number % 5000)) for number in numbers]
        times, tickets = [], []
        with no_collections():
            for request in requests:
                self._now += 1e-3
                start = thread_time_ns()
                decision = scheduler.route(request)
                times.append((thread_time_ns() - start) / 1000)
                tickets.append(decision.ticket)
        for at, ticket in enumerate(tickets):
            if at % 10:
                scheduler.first_token(ticket)
                scheduler.failed(ticket)
        return times

    def expire(self) -> float:
        """Milliseconds to look at every node of the tree; nothing is old enough to go."""
        start = time.perf_counter()
        self._tree.expire()
        return (time.perf_counter() - start) * 1000


def run(context: Context) -> Report:
    report = Report()
    prompts = context.pick(10_000, 100_000)
    for name in HOLDERS:
        with Remote(__name__) as subject:
            subject.ask("build", instances=1000, prompts=prompts, hot=name == "hot")
            for policy in _POLICIES:
                row = _row(context, subject, policy, name, 1000, prompts)
                report.rows += [row, _tail_of(row)]
            if name == HOLDERS[0]:
                report.rows.append(Row("expire: a look at every node of the tree", subject.ask("expire"), "ms"))
    report.notes.append(
        f"{_SHAPE.shared:,} of {_SHAPE.tokens:,} tokens are a system prompt that ten instances hold (spread) or all "
        "(hot). A decision: match, policy, load cap, who holds more, fetch or recompute."
    )
    report.notes.append(f"p99: the least of {BATCHES} batches of {BATCH} decisions. `scaling` has other fleets.")
    return report


def _row(context: Context, subject: Remote, policy: str, name: str, instances: int, prompts: int) -> Row:
    batches = [subject.ask("decide", policy=policy, n=BATCH, seed=seed) for seed in range(context.pick(4, BATCHES))]
    return row_of(batches, policy, name, instances, prompts)


def _tail_of(row: Row) -> Row:
    """The 99th percentile of all decisions of a row, whatever disturbed them."""
    return Row(f"{row.what}: p99 of all", row.details["samples"]["kvpool"]["p99_us"], target=TARGET_US)


def row_of(batches: Sequence[Sequence[float]], policy: str, name: str, instances: int, prompts: int) -> Row:
    """The median of all decisions, and the least 99th percentile of a batch.

    Args:
        batches: Times in microseconds.
        policy: That decided.
        name: Of HOLDERS: who holds the system prompts.
        instances: Of the router.
        prompts: Of the router.
    """
    everything = summarize([each for batch in batches for each in batch])
    least = min(summarize(batch).p99_us for batch in batches)
    what = f"{policy}, {name}: {instances:,} instances, {prompts:,} prompts"
    sizes = {"instances": instances, "prompts": prompts, "tokens": _SHAPE.tokens, "holders": name}
    row = timed_row(what, {"kvpool": everything}, target=TARGET_US, batches=len(batches), **sizes)
    return dataclasses.replace(row, p99=least)
