"""The global scheduler beside a loop over instances, over random requests, ends and times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from policy.fleet import BLOCK, Fleet, transfer

from kvpool.policy.routing import Kind, QueuePlusExec

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda names: np.repeat(np.int32(names), BLOCK))


class BesideANaiveOne(RuleBasedStateMachine):
    """Random requests, ends, instances and times; each decision is compared with a loop over instances."""

    def __init__(self):
        super().__init__()
        self.fleet = Fleet(
            0, policy=QueuePlusExec(), learn_at="response", transfer=transfer(0.3, latency_s=1.0), ttl_s=None
        )
        self.held: dict[int, set[tuple[int, ...]]] = {}
        self.queues: dict[int, list[list]] = {}  # [ticket, work, begun]
        self.prompts: dict[int, np.ndarray] = {}

    @rule(instance=st.integers(0, 20))
    def join_or_leave(self, instance):
        if instance in self.held:
            self.fleet.scheduler.remove_instance(instance)
            del self.held[instance], self.queues[instance]
        else:
            self.fleet.scheduler.add_instance(instance)
            self.held[instance], self.queues[instance] = set(), []

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds):
        self.fleet.now += seconds

    @precondition(lambda self: self.held)
    @rule(tokens=PROMPTS)
    def route(self, tokens):
        expected = {i: self.backlog(i) + len(tokens) - self.cached(i, tokens) for i in self.held}
        decision = self.fleet.route(tokens)
        here = self.cached(decision.instance, tokens, clamp=False)
        assert expected[decision.instance] <= min(expected.values()) + 1e-6
        assert decision.cached == here
        assert decision.queue_s == pytest.approx(self.backlog(decision.instance), abs=1e-6)
        more = {i: held for i in self.held if (held := self.cached(i, tokens, clamp=False)) > here}
        assert {holder.instance: holder.stop for holder in decision.holders}.items() <= more.items()
        assert len(decision.holders) == min(8, len(more))
        assert [h.stop for h in decision.holders] == sorted(more.values(), reverse=True)[:8]
        exec_s = len(tokens) - min(here, len(tokens) - 1)
        gains = [
            (len(tokens) - min(here, len(tokens) - 1)) - (len(tokens) - min(held, len(tokens) - 1))
            - (1.0 + 0.3 * (held - here))
            for held in more.values()
        ]  # fmt: skip
        assert (decision.fetch is not None) == any(gain >= 0 for gain in gains)
        assert decision.exec_s == pytest.approx(exec_s - max([0, *gains]))
        self.queues[decision.instance].append([decision.ticket, decision.exec_s, None])
        self.prompts[decision.ticket] = tokens
        self.begin(decision.instance)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), well=st.booleans())
    def end(self, data, well):
        ticket = data.draw(st.sampled_from(sorted(self.prompts)))
        tokens = self.prompts.pop(ticket)
        # Requests of an instance that has gone end by failed(), also when one of its number has come since.
        well = well and any(entry[0] == ticket for queue in self.queues.values() for entry in queue)
        (self.fleet.scheduler.finished if well else self.fleet.scheduler.failed)(ticket)
        for instance, queue in self.queues.items():
            if any(entry[0] == ticket for entry in queue):
                queue[:] = [entry for entry in queue if entry[0] != ticket]
                self.begin(instance)
                if well:
                    blocks = range(BLOCK, len(tokens) + 1, BLOCK)
                    self.held[instance] |= {tuple(tokens[:end].tolist()) for end in blocks}

    @invariant()
    def trees_are_sound(self):
        tree = self.fleet.scheduler.tree(Kind.COLOCATED)
        tree.audit()
        assert {i: tree.blocks(i) for i in self.held} == {i: len(held) for i, held in self.held.items()}
        for instance in self.held:
            assert self.fleet.scheduler.backlog_s(instance) == pytest.approx(self.backlog(instance), abs=1e-6)

    def begin(self, instance):
        queue = self.queues[instance]
        if queue and queue[0][2] is None:
            queue[0][2] = self.fleet.now

    def backlog(self, instance):
        queue = self.queues[instance]
        passed = min(self.fleet.now - queue[0][2], queue[0][1]) if queue else 0.0
        return sum(work for _, work, _ in queue) - passed

    def cached(self, instance, tokens, clamp=True):
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        held = sum(BLOCK for end in ends if tuple(tokens[:end].tolist()) in self.held[instance])
        return min(held, len(tokens) - 1) if clamp else held


BesideANaiveOne.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_it_agrees_with_a_naive_one = BesideANaiveOne.TestCase
