"""`kvpool router` before two servers of vLLM on kvpool: where prompts go, in halves and whole, and what a dead server
costs. The servers are members of a cluster, and publish vLLM's KV events.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from served import cached_of, complete, eventually, router, servers, tokens_of
from vllm_process import BLOCK, needs_vllm, prompt

import kvpool
from kvpool.observe.events.wire import BlockStored, decode

pytestmark = pytest.mark.timeout(600)

DOCUMENTS = [prompt(640, seed) for seed in range(6)]
COUNTED = {"a": "sent", "b": "loaded"}
QUESTIONS = [prompt(40, seed) for seed in range(100, 104)]


@pytest.fixture(scope="module")
def cluster():
    url = f"local://vllm-{secrets.token_hex(6)}"
    yield url

    def forgotten() -> bool:  # when the last process that was killed has ended
        with contextlib.suppress(kvpool.StateError):
            kvpool.Cluster.forget(url)
            return True
        return False

    eventually(forgotten, 30)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, cluster):
    needs_vllm()
    how = {"dram_gib": 0.5, "cluster": cluster}
    with servers(tmp_path_factory.mktemp("router"), a=dict(how), b=dict(how)) as two:
        yield two


def instances(pair) -> tuple[str, str]:
    return "--instances", ",".join(f"{name}={server.url}" for name, server in pair.items())


def only(pair, name: str) -> tuple[str, str]:
    return "--instances", f"{name}={pair[name].url}"


def test_prompts_that_begin_alike_go_to_one_server_and_are_cached_there(pair):
    with router(*instances(pair), up=2) as client:
        homes = {}
        for question in QUESTIONS:
            for number, document in enumerate(DOCUMENTS):
                answer = complete(client, document + question)
                homes.setdefault(number, set()).add(answer.headers["x-kvpool-instance"])
                assert cached_of(answer) == (0 if question is QUESTIONS[0] else 640)
        assert all(len(seen) == 1 for seen in homes.values())
        assert len(set().union(*homes.values())) == 2, "both work"
        assert all(server.metric("vllm:kvpool_saved_tokens_total") >= 640 for server in pair.values())


def test_members_of_the_cluster_are_found(pair, cluster):
    with router("--cluster", cluster, up=2) as client:
        assert {each["name"] for each in client.get("/instances").json()["instances"]} == {"a", "b"}
        assert complete(client, prompt(100, 90)).status_code == 200


def test_members_say_where_they_publish_their_events(pair, cluster):
    """Nothing but the cluster is named; what one member was asked past the router is found there."""
    numbers = itertools.count(900)
    options = ("--block-tokens", str(BLOCK), "--idle", "1", "--warmup", "0")
    with router("--cluster", cluster, *options, up=2) as client, router(*only(pair, "b"), up=1) as past:

        def blocks() -> int:
            return {each["name"]: each["cached_blocks"] for each in client.get("/instances").json()["instances"]}["b"]

        def heard() -> bool:  # a publisher sends nothing to those who come late
            complete(past, prompt(64, next(numbers)))
            return blocks() > 0

        eventually(heard, 60)
        before, tokens = blocks(), prompt(640, 91)
        complete(past, tokens)
        eventually(lambda: blocks() >= before + 640 // BLOCK, 60)
        answer = complete(client, tokens + QUESTIONS[0])
        assert (answer.headers["x-kvpool-instance"], cached_of(answer)) == ("b", 640)


def test_a_request_in_halves_is_computed_at_one_server_and_answered_by_the_other(pair):
    tokens = prompt(640, 50)
    counted = {name: pair[name].metric(f"vllm:kvpool_{what}_tokens_total") for name, what in COUNTED.items()}
    with router("--prefill", f"a={pair['a'].url}", "--decode", f"b={pair['b'].url}", up=2) as client:
        answer = complete(client, tokens, 16)
        assert (answer.headers["x-kvpool-prefill"], answer.headers["x-kvpool-instance"]) == ("a", "b")
        assert cached_of(answer) == 608, "all whole blocks but the last one, of which a token must be computed"
        assert len(tokens_of(answer)) == 16
    for (name, what), expected in zip(COUNTED.items(), (640, 608), strict=True):
        with router("--instances", f"{name}={pair[name].url}", up=1) as client:

            def counts(client=client, name=name, what=what, expected=expected) -> bool:
                complete(client, prompt(16, 51))  # vLLM counts what has ended with its steps
                return pair[name].metric(f"vllm:kvpool_{what}_tokens_total") == counted[name] + expected

            eventually(counts, 60)
    with router("--instances", f"a={pair['a'].url}", up=1) as client:
        assert tokens_of(complete(client, tokens, 16)) == tokens_of(answer)


def test_what_kvpool_caches_is_published_under_vllms_hashes(pair):
    stored: dict[str, dict] = {"GPU": {}, "CPU": {}}
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(pair["a"].events)

        def take() -> None:
            while socket.poll(200):
                for event in decode(socket.recv_multipart()[2]).events:
                    if isinstance(event, BlockStored):
                        stored[event.medium] |= dict.fromkeys(event.block_hashes, str(event.extra_keys))

        with router("--instances", f"a={pair['a'].url}", up=1) as client:
            number = itertools.count(200)

            def heard() -> bool:  # a publisher sends nothing to those who come late
                complete(client, prompt(64, next(number)))
                take()
                return bool(stored["GPU"])

            def saved() -> bool:  # saves end beside later steps
                complete(client, prompt(16, next(number)))
                take()
                return stored["CPU"].keys() >= stored["GPU"].keys()

            eventually(heard, 60)
            eventually(saved, 60)
            stored["GPU"].clear()
            stored["CPU"].clear()
            complete(client, prompt(320, 60))
            complete(client, prompt(320, 60), cache_salt="tenant")
            eventually(lambda: saved() and len(stored["GPU"]) == 20, 60)
    assert len(stored["GPU"]) == 20
    assert set(stored["CPU"]) == set(stored["GPU"])
    assert sum("tenant" in each for each in stored["CPU"].values()) > 0


def test_requests_of_a_server_that_dies_are_answered_by_the_other(pair):
    """The last test of this file: it kills one."""
    with router(*instances(pair), "--policy", "least-load", up=2) as client:
        expected = [tokens_of(complete(client, document, 48)) for document in DOCUMENTS]
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(complete, client, document, 48) for document in DOCUMENTS for _ in range(4)]
            busy = eventually(
                lambda: [each for each in client.get("/instances").json()["instances"] if each["in_flight"] > 2], 60
            )
            pair[busy[0]["name"]].kill()
            answers = [each.result() for each in asked]
        assert [tokens_of(answer) for answer in answers] == [tokens for tokens in expected for _ in range(4)]
        (other,) = {"a", "b"} - {busy[0]["name"]}
        assert complete(client, DOCUMENTS[0]).headers["x-kvpool-instance"] == other
        eventually(lambda: client.get("/health").json()["available"] == 1, 30)
