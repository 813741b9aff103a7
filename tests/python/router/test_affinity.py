"""Where prompts go: prefixes, sessions, load, newcomers."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from router.router_kit import PATIENCE_S, eventually, fakes, httpx, routing

DOCUMENT = "A long document that many questions are asked about. " * 40


@pytest.mark.parametrize("policy", ["longest-prefix", "queue-plus-exec", "keep-hits"])
def test_prompts_that_begin_alike_go_where_they_are_cached(policy):
    with fakes("a", "b", "c") as three, routing(*three, policy=policy, cap=1000, warmup_s=0.0) as running:
        homes = {}
        for number in range(6):
            homes[number] = running.where(f"{number} {DOCUMENT}")
        assert len(set(homes.values())) == 3  # they spread
        for number, home in homes.items():
            for question in ("Who?", "What?", "Where?"):
                assert running.where(f"{number} {DOCUMENT}{question}") == home
        # Most of these prompts was cached, and the router knew it.
        assert running.metric("prompt_tokens_cached_total") > 0.7 * running.metric("prompt_tokens_total")


def test_a_continued_chat_stays_at_its_instance():
    with fakes("a", "b", "c") as three, routing(*three, policy="longest-prefix", cap=1000, warmup_s=0.0) as running:
        for number in range(6):
            tools = [{"type": "function", "function": {"name": "f"}}]
            messages = [{"role": "system", "content": f"{number} You are of help. " * 10}]
            homes = set()
            for turn in range(3):
                messages.append({"role": "user", "content": f"question {turn}, which takes a separate line to ask"})
                fields = {"model": "tiny", "messages": messages, "tools": tools}
                response = running.client.post("/v1/chat/completions", json=fields)
                homes.add(response.headers["x-kvpool-instance"])
                messages.append({"role": "assistant", "content": response.json()["choices"][0]["text"]})
            assert len(homes) == 1


def test_tokens_that_are_sent_are_used():
    with fakes("a", "b", "c") as three, routing(*three, policy="longest-prefix", cap=1000, warmup_s=0.0) as running:
        prompts = [[number, *range(1000)] for number in range(6)]
        homes = [running.where(prompt) for prompt in prompts]
        assert len(set(homes)) == 3
        assert [running.where([*prompt, 7, 8]) for prompt in prompts] == homes


def test_models_and_salts_share_nothing():
    with fakes("a") as one, routing(*one) as running:

        def cached(**fields) -> float:
            before = running.metric("prompt_tokens_cached_total")
            running.complete(DOCUMENT, **fields)
            return running.metric("prompt_tokens_cached_total") - before

        assert cached(model="m") == 0
        assert cached(model="m") > 0
        assert cached(model="n") == 0
        assert cached(model="m", cache_salt="s") == 0
        assert cached(model="m", cache_salt="s") > 0
        assert cached(model="m", cache_salt="t") == 0


def test_a_session_stays_at_its_instance_whatever_its_prompts():
    with fakes("a", "b", "c") as three, routing(*three, policy="session-id", warmup_s=0.0) as running:
        for number in range(5):
            by_header = {running.where(f"{turn} {number}", headers={"x-session-id": f"h{number}"}) for turn in range(4)}
            by_user = {running.where(f"{turn} {number}", user=f"u{number}") for turn in range(4)}
            assert len(by_header) == len(by_user) == 1


def test_least_load_spreads():
    with fakes("a", "b") as two, routing(*two, policy="least-load", warmup_s=0.0) as running:
        homes = Counter(running.where(DOCUMENT) for _ in range(20))
        assert min(homes.values()) >= 5


def test_a_hot_prefix_does_not_drown_its_instance():
    """All ask about one document at once; with a cap of the mean no instance gets everything."""
    with fakes("a", "b") as two, routing(*two, policy="longest-prefix", cap=1.0, idle=0.0, warmup_s=0.0) as running:
        running.where(DOCUMENT)

        async def ask() -> Counter:
            async with httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S, trust_env=False) as client:
                fields = [{"prompt": DOCUMENT + str(number), "first_s": 1.0} for number in range(40)]
                answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in fields))
                return Counter(answer.headers["x-kvpool-instance"] for answer in answers)

        homes = asyncio.run(ask())
        assert min(homes["a"], homes["b"]) >= 5


def test_a_newcomer_gets_its_load_gradually():
    """Of equal prompts the empty newcomer would draw all; with its small share it does not."""
    with fakes("a", "b", "n") as three, routing(*three[:2], cap=1.0, idle=0.0, warmup_s=3600.0) as running:
        for number in range(20):
            running.where(f"{number} {DOCUMENT}")
        added = running.admin.post("/instances", json={"name": "n", "url": three[2].spec.url})
        assert added.status_code == 201
        eventually(lambda: running.state("n") == "healthy")
        homes = Counter(running.where(f"new {number} {DOCUMENT}") for number in range(30))
        assert homes["n"] <= 20
        assert homes["a"] + homes["b"] >= 10
