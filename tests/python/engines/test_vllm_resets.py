"""A reset while other engines use what is dropped: it is not found any more."""

from __future__ import annotations

import pytest
from attach_kit import eventually
from engines.test_vllm_pulls import saved, two_engines
from engines.vllm_kit import Request, prompt
from engines.vllm_workers_kit import OneWorker, WorkersEngine

import kvpool


@pytest.mark.parametrize("kind", [OneWorker, WorkersEngine])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_what_a_peer_holds_is_not_found_after_a_reset(url, kind, salt):
    """VLLM's weights may be others by then."""
    with two_engines(url, kind, OneWorker) as (owner, peer):
        saved(owner, prompt(14), cache_salt=salt)
        request = peer.start(Request("a", prompt(14), cache_salt=salt, kv_transfer_params={"kvpool": {"pull": "one"}}))
        (asked,) = asks(peer, request)
        assert asked.tokens == 12
        assert not owner.planner.reset(), "the peer holds it"
        assert owner.decode(Request("b", prompt(14), cache_salt=salt)) == 0
        owner.advance()
        peer.finish(request)
        eventually(owner.planner.reset)
        assert owner.decode(Request("c", prompt(14), cache_salt=salt)) == 0


def asks(engine, request):
    assert engine.planner.match(request, 0) == (None, False)
    asked = engine.planner._pulls._pulls[request.request_id].asked
    eventually(lambda: all(match.done() for match in asked))
    return asked


@pytest.mark.parametrize("kind", [OneWorker, WorkersEngine])
def test_a_prompt_that_is_computed_again_after_a_reset_is_sent_again(url, kind):
    """The request was preempted before, as vLLM does with running requests if it is asked to."""
    with two_engines(url, kind, OneWorker) as (prefill, decode):
        request = prefill.start(Request("a", prompt(20), kv_transfer_params={"kvpool": {"to": "two"}}))
        assert prefill.admit(request)
        prefill.step({"a": 20})
        prefill.advance()
        eventually(lambda: decode.engine.arrived(prefill.planner.answer("a")["kvpool"]["id"]))
        prefill.preempt(request)
        eventually(prefill.planner.reset)
        assert prefill.planner.answer("a") is None
        assert prefill.admit(request)
        prefill.step({"a": 20})
        prefill.advance()
        told = prefill.finish(request)
        assert decode.decode(Request("b", prompt(20), kv_transfer_params=told)) == 16
        assert prefill.figures()["sends"] == 2


def test_a_reset_waits_for_no_receiver_of_what_is_saved(url):
    """It may not answer. The send reads DRAM, and what it reads is pinned."""
    with two_engines(url, WorkersEngine, OneWorker) as (prefill, _):
        prefill.prefill(Request("a", prompt(20)))
        sends = prefill.index._sends
        endless = Endless()
        sends._transfer = lambda *_: endless
        prefill.index.pool._meet("two", 20)
        prefill.start(request := Request("b", prompt(20), kv_transfer_params={"kvpool": {"to": "two"}}))
        assert prefill.admit(request)
        prefill.step({"b": 4})
        eventually(lambda: prefill.index.has_work and sends._sends)
        prefill.planner.reset()
        assert endless.cancelled
        assert not endless.over, "nobody has waited"
        endless.over = True
        prefill.finish(request)
        assert not sends.busy


class Endless:
    """A send to a receiver that does not answer."""

    def __init__(self) -> None:
        self.over = self.cancelled = False

    def done(self) -> bool:
        return self.over

    def exception(self, timeout: float | None = None) -> Exception | None:
        if timeout:  # it was waited for
            self.over = True
        return kvpool.Cancelled("the test says so")

    def cancel(self) -> None:
        self.cancelled = True
