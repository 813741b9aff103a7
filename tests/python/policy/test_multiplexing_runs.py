"""Made-up runs of many models by ADBS, FCFS and round robin: every request ends, and everything has its turn."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.policy import multiplexing as mux
from kvpool.policy.multiplexing import ModelQueues, State, Turns, Use, Waiting


class Engine:
    """Runs what a scheduler says, on a clock of its jobs; requests grow, end and leave their units as a cache.

    Each growth goes through `reclaim`, which raises OutOfQuota for what a scheduler should not have started.
    """

    def __init__(self, seed, scheduler, models, capacity, rules=None):
        self.dice = Random(seed)
        self.scheduler = scheduler
        self.tier = mux.Tier(capacity, rules or {name: mux.QuotaRule() for name in models})
        self.block = {name: self.dice.choice([1, 1, 8]) for name in models}  # units of a block of tokens
        self.now = 0.0
        self.ends = []  # (time, job)
        self.held = {name: {} for name in models}  # active units by request
        self.left = {}  # tokens that a request still makes
        self.arrived = {}
        self.prefill = {name: [] for name in models}
        self.decode = {name: [] for name in models}
        self.shares = {name: (self.dice.choice([0.4, 0.7, 1.0]), self.dice.choice([0.1, 0.3, 0.9])) for name in models}
        self.quota = capacity // len(models)
        self.turns = Turns()
        self.served = 0
        self.log = []

    def arrive(self, name, units, tokens):
        request = (name, len(self.left))
        self.left[request] = tokens
        self.arrived[request] = self.now
        self.prefill[name].append(Waiting(request, units, self.now))

    def state(self):
        models = []
        for name in self.held:
            block = self.block[name]
            steps = [each._replace(units=block * (self.left[each.request] % 4 == 0)) for each in self.decode[name]]
            prefill_share, decode_share = self.shares[name]
            used = self.tier.uses[name].active
            reserved = max(0, self.tier.rules[name].reserve - used)
            models.append(
                ModelQueues(name, tuple(self.prefill[name]), tuple(steps), self.quota, used, reserved, prefill_share,
                            decode_share, decode_batch=16, limit=self.tier.most(name))
            )  # fmt: skip
        return State(models, self.tier.capacity - self.tier.committed, tuple(job for _, job in self.ends), self.turns)

    def grow(self, name, units):
        uses = dict(self.tier.uses)
        for eviction in mux.reclaim(self.tier, name, units).evictions:
            use = uses[eviction.model]
            uses[eviction.model] = Use(use.active, use.historical - eviction.units)
        uses[name] = Use(uses[name].active + units, uses[name].historical)
        self.tier = replace(self.tier, uses=uses)

    def shrink(self, name, units):
        active, historical = self.tier.uses[name]
        self.tier = self.tier.with_use(name, Use(active - units, historical + units))

    def turn(self):
        """One step, then the job that ends first; False if nothing runs and nothing starts."""
        state = self.state()
        jobs = self.scheduler.step(state)
        check_jobs(state, jobs)
        after = mux.started(state, jobs)
        assert after.available >= 0
        self.turns = after.turns
        for job in jobs:
            units = {
                each.request: each.units for each in state.models[list(self.held).index(job.model)].queue(job.phase)
            }
            self.grow(job.model, sum(units[request] for request in job.requests))
            for request in job.requests:
                self.held[job.model][request] = self.held[job.model].get(request, 0) + units[request]
            waiting = self.prefill if job.phase == "prefill" else self.decode
            waiting[job.model] = [each for each in waiting[job.model] if each.request not in job.requests]
            seconds = self.dice.uniform(0.5, 1.5) * (3 if job.phase == "prefill" else 1) / job.share
            self.ends.append((self.now + seconds, job))
        self.log.append((state, jobs))
        if not self.ends:
            return self.preempt(state)
        self.ends.sort(key=lambda end: end[0])
        self.now, job = self.ends.pop(0)
        for request in job.requests:
            self.left[request] -= 1
            if self.left[request] <= 0:
                self.shrink(job.model, self.held[job.model].pop(request))
                self.served += 1
            else:
                self.decode[job.model].append(Waiting(request, 0, self.arrived.get(request, 0.0)))
        return True

    def preempt(self, state):
        """Does as it is advised when nothing can go on; False if there is no advice."""
        advice = mux.preemption(state)
        if advice is None:
            return False
        (request,) = advice.requests
        units = self.held[advice.model].pop(request)
        self.shrink(advice.model, units)
        self.decode[advice.model] = [each for each in self.decode[advice.model] if each.request != request]
        self.prefill[advice.model].insert(0, Waiting(request, units, self.arrived[request]))
        return True


def check_jobs(state, jobs):
    running = [(job.model, job.phase) for job in (*state.running, *jobs)]
    assert len(set(running)) == len(running)
    assert sum(job.share for job in (*state.running, *jobs)) <= 1 + 1e-6
    assert all(job.requests and 0 < job.share <= 1 for job in jobs)


SCHEDULERS = [mux.ADBS(), mux.ADBS(stretch=False), mux.FCFS(), mux.RoundRobin(), mux.Temporal()]


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["ADBS", "plain", "FCFS", "RoundRobin", "Temporal"])
@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_every_request_ends_in_a_made_up_run(scheduler, seed):
    dice = Random(seed)
    rules = {name: mux.QuotaRule(dice.randrange(60), dice.choice([None, 100, 150])) for name in "abcd"}
    engine = Engine(seed, scheduler, "abcd", 400, rules)
    for _ in range(60):
        engine.arrive(dice.choice("aaabbcd"), dice.randint(1, 60), dice.randint(1, 8))
        engine.turn()
    for _ in range(3000):
        if not engine.turn():
            break
    assert engine.served == 60


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([True, False]))
def test_no_queue_waits_for_more_than_two_rounds(seed, stretch):
    """Every queue always has work and memory: the hardest case. A round is one job of each of the eight queues."""
    engine = Engine(seed, mux.ADBS(stretch), "abcd", 10**6)
    for _ in range(150):
        for name in "abcd":
            while len(engine.prefill[name]) < 2:
                engine.arrive(name, 1, engine.dice.randint(1, 6))
            if not engine.decode[name]:
                engine.left[request := (name, len(engine.left))] = 10**6
                engine.decode[name].append(Waiting(request, 0, engine.now))
        assert engine.turn()
        for (_, phase), jobs in engine.turns.passed.items():
            assert jobs <= (2 * 8 if phase == "decode" else 2 * 4)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_large_blocks_get_their_memory_although_small_prompts_keep_coming(seed):
    engine = Engine(seed, mux.ADBS(), "ab", 100)
    engine.quota = 70
    engine.block = {"a": 8, "b": 1}
    for _ in range(2):
        engine.arrive("a", 16, 9)
    for _ in range(200):
        while len(engine.prefill["b"]) < 4:
            engine.arrive("b", 4, 17)
        engine.turn()
        if not any(request[0] == "a" for request in engine.left if engine.left[request] > 0):
            return
    pytest.fail("a never ended")


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_a_large_prompt_gets_its_memory_although_small_ones_keep_coming(seed):
    engine = Engine(seed, mux.ADBS(), "abcd", 100)
    engine.quota = 100
    for name in "bcd":
        for _ in range(8):
            engine.arrive(name, 10, 6)
    for _ in range(12):
        engine.turn()
    engine.arrive("a", 90, 2)
    begun = 0
    for _ in range(400):
        for name in "bcd":
            while len(engine.prefill[name]) < 4:
                engine.arrive(name, 10, 6)
        engine.turn()
        begun += sum(job.phase == "prefill" and job.model != "a" for job in engine.log[-1][1])
        if any(job == ("a", "prefill", job.requests, job.share) for job in engine.log[-1][1]):
            break
    else:
        pytest.fail("it never ran")
    assert begun <= 2 * 4
