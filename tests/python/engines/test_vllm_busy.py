"""Prompts are sent to an engine that is saving a prompt with the same beginning."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from attach_kit import eventually
from engines.vllm_kit import Request, prompt
from engines.vllm_members_kit import TO
from engines.vllm_workers_kit import OneWorker, WorkersEngine

TOKENS = prompt(8) + [9] * 22


@contextlib.contextmanager
def sender_and_saver(url: str, kind: Any, **how: Any) -> Iterator[Any]:
    """The second one's save of the beginning is under way, until `finish_all`."""
    with contextlib.ExitStack() as stack:
        made = [kind(url, "prefill-0", **how), WorkersEngine(url, "decode-0")]
        for engine in made:
            stack.callback(engine.close)
        prefill, decode = made
        eventually(lambda: prefill.is_member("decode-0") and decode.is_member("prefill-0"))
        pool = prefill.pool._pool if kind is WorkersEngine else prefill.pool
        pool._meet("decode-0", 20)
        other = decode.start(Request("other", prompt(8) + [5] * 5))
        assert decode.admit(other)
        decode.step({"other": 13})
        yield made
        decode.finish(other)


def computed(prefill: Any, request: Request) -> Any:
    """Computes and ends a prompt, whose send is refused once at least. Returns what the answer says."""
    prefill.start(request)
    assert prefill.admit(request)
    prefill.step({request.request_id: 30})
    if isinstance(prefill, WorkersEngine):
        prefill.pool.finish_all()
        prefill.step({})
    eventually(lambda: has_met(prefill))
    return prefill.finish(request)


def has_met(prefill: Any) -> bool:
    """Whether the receiver has refused its send once."""
    of_workers = isinstance(prefill, WorkersEngine)
    assert prefill.index.has_work if of_workers else prefill.engine.sending
    return any(send.again_at is not None for send in sends_of(prefill))


def sends_of(engine: Any) -> Any:
    return (engine.index if isinstance(engine, WorkersEngine) else engine.engine)._sends._sends


@pytest.mark.parametrize(("kind", "how"), [(OneWorker, {}), (OneWorker, {"by_layer": True}), (WorkersEngine, {})])
def test_a_prompt_comes_when_the_save_has_ended(url, kind, how):
    """The receiver checks its content."""
    with sender_and_saver(url, kind, **how) as (prefill, decode):
        told = computed(prefill, Request("a", TOKENS, kv_transfer_params=TO))
        request = decode.start(Request("b", TOKENS, kv_transfer_params=told))
        assert decode.planner.match(request, 0) == (None, False)
        decode.pool.finish_all()
        decode.step({})
        prefill.advance()
        eventually(lambda: decode.planner.match(request, 0) == (28, False))
        figures = prefill.figures()
        assert (figures["sends"], "failed_sends" in figures) == (1, False)
        decode.finish(request)


@pytest.mark.parametrize("kind", [OneWorker, WorkersEngine])
def test_at_the_deadline_the_receiver_is_told(url, kind):
    with sender_and_saver(url, kind) as (prefill, decode):
        told = computed(prefill, Request("a", TOKENS, kv_transfer_params=TO))
        request = decode.start(Request("b", TOKENS, kv_transfer_params=told))
        assert decode.planner.match(request, 0) == (None, False)
        for send in sends_of(prefill):
            send._until = 0.0  # the time is over
        prefill.advance()
        assert prefill.figures()["failed_sends"] == 1
        eventually(lambda: decode.planner.match(request, 0)[0] is not None)
        assert decode.figures()["expired_waits"] == 1
        decode.finish(request)


def test_blocks_that_are_written_again_are_not_sent(url):
    """The send waits for its receiver, and vLLM gives its blocks to another request."""
    with sender_and_saver(url, OneWorker, blocks=10) as (prefill, decode):
        told = computed(prefill, Request("a", TOKENS, kv_transfer_params=TO))
        prefill.prefill(Request("c", prompt(30, seed=4)))
        decode.pool.finish_all()
        decode.step({})
        prefill.advance()
        assert prefill.figures().get("sends", 0) == 0
        assert decode.pool.explain_match(TOKENS).matched_tokens == 8
        assert told["kvpool"]["tokens"] == 28
