"""When instances do not tell the tokens of prompts: these are routed by their bytes, and others do not wait."""

from __future__ import annotations

from typing import Any

import pytest
from router.router_kit import Fake, fakes, routing
from router.test_following import ask, chat, tokens_of
from starlette.responses import JSONResponse, Response

from kvpool.control.router import (
    token_source,
    tokenizing,
    upstream,
)


@pytest.fixture
def long_pauses(monkeypatch):
    """No pause ends while a test runs, however busy the machine is."""
    monkeypatch.setattr(token_source, "PAUSE_S", 600.0)
    monkeypatch.setattr(token_source, "_PAUSE_MAX_S", 600.0)
    monkeypatch.setattr(upstream, "_ASK_LATE_S", 600.0)


def lower(fake: Fake) -> list[dict[str, str]]:
    return [headers for headers, _ in fake.asked]


@pytest.mark.parametrize(
    ("answer", "reason", "asked"),
    [
        (lambda fields: Response(status_code=400), "refused", 5),  # that may lie in the prompt
        (lambda fields: JSONResponse({"error": {"message": "no such model"}}, 404), "refused", 5),
        (lambda fields: JSONResponse({"detail": "Not Found"}, 404), "refused", 1),
        (lambda fields: Response(status_code=500), "refused", 3),  # other questions fail, too
        (lambda fields: {"tokens": "none"}, "wrong", 3),
        (lambda fields: {"tokens": [7] * 60_000}, "wrong", 3),  # more than the prompt can have
        (lambda fields: {"tokens": [7] * 1_000_000}, "failed", 3),
    ],
)
def test_without_tokens_prompts_are_routed_as_before(answer, reason, asked, long_pauses):
    fields = chat("A question that was asked before. " * 3)
    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_timeout_s=30.0) as running:
        one[0].tokens_of = answer
        assert ask(running, fields) == ("a", 0)
        for number in range(4):
            again = chat(*[each["content"] for each in fields["messages"][1:]], f"And {number}?")
            assert ask(running, again)[1] > 0  # by its bytes
        assert len(one[0].asked) == asked
        assert running.metric("prompts_untokenized_total", reason=reason) == asked
        assert running.metric("prompts_untokenized_total", reason="nobody") == 5 - asked


def test_no_client_ends_the_questions_of_others(long_pauses):
    """One that misspells the model, repeats a prompt that breaks the instance, or sends a header of odd bytes."""

    def answer(fields: dict[str, Any]) -> Any:
        if fields.get("model") == "typo":
            return JSONResponse({"detail": "not found"}, 404)
        return Response(status_code=500) if fields["prompt"] == "break" else tokens_of(fields)

    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_timeout_s=30.0) as running:
        one[0].tokens_of = answer
        running.complete("well")
        for number in range(4):
            running.complete(f"{number}", model="typo")
            running.complete("break")
        odd = {b"authorization": b"Bearer \xc3\xa9"}
        assert running.complete("well", headers=odd).status_code == 200  # type: ignore[arg-type]
        assert running.metric("prompts_untokenized_total", reason="refused") == 8
        assert running.metric("tokenize_seconds_count") == 10
        assert one[0].asked[-1][0]["authorization"].encode("latin-1") == odd[b"authorization"]


def test_an_unexpected_error_costs_the_tokens_alone(monkeypatch):
    with fakes("a") as one, routing(*one, tokenize="/tokenize") as running:

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(tokenizing, "question", broken)
        assert running.where("hello") == "a"
        assert running.metric("prompts_untokenized_total", reason="failed") == 1


def test_a_slow_instance_is_not_waited_for_and_another_one_is_asked_next(long_pauses):
    fields = chat("A question that was asked before. " * 3)
    with fakes("a", "b") as two, routing(*two, tokenize="/tokenize", tokenize_timeout_s=0.2) as running:
        two[0].holds_tokens = two[1].holds_tokens = True
        for slow, nobody in ((1, 0), (2, 0), (2, 1)):
            ask(running, fields)
            assert running.metric("prompts_untokenized_total", reason="slow") == slow
            assert running.metric("prompts_untokenized_total", reason="nobody") == nobody
        two[0].holds_tokens = two[1].holds_tokens = False


@pytest.mark.parametrize(
    ("settings", "sent", "seen"),
    [
        ({}, "Bearer client", "Bearer client"),
        ({"api_key": "router"}, "Bearer router", None),
        ({"instance_key": "instance"}, "Bearer client", "Bearer instance"),
    ],
)
def test_a_question_carries_the_key_that_the_request_does(settings, sent, seen):
    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_timeout_s=30.0, **settings) as running:
        running.client.headers["authorization"] = sent
        one[0].tokens_of = tokens_of
        ask(running, chat("hi"))
        assert [headers.get("authorization") for headers in lower(one[0])] == [seen]


def test_long_prompts_and_tokens_are_not_asked_about():
    settings = {"tokenize": "/tokenize", "tokenize_timeout_s": 30.0, "tokenize_bytes_max": 64 << 10}
    with fakes("a") as one, routing(*one, **settings) as running:
        one[0].tokens_of = tokens_of
        running.complete([1, 2, 3])
        ask(running, chat("x" * (64 << 10)))
        ask(running, {"messages": [{}] * 5000})
        assert one[0].asked == []
        assert running.metric("prompts_untokenized_total", reason="long") == 2
        ask(running, chat("x" * (63 << 10)))
        assert len(one[0].asked) == 1


def test_a_template_may_add_much_to_a_short_prompt():
    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_timeout_s=30.0) as running:
        one[0].tokens_of = lambda fields: {"tokens": [100_000] * 16_000}
        assert running.where("hi") == "a"
        assert running.metric("prompt_tokens_total") == 16_000
