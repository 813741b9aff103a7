"""No policy leaves an instance idle while a request waits longer than computing its prefix again would take."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy.fleet import BLOCK, Curved, Fleet, UnitModel, prompt

from kvpool.errors import ArgumentError
from kvpool.index import StoredEvent
from kvpool.policy.routing import (
    Balance,
    GlobalScheduler,
    KeepHits,
    Kind,
    LeastLoad,
    LongestPrefix,
    QueuePlusExec,
    Request,
    SessionId,
)

POLICIES = {
    "least load": LeastLoad,
    "longest prefix": LongestPrefix,
    "queue plus execution": QueuePlusExec,
    "thrifty": lambda: QueuePlusExec(thrift=2.0),
    "session": SessionId,
    "hashed session": lambda: SessionId("hash"),
    "keep hits": KeepHits,
    "keep hits, thrift 2": lambda: KeepHits(thrift=2.0),
}


class Third:
    """A third of the time: a faster machine in the same fleet."""

    def __init__(self, model):
        self._model = model
        self.block_tokens, self.parallel = model.block_tokens, model.parallel

    def exec_s(self, tokens, cached=0):
        return self._model.exec_s(tokens, cached) / 3

    def exec_many_s(self, tokens, cached):
        return self._model.exec_many_s(tokens, cached) / 3


class Watched:
    """A scheduler, and books of the queues beside it that are kept by hand."""

    def __init__(self, policy, learn, balance, instances, fast, model):
        self.now = 1000.0
        self.policy = policy()
        self.balance = balance
        third = Third(model)
        self.models = {at: third if fast and at % 2 else model for at in range(instances)}
        self.scheduler = GlobalScheduler(
            self.models[0],
            lambda: self.now,
            policy=self.policy,
            learn_at="dispatch" if learn in ("dispatch", "both") else "response",
            balance=balance,
        )
        self.queues: dict[int, list[list]] = {}  # [ticket, work, when it began]
        for at, model in self.models.items():
            self.scheduler.add_instance(at, by_events=learn in ("events", "both"), model=model)
            self.queues[at] = []
        self.by_events = learn in ("events", "both")
        self.prompts: dict[int, np.ndarray] = {}
        self.closed: set[int] = set()

    def route(self, tokens, session):
        held = self.held(tokens)
        backlogs = {at: self.backlog(at) for at in self.queues}
        idle = [at for at, queue in self.queues.items() if not queue and at not in self.closed]
        decision = self.scheduler.route(Request(tokens, session))
        chosen = decision.instance
        assert chosen not in self.closed
        if idle and backlogs[chosen] > 0:
            here = self.models[chosen].exec_s(len(tokens), held[chosen])
            again = min(self.models[at].exec_s(len(tokens), held[at]) for at in idle) - here
            assert backlogs[chosen] <= self.policy.patience * again + 1e-6
        if isinstance(self.policy, KeepHits) and self.balance.cap == float("inf"):
            self.check_excess(tokens, chosen, backlogs, held)
        self.queues[chosen].append([decision.ticket, decision.exec_s, None])
        self.prompts[decision.ticket] = tokens
        self.begin(chosen)
        return decision

    def check_excess(self, tokens, chosen, backlogs, held):
        """However busy all are: the request waits longer than elsewhere at most for what it saves, and the thrift."""
        here = self.models[chosen].exec_s(len(tokens), held[chosen])
        fleets = self.models[0]
        for at in self.queues.keys() - self.closed:
            more_s = self.models[at].exec_s(len(tokens), held[at]) - here
            lacks_s = fleets.exec_s(len(tokens), held[at]) - fleets.exec_s(len(tokens), held[chosen])
            copied_s = (self.policy.patience - 1) * max(0.0, lacks_s)
            assert backlogs[chosen] <= backlogs[at] + more_s + copied_s + 1e-6

    def end(self, pick):
        """An instance is done with the first of its queue."""
        busy = [at for at, queue in self.queues.items() if queue]
        if not busy:
            return
        at = busy[pick % len(busy)]
        ticket, _, _ = self.queues[at].pop(0)
        self.begin(at)
        tokens = self.prompts.pop(ticket)
        self.scheduler.finished(ticket)
        if self.by_events:
            self.scheduler.apply(at, StoredEvent(ticket, "", tokens, 0, np.zeros(0, np.uint64)))

    def held(self, tokens):
        hits = self.scheduler.tree(Kind.COLOCATED).find(tokens, "")
        lengths = [*hits.lengths, 0]
        return {at: lengths[hits.level(at)] for at in self.queues}

    def backlog(self, at):
        queue = self.queues[at]
        passed = min(self.now - queue[0][2], queue[0][1]) if queue else 0.0
        return sum(work for _, work, _ in queue) - passed

    def begin(self, at):
        if self.queues[at] and self.queues[at][0][2] is None:
            self.queues[at][0][2] = self.now


BALANCES = st.sampled_from(
    [
        Balance(cap=float("inf"), warmup_s=0),
        Balance(cap=1.0, slack=0.0, idle=0, warmup_s=0),
        Balance(),
        Balance(warmup_s=1e6, warmup_floor=0.01, cap=1.0, slack=0.0, idle=0),
    ]
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["route"] * 5 + ["wait", "end", "end", "drain", "resume"]), st.integers(0, 1 << 16)),
    max_size=80,
)


@pytest.mark.parametrize("learn", ["dispatch", "response", "events", "both"])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(BALANCES, st.sampled_from([2, 3, 8, 100]), st.booleans(), st.booleans(), STEPS)
def test_no_request_waits_in_vain_while_an_instance_is_idle(name, learn, balance, instances, fast, curved, steps):
    fleet = Watched(POLICIES[name], learn, balance, instances, fast, Curved() if curved else UnitModel())
    for step, pick in steps:
        if step == "route":
            blocks = [1 + pick // 16**at % 3 for at in range(1 + pick % 4)]
            fleet.route(np.repeat(np.int32(blocks), BLOCK), f"session {pick % 5}")
        elif step == "wait":
            fleet.now += pick % 13
        elif step == "end":
            fleet.end(pick)
        elif step == "drain" and len(fleet.closed) < instances - 1:
            at = pick % instances
            fleet.closed.add(at)
            fleet.scheduler.drain(at)
        elif step == "resume" and fleet.closed:
            at = sorted(fleet.closed)[pick % len(fleet.closed)]
            fleet.closed.discard(at)
            fleet.scheduler.resume(at)


@pytest.mark.parametrize("used", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("learn_at", ["dispatch", "response"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_block_that_all_prompts_share_starves_no_instance(name, learn_at, used):
    """Eight instances, prompts of 64 tokens of which four are the same, at part of what the fleet can do."""
    dice, now = random.Random(1), 0.0
    scheduler = GlobalScheduler(UnitModel(), lambda: now, policy=POLICIES[name](), learn_at=learn_at)
    for at in range(8):
        scheduler.add_instance(at)
    served_s = 64.0
    free, waits, counts, ends = [0.0] * 8, [], [0] * 8, []
    arrives = 0.0
    for number in range(600):
        arrives += dice.expovariate(used * 8 / served_s)
        while ends and ends[0][0] <= arrives:
            now, _, ticket = heapq.heappop(ends)
            scheduler.finished(ticket)
        now = arrives
        tokens = np.concatenate([prompt(1), np.full(60, 2 + number, np.int32)])
        decision = scheduler.route(Request(tokens, f"session {number % 50}"))
        at = decision.instance
        free[at] = max(free[at], now) + decision.exec_s
        counts[at] += 1
        waits.append(free[at] - now)
        heapq.heappush(ends, (free[at], number, decision.ticket))
    assert max(counts) <= 1.6 * np.mean(counts), counts
    assert min(counts) >= 0.4 * np.mean(counts), counts
    assert np.mean(waits) < 3 * served_s


def test_waiting_for_a_prefix_goes_on_as_long_as_it_pays():
    """Instance 1 holds 36 of 40 tokens; computing them again takes 36 s."""
    chosen = []
    for backlog in (36.0, 37.0):
        fleet = Fleet(2, policy=LongestPrefix())
        fleet.hold(1, prompt(9))
        fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(1), backlog, fleet.now)
        chosen.append(fleet.route(prompt(10)).instance)
    assert chosen == [1, 2]


def test_an_idle_instance_that_holds_most_of_a_prompt_makes_waiting_less_worthwhile():
    """The next best holder is idle: only what it lacks would be computed again, 4 s of it."""
    fleet = Fleet(3, policy=LongestPrefix())
    fleet.hold(1, prompt(9))
    fleet.hold(2, prompt(8))
    fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(1), 5.0, fleet.now)
    assert fleet.route(prompt(10)).instance == 2


def test_a_session_leaves_an_instance_that_stays_busy_and_does_not_return():
    fleet = Fleet(2, policy=SessionId())
    home = fleet.serve(prompt(2), "s").instance
    fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(home), 100.0, fleet.now)
    other = fleet.serve(prompt(2), "s").instance
    assert other != home
    assert fleet.serve(prompt(2), "s").instance == other


def test_patience_makes_requests_wait_longer():
    def chosen(patience):
        balance = Balance(cap=float("inf"), warmup_s=0, patience=patience)
        fleet = Fleet(2, policy=LongestPrefix(), balance=balance)
        fleet.hold(1, prompt(9))
        fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(1), 40.0, fleet.now)
        return fleet.route(prompt(10)).instance

    assert [chosen(patience) for patience in (0.0, 1.0, 2.0, float("inf"))] == [2, 2, 1, 1]


@pytest.mark.parametrize("patience", [-1.0, float("nan")])
def test_patience_is_a_number_of_at_least_0(patience):
    with pytest.raises(ArgumentError, match="patience"):
        Balance(patience=patience)


def test_an_idle_instance_gets_a_request_even_against_the_load_cap():
    """A newcomer has a hundredth of a share, and has used it up; the other one has 50 s of work."""
    balance = Balance(cap=1.0, slack=0.0, idle=0, warmup_s=1e6, warmup_floor=0.01)
    fleet = Fleet(1, policy=LeastLoad(), balance=balance)
    fleet.now += 1e6
    fleet.scheduler.add_instance(9)
    for _ in range(3):
        fleet.serve(prompt(2, name=7))
    fleet.scheduler._prefill.assign(fleet.scheduler._prefill.slot(1), 50.0, fleet.now)
    first = fleet.route(prompt(2))
    assert first.instance == 9
    assert fleet.route(prompt(2)).instance == 1  # busy as it is now, its share counts again
