"""The router by KV events: prompts go to the instance that has them cached, though the router has sent them nowhere.

The instances are fakes, and a pool beside each publishes what is cached there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import BLOCK, small_pool, store
from router.router_kit import Fake, Running, eventually, fakes, logged, routing

import kvpool.observe.events
from kvpool import Pool, cli
from kvpool.control.router import (
    EventsSpec,
    InstanceSpec,
    Router,
    RouterSettings,
    following,
)
from kvpool.errors import ArgumentError, Unsupported
from kvpool.observe.events import EventPublisher

ROLES = {"system": 1, "user": 2, "assistant": 3}
SYSTEM = {"role": "system", "content": "You are of help."}


def tokens_of(fields: dict[str, Any]) -> dict[str, Any]:
    """A model's tokenizer and template: nothing that the router could find out from the text."""
    if "prompt" in fields:
        return {"tokens": [4, *fields["prompt"].encode()]}
    said = [[ROLES[each["role"]], *each["content"].encode(), 9] for each in fields["messages"]]
    return {"tokens": [token for each in said for token in each] + [3] * fields.get("add_generation_prompt", True)}


def chat(*questions: str) -> dict[str, Any]:
    return {"model": "m", "messages": [SYSTEM, *({"role": "user", "content": each} for each in questions)]}


