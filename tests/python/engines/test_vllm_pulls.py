"""Requests that fetch what other engines have cached of their prompts: real pools, no vLLM."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attach_kit import eventually
from engines.vllm_kit import Engine, Request, prompt
from engines.vllm_members_kit import Clock, engines
from engines.vllm_workers_kit import OneWorker, WorkersEngine

import kvpool
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.pulls import Pulls

FROM = {"kvpool": {"pull": "one"}}


@contextlib.contextmanager
def two_engines(url: str, first: Any, second: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        made = []
        for kind, name in ((first, "one"), (second, "two")):
            made.append(kind(url, name))
            stack.callback(made[-1].close)
        eventually(lambda: made[0].is_member("two") and made[1].is_member("one"))
        yield made


def saved(engine: Any, tokens: list[int], **how: Any) -> None:
    """The engine has it in its cache."""
    engine.decode(Request("saved", tokens, **how))
    if isinstance(engine, WorkersEngine):
        engine.advance()
    else:
        engine.engine.await_saves_of(None)


@pytest.mark.parametrize("kinds", [(OneWorker, WorkersEngine), (WorkersEngine, OneWorker)], ids=["one", "two workers"])
def test_what_another_engine_has_is_fetched_and_loaded(url, kinds):
    """Each engine checks the content of its workers."""
    with two_engines(url, *kinds) as (owner, engine):
        saved(owner, prompt(14))
        assert engine.decode(Request("a", prompt(22), kv_transfer_params=FROM)) == 12
        figures = engine.figures()
        assert (figures["pulls"], figures["pulled_tokens"]) == (1, 12)
        assert engine.decode(Request("b", prompt(14))) == 12
        assert engine.planner._pulls._pulls == {}


def test_only_what_is_missing_is_fetched(url):
    with engines(url, "one", "two") as (owner, engine):
        saved(owner, prompt(24))
        saved(engine, prompt(9))
        assert engine.decode(Request("a", prompt(25), kv_transfer_params=FROM)) == 24
        assert engine.figures()["pulled_tokens"] == 16
        assert engine.decode(Request("b", prompt(25), kv_transfer_params=FROM)) == 24
        assert "pulls" not in engine.figures()


def test_with_the_option_all_are_asked_and_the_longest_is_taken(url):
    with engines(url, "one", "two", "three", pull=True) as (short, long, engine):
        saved(short, prompt(9))
        saved(long, prompt(17))
        assert engine.decode(Request("a", prompt(25))) == 16
        assert engine.decode(Request("b", prompt(25, seed=1))) == 0
        assert engine.figures()["pulls"] == 1


def test_salts_stay_apart(url):
    with engines(url, "one", "two") as (owner, engine):
        saved(owner, prompt(14), cache_salt="one")
        assert engine.decode(Request("a", prompt(14), cache_salt="two", kv_transfer_params=FROM)) == 0
        assert engine.decode(Request("b", prompt(14), cache_salt="one", kv_transfer_params=FROM)) == 12


@pytest.mark.parametrize("name", ["nobody", "two"])
def test_who_cannot_be_asked_costs_nothing(url, name):
    with engines(url, "one", "two") as (_, engine):
        assert engine.decode(Request("a", prompt(14), kv_transfer_params={"kvpool": {"pull": name}})) == 0
        assert engine.figures()["failed_pulls"] == 1


def test_an_engine_that_is_gone_costs_nothing(url):
    with engines(url, "one", "two") as (owner, engine):
        saved(owner, prompt(14))
        assert engine.decode(Request("a", prompt(9), kv_transfer_params=FROM)) == 8
        owner.engine.close()
        assert engine.decode(Request("b", prompt(14), kv_transfer_params=FROM)) == 8
        assert engine.figures()["failed_pulls"] == 1


def test_a_prompt_that_another_engine_sends_is_not_fetched(url):
    with engines(url, "one", "two", pull=True) as (_, engine):
        told = {"kvpool": {"from": "one", "id": "never", "tokens": 12, "pull": "one"}}
        waiting = engine.start(Request("c", prompt(14), kv_transfer_params=told))
        assert engine.planner.match(waiting, 0) == (None, False)
        assert engine.planner._pulls._pulls == {}


def test_an_engine_alone_ignores_it(caplog):
    engine = Engine()
    engine.run(Request("a", prompt(14), kv_transfer_params=FROM))
    assert "in no cluster" in caplog.text
    engine.pool.finish_all()
    engine.close()


def test_a_request_that_ends_meanwhile_leaves_nothing(url):
    with engines(url, "one", "two") as (owner, engine):
        saved(owner, prompt(14))
        request = engine.start(Request("a", prompt(14), kv_transfer_params=FROM))
        assert engine.planner.match(request, 0) == (None, False)
        engine.finish(request)
        assert engine.planner._pulls._pulls == {}
        until = time.monotonic() + 20
        while not owner.engine.clear():  # the hold has ended
            assert time.monotonic() < until


# ---- peers that answer late, or not


class Answer:
    """A question to a peer, or a fetch from it."""

    def __init__(self, peer: str, tokens: int = 0, error: Exception | None = None):
        self.peer, self.tokens, self.error = peer, tokens, error
        self.answered = self.closed = self.cancelled = False
        self.stats = SimpleNamespace(blocks=tokens // 4, skipped_blocks=0)

    def done(self) -> bool:
        return self.answered

    def exception(self, timeout: float | None = None) -> Exception | None:
        assert self.answered
        return self.error

    def close(self) -> None:
        self.closed = True

    def cancel(self) -> None:
        self.cancelled = True


class Peers:
    """A pool whose peers answer when the test says so."""

    def __init__(self, *answers: Answer):
        self.answers, self.fetches, self.figures = list(answers), [], Figures()
        self.pool = self.peers = self
        self.asked: list[list[str]] = []
        self.lost: set[str] = set()  # their connections
        self.kv_layout = SimpleNamespace(block_tokens=4)

    def others(self) -> Sequence[str]:
        return [answer.peer for answer in self.answers]

    def list(self) -> list[Any]:
        return [SimpleNamespace(name=answer.peer) for answer in self.answers if answer.peer not in self.lost]

    def match(self, peers: Sequence[str], tokens: Any, namespace: str, **how: Any) -> Sequence[Answer]:
        self.asked.append(sorted(peers))
        assert how["wait"] is False
        assert 0 < how["timeout"] < how["hold"] <= 5
        return [answer for answer in self.answers if answer.peer in peers]

    def fetch_with_insert(self, peer: str, tokens: Any, **how: Any) -> Answer:
        self.fetches.append(Answer(peer, len(tokens)))
        return self.fetches[-1]


TOKENS = np.arange(21, dtype=np.int32)


def pulls_of(peers: Peers, clock: Clock) -> Pulls:
    pulls = Pulls(peers, 5, True, clock)  # type: ignore[arg-type]
    pulls.add("a", "")
    assert pulls.must_wait("a", TOKENS, 0)
    return pulls


def test_a_request_waits_for_the_answers_and_for_the_fetch():
    peers = Peers(Answer("short", 8), Answer("long", 16), Answer("broken", 99, kvpool.PeerLost("the test says so")))
    pulls = pulls_of(peers, Clock())
    for answer in peers.answers:
        assert pulls.must_wait("a", TOKENS, 0)
        assert not peers.fetches
        answer.answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    (fetch,) = peers.fetches
    assert (fetch.peer, fetch.tokens) == ("long", 16)
    assert [answer.closed for answer in peers.answers] == [True, False, True]  # the owner keeps it
    fetch.answered = True
    assert pulls.must_wait("a", TOKENS, 0)  # the cache is looked up once more
    assert all(answer.closed for answer in peers.answers)
    assert not pulls.must_wait("a", TOKENS, 16)


@pytest.mark.parametrize("asking", [True, False])
def test_no_request_waits_longer_than_the_deadline(asking):
    peers, clock = Peers(Answer("one", 16)), Clock()
    pulls = pulls_of(peers, clock)
    peers.answers[0].answered = not asking
    assert pulls.must_wait("a", TOKENS, 0)
    clock.now += 5
    assert not pulls.must_wait("a", TOKENS, 0)
    assert peers.answers[0].closed
    assert [fetch.cancelled for fetch in peers.fetches] == [True] * (not asking)
    assert peers.figures["failed_pulls"] == 1


def test_a_fetch_that_fails_ends_the_wait():
    peers = Peers(Answer("one", 16))
    pulls = pulls_of(peers, Clock())
    peers.answers[0].answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    peers.fetches[0].answered, peers.fetches[0].error = True, kvpool.OutOfBlocks("the test says so")
    pulls.must_wait("a", TOKENS, 0)
    assert not pulls.must_wait("a", TOKENS, 0)
    assert peers.figures["failed_pulls"] == 1


def test_what_is_here_is_not_fetched():
    peers = Peers(Answer("one", 16))
    pulls = pulls_of(peers, Clock())
    peers.answers[0].answered = True
    assert not pulls.must_wait("a", TOKENS, 16)
    assert not peers.fetches
    pulls.add("b", "")
    assert not pulls.must_wait("b", TOKENS, 20)


def test_a_reset_ends_all():
    peers = Peers(Answer("one", 16))
    pulls = pulls_of(peers, Clock())
    pulls.cancel()
    assert peers.answers[0].closed
    assert not pulls.must_wait("a", TOKENS, 0)


def test_the_time_begins_when_the_request_is_looked_up():
    """It may have waited for its turn before."""
    peers, clock = Peers(Answer("one", 16)), Clock()
    pulls = Pulls(peers, 5, True, clock)  # type: ignore[arg-type]
    pulls.add("a", "")
    clock.now += 6
    assert pulls.must_wait("a", TOKENS, 0)
    assert peers.asked == [["one"]]
    clock.now += 5
    assert not pulls.must_wait("a", TOKENS, 0)
    assert peers.figures == {"failed_pulls": 1, "pull_wait_seconds": 5}


def test_what_has_come_by_the_deadline_counts():
    peers, clock = Peers(Answer("one", 16)), Clock()
    pulls = pulls_of(peers, clock)
    peers.answers[0].answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    peers.fetches[0].answered = True
    clock.now += 5
    assert pulls.must_wait("a", TOKENS, 0)
    assert not pulls.must_wait("a", TOKENS, 16)
    assert (peers.figures["pulls"], "failed_pulls" in peers.figures) == (1, False)


def test_nothing_is_fetched_from_whom_it_would_have_to_connect_to():
    peers = Peers(Answer("long", 16), Answer("short", 8))
    pulls = pulls_of(peers, Clock())
    for answer in peers.answers:
        answer.answered = True
    peers.lost = {"long"}
    assert pulls.must_wait("a", TOKENS, 0)
    assert [fetch.peer for fetch in peers.fetches] == ["short"]
    peers.lost = {"long", "short"}
    pulls.add("b", "")
    assert pulls.must_wait("b", TOKENS, 0)
    assert not pulls.must_wait("b", TOKENS, 0)
    assert len(peers.fetches) == 1


def test_an_answer_that_covers_all_is_enough():
    peers = Peers(Answer("silent", 0), Answer("one", 20))
    pulls = pulls_of(peers, Clock())
    peers.answers[1].answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    assert [fetch.peer for fetch in peers.fetches] == ["one"]
    assert [answer.closed for answer in peers.answers] == [True, False]


@pytest.mark.parametrize("fetching", [False, True])
def test_who_has_not_answered_is_not_asked_for_a_time(fetching):
    hung = Answer("hung", 16, None if fetching else kvpool.DeadlineExceeded("the test says so"))
    peers, clock = Peers(hung, Answer("one", 8)), Clock()
    pulls = pulls_of(peers, clock)
    for answer in peers.answers:
        answer.answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    if fetching:
        peers.fetches[0].answered, peers.fetches[0].error = True, kvpool.DeadlineExceeded("the test says so")
        assert pulls.must_wait("a", TOKENS, 0)
    for request_id in "bc":
        pulls.add(request_id, "")
        assert pulls.must_wait(request_id, TOKENS, 0)
        clock.now += 6
    pulls.add("d", "", "hung")
    assert pulls.must_wait("d", TOKENS, 0)
    assert peers.asked == [["hung", "one"], ["one"], ["hung", "one"], ["hung"]]


def test_a_member_alone_that_has_not_answered_costs_nothing():
    peers = Peers(Answer("hung", 0, kvpool.DeadlineExceeded("the test says so")))
    pulls = pulls_of(peers, Clock())
    peers.answers[0].answered = True
    assert not pulls.must_wait("a", TOKENS, 0)
    pulls.add("b", "")
    assert not pulls.must_wait("b", TOKENS, 0)
    assert peers.asked == [["hung"]]


@pytest.mark.parametrize("ends", [True, False])
def test_a_fetch_of_what_is_being_saved_here_is_tried_again(ends):
    peers, clock = Peers(Answer("one", 16)), Clock()
    pulls = pulls_of(peers, clock)
    peers.answers[0].answered = True
    for number in range(3):
        assert pulls.must_wait("a", TOKENS, 0)
        assert len(peers.fetches) == number + 1
        peers.fetches[-1].answered, peers.fetches[-1].error = True, kvpool.Busy("the test says so")
        assert pulls.must_wait("a", TOKENS, 0)
    assert not peers.answers[0].closed
    if not ends:
        clock.now += 5
        assert not pulls.must_wait("a", TOKENS, 0)
        assert peers.figures["failed_pulls"] == 1
        return
    assert pulls.must_wait("a", TOKENS, 0)
    peers.fetches[-1].answered = True
    assert pulls.must_wait("a", TOKENS, 0)
    assert not pulls.must_wait("a", TOKENS, 16)
    assert peers.figures["pulls"] == 1


def test_a_prompt_whose_beginning_is_being_saved_here_is_fetched(url):
    with two_engines(url, OneWorker, WorkersEngine) as (owner, engine):
        tokens = prompt(8) + [9] * 22
        saved(owner, tokens)
        other = engine.start(Request("other", prompt(8) + [5] * 5))
        assert engine.admit(other)
        engine.step({"other": 13})  # its save is under way
        request = engine.start(Request("a", tokens, kv_transfer_params=FROM))
        assert engine.planner.match(request, 0) == (None, False)
        pull = engine.planner._pulls._pulls["a"]
        eventually(lambda: pull.asked[0].done())
        assert engine.planner.match(request, 0) == (None, False)
        (fetch,) = pull.fetches
        eventually(fetch.done)
        assert isinstance(fetch.exception(0), kvpool.Busy)
        engine.pool.finish_all()
        engine.step({})
        eventually(lambda: engine.planner.match(request, 0) == (28, False))
        assert engine.figures()["pulls"] == 1
        engine.finish(request)
        engine.finish(other)
