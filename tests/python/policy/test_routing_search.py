"""A search of few instances finds what the policy would choose among all, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy.fleet import BLOCK, UnitModel

from kvpool.policy.routing import (
    Balance,
    GlobalScheduler,
    KeepHits,
    Kind,
    LeastLoad,
    LongestPrefix,
    QueuePlusExec,
    Request,
    choosing,
    search,
)
from kvpool.policy.routing.policies import Ranking, SessionId, first_of

POLICIES = {
    "least load": LeastLoad,
    "longest prefix": LongestPrefix,
    "queue plus execution": QueuePlusExec,
    "thrifty": lambda: QueuePlusExec(0.5),
    "session": SessionId,
    "keep hits": KeepHits,
}


class Half(UnitModel):
    """Half a second a token: another model in the same fleet."""

    def exec_s(self, tokens, cached=0):
        return 0.5 * super().exec_s(tokens, cached)

    def exec_many_s(self, tokens, cached):
        return 0.5 * super().exec_many_s(tokens, cached)


class Quarter(Half):
    """And a third."""

    def exec_s(self, tokens, cached=0):
        return 0.5 * super().exec_s(tokens, cached)

    def exec_many_s(self, tokens, cached):
        return 0.5 * super().exec_many_s(tokens, cached)


class OfAll(Ranking):
    """The policy, asked in the way that looks at all instances."""

    remembers = True

    def __init__(self, policy):
        self.policy = policy
        self.patience = policy.patience

    def ranks(self, session):
        return False

    def asked(self, asked):
        self.policy.asked(asked)

    def placed(self, asked):
        self.policy.placed(asked)

    def choose(self, view):
        assert view.allowed.any()
        return self.policy.choose(view)


class Both:
    """Two schedulers with the same input."""

    def __init__(self, policy, balance, instances, kinds, capacities, models):
        self.now = 4096.0
        self.model = UnitModel()
        self.schedulers = [
            GlobalScheduler(
                self.model,
                lambda: self.now,
                policy=policy() if few else OfAll(policy()),
                decode_policy=LongestPrefix() if few else OfAll(LongestPrefix()),
                balance=balance,
                learn_at="dispatch",
            )
            for few in (True, False)
        ]
        self.next = 0
        self.kinds, self.capacities, self.models = kinds, capacities, [None, Half(), Quarter()][: 1 + models]
        for _ in range(instances):
            self.join()

    def join(self):
        at, self.next = self.next, self.next + 1
        for scheduler in self.schedulers:
            scheduler.add_instance(
                at,
                self.kinds[at % len(self.kinds)],
                capacity=self.capacities[at % len(self.capacities)],
                model=self.models[at % len(self.models)],
            )

    def route(self, tokens, session):
        few, every = (scheduler.route(Request(tokens, session)) for scheduler in self.schedulers)
        assert few == every
        return few.ticket


# Nothing is rounded: work is small whole numbers, waits are half-lives, shares are powers of two. So equal is equal.
BALANCES = st.sampled_from(
    [
        Balance(cap=float("inf"), warmup_s=0, half_life_s=64.0),
        Balance(cap=1.0, slack=0.0, idle=0, warmup_s=0, half_life_s=64.0),
        Balance(cap=2.0, slack=1.0, idle=0, warmup_s=0, half_life_s=64.0),
        Balance(cap=1.5, slack=0.5, idle=0.25, warmup_s=128.0, warmup_floor=0.125, half_life_s=64.0),
        Balance(cap=2.0, slack=1.0, idle=0, warmup_s=0, half_life_s=64.0, patience=4.0),
        Balance(cap=2.0, slack=1.0, idle=0, warmup_s=0, half_life_s=64.0, patience=float("inf")),
        Balance(cap=float("inf"), warmup_s=0, half_life_s=64.0, patience=0.0),
    ]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["route"] * 6 + ["wait", "first", "end", "fail", "drain", "resume", "leave", "join", "hot"]),
        st.integers(0, 1 << 16),
    ),
    max_size=120,
)

# One time counts for the decode instances of all models.
MOST_DECODE = [Kind.PREFILL, Kind.DECODE, Kind.DECODE, Kind.DECODE, Kind.DECODE]


@pytest.mark.parametrize("name", POLICIES)
@given(
    st.data(),
    BALANCES,
    st.sampled_from([1, 2, 5, 30, 200]),
    st.sampled_from([[Kind.COLOCATED], [Kind.COLOCATED, Kind.PREFILL, Kind.DECODE], MOST_DECODE]),
    st.sampled_from([[1.0], [1.0, 2.0, 0.5]]),
    st.integers(0, 2),
    STEPS,
)
def test_few_are_enough(name, data, balance, instances, kinds, capacities, models, steps):
    both = Both(POLICIES[name], balance, max(instances, len(kinds)), kinds, capacities, models)
    under_way, closed, there = [], set(), list(range(both.next))
    for step, pick in steps:
        if step == "route":
            blocks = [1 + pick // 16**at % 3 for at in range(1 + pick % 4)]
            under_way.append(both.route(np.repeat(np.int32(blocks), BLOCK), f"session {pick % 7}"))
        elif step == "wait":
            both.now += [64.0, 64.0, 64.0, 2.0**20][pick % 4]
        elif step == "hot":  # most hold it, or the later two thirds
            spared = pick % 8 if pick // 8 % 2 else len(there) // 3
            for scheduler in both.schedulers:
                for at in there[spared:]:
                    scheduler.tree(kinds[at % len(kinds)]).insert(np.repeat(np.int32([1, 1 + pick % 3]), BLOCK), at)
        elif step in ("first", "end", "fail") and under_way:
            ticket = under_way[pick % len(under_way)]
            if step != "first":
                under_way.remove(ticket)
            for scheduler in both.schedulers:
                {"first": scheduler.first_token, "end": scheduler.finished, "fail": scheduler.failed}[step](ticket)
        elif step == "join":
            there.append(both.next)
            both.join()
        elif step in ("drain", "leave"):
            kind_of = {at: kinds[at % len(kinds)] for at in there}
            at = there[pick % len(there)]
            others = [other for other in there if kind_of[other] is kind_of[at] and other not in closed | {at}]
            if others:
                closed.add(at)
                for scheduler in both.schedulers:
                    (scheduler.drain if step == "drain" else scheduler.remove_instance)(at)
                if step == "leave":
                    there.remove(at)
                    closed.discard(at)
        elif step == "resume" and closed:
            at = sorted(closed)[pick % len(closed)]
            closed.discard(at)
            for scheduler in both.schedulers:
                scheduler.resume(at)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "equally busy"])
def test_models_end_no_search_where_one_time_counts_for_all(busy):
    """The first decode instances in the order are of two models and hold nothing; the holders come after them."""
    both = Both(QueuePlusExec, Balance(cap=float("inf"), warmup_s=0), 41, [Kind.PREFILL] + [Kind.DECODE] * 40, [1.0], 1)
    for number in range(40 if busy else 0):  # one for each
        both.route(np.repeat(np.int32([2, number]), BLOCK), None)
    for scheduler in both.schedulers:
        for at in range(21, 41):
            scheduler.tree(Kind.DECODE).insert(np.repeat(np.int32([1]), BLOCK), at)
    few, every = (scheduler.route(Request(np.repeat(np.int32([1, 2]), BLOCK))) for scheduler in both.schedulers)
    assert few == every
    assert (few.decode, few.decode_cached) == (21, BLOCK)


def test_a_large_fleet_is_not_scanned_as_a_whole(monkeypatch):
    """Hundreds of instances, idle, busy and late ones, and a prefix that half of them hold."""
    views = []
    seen = choosing.view
    monkeypatch.setattr(choosing, "view", lambda *of: views.append(of) or seen(*of))
    for policy in (LeastLoad, LongestPrefix, QueuePlusExec, KeepHits):
        both = Both(policy, Balance(idle=0, warmup_s=0, half_life_s=64.0), 300, [Kind.COLOCATED], [1.0], 0)
        few, _ = both.schedulers
        for at in range(0, 300, 2):
            few.tree(Kind.COLOCATED).insert(np.repeat(np.int32([1, 2]), BLOCK), at)
        for number in range(500):
            ticket = few.route(Request(np.repeat(np.int32([1, 2, 3, number]), BLOCK))).ticket
            both.now += 1 / 64
            if number % 3:
                few.first_token(ticket)
    assert len(views) < 15


@pytest.mark.parametrize("holding", [0, 40, 300])
def test_many_equally_late_instances_are_not_scanned_one_by_one(monkeypatch, holding):
    """Instances that take longer than predicted have the same backlog, none; here hundreds have the same load too."""
    views, looks = [], []
    seen, look = choosing.view, search._Search._consider
    monkeypatch.setattr(choosing, "view", lambda *of: views.append(of) or seen(*of))
    monkeypatch.setattr(search._Search, "_consider", lambda *of: looks.append(of) or look(*of))
    for policy in (LeastLoad, SessionId, QueuePlusExec, KeepHits):
        both = Both(policy, Balance(idle=0, warmup_s=0, half_life_s=64.0), 300, [Kind.COLOCATED], [1.0], 0)
        for scheduler in both.schedulers:
            for at in range(holding):
                scheduler.tree(Kind.COLOCATED).insert(np.repeat(np.int32([1]), BLOCK), at)
        for number in range(300):  # one for each
            both.route(np.repeat(np.int32([2, number]), BLOCK), None)
            both.now += 1 / 64
        both.now += 64.0
        views.clear()
        looks.clear()
        for number in range(100):
            both.route(np.repeat(np.int32([1, 2, number]), BLOCK), str(number))
            both.now += 1 / 64
        assert len(views) <= 100 + 5, policy  # each decision of the one that looks at all
        assert len(looks) < 100 * 20, policy


def test_a_custom_ranking_considers_cached_tokens_unless_it_says_otherwise():
    class Own(LeastLoad):
        def rank(self, backlog, load, cached, exec_s):
            return -cached, backlog

    class Same(LeastLoad):
        pass

    class Neither(LeastLoad):
        minds_cached = False

        def rank(self, backlog, load, cached, exec_s):
            return load, backlog

    kinds = (LeastLoad, SessionId, LongestPrefix, QueuePlusExec, Own, Same, Neither)
    assert [each.minds_cached for each in kinds] == [False, False, True, True, True, False, False]
    both = Both(Own, Balance(cap=float("inf"), warmup_s=0), 30, [Kind.COLOCATED], [1.0], 0)
    for scheduler in both.schedulers:
        scheduler.tree(Kind.COLOCATED).insert(np.repeat(np.int32([1]), BLOCK), 17)
    assert both.schedulers[0].route(Request(np.repeat(np.int32([1, 2]), BLOCK))).instance == 17


def test_rounding_errors_of_a_backlog_decide_nothing():
    backlog, load = np.array([0.0, 2.8e-17, 1.0]), np.array([5.0, 0.2, 0.1])
    ranks = QueuePlusExec().rank(backlog, load, 0, 1.0)
    assert first_of(ranks, 3).tolist() == [1]


def test_all_instances_of_equal_rank_are_listed():
    ranks = LongestPrefix().rank(np.array([1.0, 0.0, 0.0]), np.array([0.0, 2.0, 2.0]), 7, 1.0)
    assert first_of(ranks, 3).tolist() == [1, 2]