class Cached:
    """What an instance has cached, and tells."""

    def __init__(self, pool: Pool, publisher: EventPublisher) -> None:
        self.pool = pool
        self.spec = EventsSpec(publisher.endpoint, publisher.replay_endpoint)

    def store(self, tokens: list[int], namespace: str = "") -> int:
        """Returns how many tokens of it are cached."""
        whole = np.array(tokens[: len(tokens) // BLOCK * BLOCK], np.int32)
        store(self.pool, whole, namespace=namespace)
        return len(whole)


@contextlib.contextmanager
def caches(*names: str, blocks: int = 256) -> Iterator[dict[str, Cached]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for name in names:
            pool = stack.enter_context(small_pool(blocks, 0))
            found[name] = Cached(pool, stack.enter_context(EventPublisher(pool, interval=0.005)))
        yield found


@contextlib.contextmanager
def followed(two: list[Fake], cached: dict[str, Cached], **settings: Any) -> Iterator[Running]:
    """A router that follows them and knows nothing of them by itself for long."""
    for fake in two:
        fake.tokens_of = tokens_of
    settings = {
        "events": {name: each.spec for name, each in cached.items()}, "block_tokens": BLOCK, "tokenize": "/tokenize",
        "tokenize_timeout_s": 30.0, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0,
    } | settings  # fmt: skip
    with routing(*two, **settings) as running:
        eventually(lambda: all(each["events"]["synced"] for each in running.states().values() if each["events"]))
        yield running


def blocks(running: Running, name: str) -> int:
    return running.states()[name]["cached_blocks"]


def ask(running: Running, fields: dict[str, Any]) -> tuple[str, int]:
    """Where a chat went, and how many of its tokens the router believed to be cached there."""
    before = running.metric("prompt_tokens_cached_total")
    response = running.client.post("/v1/chat/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.headers["x-kvpool-instance"], int(running.metric("prompt_tokens_cached_total") - before)


@pytest.mark.parametrize("policy", ["longest-prefix", "queue-plus-exec", "keep-hits"])
def test_a_chat_goes_to_the_instance_that_has_it_cached_by_its_own_events(policy):
    with fakes("a", "b") as two, caches("a", "b") as cached, followed(two, cached, policy=policy) as running:
        for number, name in enumerate("babba"):
            fields = chat(f"{number} A question that was asked elsewhere. " * 3)
            told = tokens_of(fields)["tokens"]
            before = blocks(running, name)
            whole = cached[name].store(told)
            eventually(lambda name=name, before=before: blocks(running, name) > before)
            assert ask(running, fields) == (name, whole)
            # The next turn shares what the template puts before the answer, not the text of the request.
            assert ask(running, chat(fields["messages"][1]["content"], "And then?"))[0] == name
        assert running.metric("tokenize_seconds_count") == 10
        assert running.metric("prompts_untokenized_total", reason="failed") == 0


def test_texts_and_tokens_of_completions_match_events_and_salts_are_namespaces():
    with fakes("a", "b") as two, caches("a", "b") as cached, followed(two, cached) as running:
        text = "A text of some length, which is cached."
        told = tokens_of({"prompt": text})["tokens"]
        cached["b"].store(told)
        cached["a"].store(told, namespace="tenant")
        eventually(lambda: blocks(running, "a") and blocks(running, "b"))
        assert running.where(text) == running.where(told) == running.where([text, "other"]) == "b"
        assert running.where(text, cache_salt="tenant") == running.where(told, cache_salt="tenant") == "a"
        counted = running.metric("prompt_tokens_cached_total")
        running.complete(text, cache_salt="s" * 65)  # too long to be stored as it is: no match
        running.complete(text, cache_salt=["odd"])
        assert running.metric("prompt_tokens_cached_total") == counted


def test_what_an_instance_drops_is_forgotten():
    fields = chat("A question that was asked elsewhere. " * 3)
    with fakes("a", "b") as two, caches("a", "b") as cached, followed(two, cached) as running:
        told = tokens_of(fields)["tokens"]
        whole = cached["b"].store(told)
        eventually(lambda: blocks(running, "b"))
        assert ask(running, fields) == ("b", whole)
        cached["b"].pool.delete(np.array(told[:whole], np.int32))
        eventually(lambda: not blocks(running, "b"))
        assert ask(running, fields)[1] == 0


def test_an_instance_that_clears_its_cache_or_is_started_again_is_forgotten():
    fields = chat("A question that was asked elsewhere. " * 3)
    told = tokens_of(fields)["tokens"]
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        ports = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    with fakes("a", "b") as two, caches("a") as cached, contextlib.ExitStack() as stack:
        pool = stack.enter_context(small_pool(256, 0))
        publisher = EventPublisher(pool, ports[0], replay_endpoint=ports[1], interval=0.005)
        cached["b"] = Cached(pool, publisher)
        running = stack.enter_context(followed(two, cached))
        whole = cached["b"].store(told)
        eventually(lambda: blocks(running, "b"))
        assert ask(running, fields) == ("b", whole)
        pool.close()  # the last event of it clears all
        eventually(lambda: not blocks(running, "b"))
        publisher.close()
        fresh = stack.enter_context(small_pool(256, 0))
        again = stack.enter_context(EventPublisher(fresh, ports[0], replay_endpoint=ports[1], interval=0.005))
        assert ask(running, fields)[1] == 0
        other = chat("Another one, which the new incarnation has. " * 3)
        whole = Cached(fresh, again).store(tokens_of(other)["tokens"])
        eventually(lambda: blocks(running, "b") * BLOCK >= whole)
        assert ask(running, other) == ("b", whole)


def test_an_ejected_instance_is_forgotten_and_learnt_again_when_it_returns():
    fields = chat("A question that was asked elsewhere. " * 3)
    with fakes("a", "b") as two, caches("a", "b") as cached, followed(two, cached) as running:
        whole = cached["b"].store(tokens_of(fields)["tokens"])
        eventually(lambda: blocks(running, "b"))
        two[1].well = False
        eventually(lambda: running.state("b") == "out")
        assert running.states()["b"]["events"] is None
        assert [running.metric("events_synced", engine=name) for name in "ab"] == [1, 0]
        assert ask(running, fields)[0] == "a"
        cached["a"].store(tokens_of(chat("Something else. " * 3))["tokens"])  # the others are followed on
        eventually(lambda: blocks(running, "a") > 1)
        two[1].well = True
        eventually(lambda: blocks(running, "b") * BLOCK == whole, "it was not learnt again")


def test_an_instance_without_events_stands_beside_one_with_events():
    fields = chat("A question that was asked elsewhere. " * 3)
    with fakes("a", "b") as two, caches("b") as cached, followed(two, cached) as running:
        assert running.states()["a"]["events"] is None
        home = ask(running, fields)[0]
        assert ask(running, fields)[0] == home  # by the router's memory
        other = chat("Another question that was asked elsewhere. " * 3)
        whole = cached["b"].store(tokens_of(other)["tokens"])
        eventually(lambda: blocks(running, "b") * BLOCK >= whole)
        assert ask(running, other) == ("b", whole)


def test_blocks_of_another_size_are_told_once():
    with logged() as records, fakes("a", "b") as two, caches("a") as cached:
        with followed(two, cached, block_tokens=2 * BLOCK) as running:
            for number in range(3):
                cached["a"].store(tokens_of(chat(f"{number} question " * 3))["tokens"])
            eventually(lambda: running.states()["a"]["events"]["left_out"] > 3)
            warnings = [each for each in records if each.levelno == logging.WARNING]
            eventually(lambda: [each for each in records if each.getMessage() == "events ignored"])
            assert blocks(running, "a") == 0
        assert len([each for each in records if each.getMessage() == "events ignored"]) == 1, warnings


def test_an_address_that_zmq_refuses_costs_the_events_alone():
    with logged() as records, fakes("a") as one:
        with routing(*one, events={"a": EventsSpec("tcp://no!host:1")}) as running:
            assert running.states()["a"]["events"] is None
            assert running.where("hello") == "a"
        assert [each for each in records if each.getMessage() == "instance not followed"]


def test_following_that_fails_is_tried_again_and_costs_the_events_alone(monkeypatch):
    real, failing = kvpool.observe.events.EventSubscriber, True

    def subscriber(*arguments: Any, **options: Any) -> Any:
        if failing:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(*arguments, **options)

    monkeypatch.setattr(kvpool.observe.events, "EventSubscriber", subscriber)
    with logged() as records, fakes("a", "b") as two, caches("a") as cached:
        settings = {"block_tokens": BLOCK, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0}
        with routing(*two, events={"a": cached["a"].spec}, **settings) as running:
            assert running.states()["a"]["events"] is None
            home = running.where([7] * 40)
            assert running.where([7] * 40) == home  # by what the router has sent where
            failing = False
            eventually(lambda: (running.states()["a"]["events"] or {}).get("synced"))
            whole = cached["a"].store([8] * 40)
            eventually(lambda: blocks(running, "a") * BLOCK >= whole)
            assert running.where([8] * 40) == "a"
    assert len([each for each in records if each.getMessage() == "instance not followed"]) == 1
    assert not [each for each in records if each.levelno >= logging.ERROR]


def test_without_the_packages_for_events_the_log_says_so_once(monkeypatch):
    """Members of a cluster publish events unasked, and are routed to all the same."""
    tried: list[int] = []

    def no_subscriber() -> Any:
        tried.append(1)
        raise ImportError("No module named 'zmq'")

    monkeypatch.setattr(following, "_subscriber", no_subscriber)
    with logged() as records, fakes("a") as one, routing(*one) as running:
        for number in (1, 2, 1, 2):
            spec = EventsSpec(f"tcp://127.0.0.1:{number}")
            running.router.fleet._following.follow(InstanceSpec("b", "http://h:1", events=spec), number, None)
    (told,) = [each for each in records if each.getMessage() == "instances not followed"]
    assert "pip install 'kvpool[events]'" in str(vars(told))
    assert len(tried) == 1
    with pytest.raises(Unsupported, match="--events needs pyzmq"):
        Router(RouterSettings((InstanceSpec("a", "http://h:1"),), events={"a": EventsSpec("tcp://h:1")}))


def test_an_instance_whose_thread_has_failed_is_followed_anew(monkeypatch):
    with fakes("a") as one, caches("a") as cached, followed(one, cached) as running:
        whole = cached["a"].store([7] * 40)
        eventually(lambda: blocks(running, "a") * BLOCK == whole)
        monkeypatch.setattr(kvpool.observe.events.subscriber, "decode", None)  # which ends the thread
        cached["a"].store([8] * 40)
        eventually(lambda: blocks(running, "a") == 0)
        monkeypatch.undo()
        eventually(lambda: blocks(running, "a") * BLOCK == 2 * whole)


# ---- settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"events": {"b": EventsSpec("tcp://h:1")}}, "events of b: no such instance"),
        ({"events": {"a": EventsSpec("tcp://h:1", "tcp://h:1")}}, "tcp://h:1 is there twice"),
        ({"tokenize": "tokenize"}, "must begin with /"),
        ({"tokenize_timeout_s": 0.0}, "must be above 0"),
        ({"block_tokens": 0}, "must be from 1"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        RouterSettings((InstanceSpec("a", "http://h:1"),), **wrong)
    one = {"instances": (InstanceSpec("a", "http://h:1"),), "admin_port": 1}
    RouterSettings(**one, events={"b": EventsSpec("tcp://h:1")})
    with pytest.raises(ArgumentError, match="tells of one instance"):
        RouterSettings(**one, events={"a": EventsSpec("tcp://h:1"), "b": EventsSpec("tcp://h:1")})


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "h:5557", "tcp://h", "tcp://h:65536", "tcp://h:0", "", "http://h:1", "ipc://"]
)
def test_an_endpoint_to_which_nobody_can_connect_is_refused(endpoint):
    with pytest.raises(ArgumentError, match="an address to connect to"):
        EventsSpec(endpoint)
    with pytest.raises(ArgumentError, match="an address to connect to"):
        EventsSpec("tcp://h:1", endpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--events", "tcp://h:1"], "must be NAME=ENDPOINT"),
        (["--events", "a=tcp://h:1,a=tcp://h:2"], "each name once"),
        (["--events-replay", "a=tcp://h:1"], "which --events does not name"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    assert cli.main(["router", "--instances", "a=http://h:1", *arguments]) != 0
    assert message in capsys.readouterr().err
