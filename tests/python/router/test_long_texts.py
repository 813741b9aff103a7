"""Tokens of long texts: they are asked for up to a limit, with time in proportion, and cost other prompts nothing."""

from __future__ import annotations

from typing import Any

import pytest
from kit import BLOCK
from router.router_kit import eventually, fakes, routing
from router.test_following import caches, chat, followed, tokens_of

from kvpool.control.reading.prompts import INLINE_BYTES, has_few_values, units
from kvpool.control.router import token_source, upstream


def test_a_long_text_goes_where_it_is_cached(monkeypatch):
    asked, post = [], upstream.Asker.post

    async def noted(self: Any, *given: Any) -> Any:
        asked.append(given[-1])
        return await post(self, *given)

    monkeypatch.setattr(upstream.Asker, "post", noted)
    text = "A text of some length, which is cached elsewhere. " * 4000
    fields = chat(text)
    with fakes("a", "b") as two, caches("a", "b", blocks=100_000) as cached:
        with followed(two, cached) as running:
            whole = cached["b"].store(tokens_of(fields)["tokens"])
            eventually(lambda: running.states()["b"]["cached_blocks"] * BLOCK == whole)
            eventually(lambda: running.metric("events_synced", engine="b"))
            response = running.client.post("/v1/chat/completions", json=fields)
            assert response.headers["x-kvpool-instance"] == "b"
            assert running.metric("prompt_tokens_cached_total") == whole
            assert asked == [units(text.encode())] == [4]  # times the timeout
            running.client.post("/v1/chat/completions", json=chat(text * 2))
            assert len(asked) == 1
            assert running.metric("prompts_untokenized_total", reason="long") == 1


def test_long_texts_that_take_long_do_not_end_the_questions_of_others(monkeypatch):
    monkeypatch.setattr(token_source, "PAUSE_S", 600.0)
    monkeypatch.setattr(upstream, "_ASK_LATE_S", 600.0)
    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_timeout_s=0.05) as running:
        one[0].tokens_of = tokens_of
        one[0].holds_tokens = True
        for number in range(5):
            running.complete(f"{number}" * 100_000)
        assert running.metric("prompts_untokenized_total", reason="slow") == 3
        assert running.metric("prompts_untokenized_total", reason="nobody") == 2, "of long texts nobody is asked now"
        one[0].holds_tokens = False
        running.complete("short")
        assert running.metric("prompts_untokenized_total", reason="nobody") == 2


def test_the_time_for_a_text_is_bounded(monkeypatch):
    times = []

    async def refuses(*given: Any) -> Any:
        times.append(given[-1])
        return 400, b""

    monkeypatch.setattr(upstream.Asker, "post", refuses)
    with fakes("a") as one, routing(*one, tokenize="/tokenize", tokenize_bytes_max=1 << 20) as running:
        running.complete("x" * 1_000_000)
    assert times == [8]


def test_a_late_answer_is_charged_to_the_instance_that_was_asked(monkeypatch):
    """It is ejected while a question is under way: what has come back since has failed nothing."""
    with fakes("a") as one, routing(*one, tokenize="/tokenize") as running:
        fleet, tokenizing = running.router.fleet, running.router._tokenizing
        (instance,) = fleet

        async def late(*_: Any) -> Any:
            instance.epoch += 1
            raise upstream.UpstreamError("no answer in time", sent=True) from TimeoutError()

        monkeypatch.setattr(upstream.Asker, "post", late)
        before = (instance.number, instance.epoch)
        running.complete("x" * 100_000)
        assert tokenizing._asked_long[before]._faults == 1
        assert not any(each._faults for each in tokenizing._sources(instance, True))


@pytest.mark.parametrize(("size", "times"), [(0, 1), (INLINE_BYTES, 1), (INLINE_BYTES + 1, 2), (4 * INLINE_BYTES, 4)])
def test_a_long_body_may_have_as_many_values_as_short_ones_of_its_length(size, times):
    assert units(bytes(size)) == times
    most = 4096 * times
    if size >= most:
        assert has_few_values(b"[" * most + bytes(size - most))
        assert not has_few_values(b"[" * (most + 1) + bytes(size - most - 1))
