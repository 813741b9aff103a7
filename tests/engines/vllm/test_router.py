"""`kvpool router` before two servers of vLLM on kvpool: where prompts go, and what a dead server costs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from served import cached_of, complete, eventually, router, servers, tokens_of
from vllm_process import needs_vllm, prompt

pytestmark = pytest.mark.timeout(600)

DOCUMENTS = [prompt(640, seed) for seed in range(6)]
QUESTIONS = [prompt(40, seed) for seed in range(100, 104)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    needs_vllm()
    with servers(tmp_path_factory.mktemp("router"), a={"dram_gib": 0.5}, b={"dram_gib": 0.5}) as two:
        yield two


def instances(pair) -> tuple[str, str]:
    return "--instances", ",".join(f"{name}={server.url}" for name, server in pair.items())


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
