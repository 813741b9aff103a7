"""Engines with workers in other processes send prompts to others, and get theirs: real pools, no vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from attach_kit import eventually
from engines.vllm_kit import Request, prompt
from engines.vllm_members_kit import TO
from engines.vllm_workers_kit import OneApart, OneWorker, WorkersEngine

import kvpool
from kvpool.engines.vllm.plans import SendPlan

SHAPES = {
    "two to one": (WorkersEngine, OneWorker),
    "one to two": (OneWorker, WorkersEngine),
    "two to two": (WorkersEngine, WorkersEngine),
    "one apart to one apart": (OneApart, OneApart),
}


@contextlib.contextmanager
def engines(url: str, kinds: Any, **how: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        made = []
        for kind, name in zip(kinds, ("prefill-0", "decode-0"), strict=True):
            made.append(kind(url, name, **how))
            stack.callback(made[-1].close)
        eventually(lambda: made[0].is_member("decode-0") and made[1].is_member("prefill-0"))
        yield made


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def pair(request, url) -> Iterator[Any]:
    with engines(url, request.param) as made:
        yield made


@pytest.fixture
def two_to_one(url) -> Iterator[Any]:
    with engines(url, SHAPES["two to one"]) as made:
        yield made


def test_a_prompt_that_was_computed_elsewhere_is_loaded(pair):
    """Each engine checks the content of its workers."""
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    assert told["kvpool"] == {"from": "prefill-0", "id": told["kvpool"]["id"], "tokens": 12}
    assert decode.decode(Request("b", prompt(14), kv_transfer_params=told)) == 12
    prefill.advance()
    figures = prefill.figures()
    assert (figures["sends"], figures["sent_tokens"]) == (1, 12)
    figures = decode.figures()
    assert (figures["prompt_waits"], figures["loaded_tokens"]) == (1, 12)
    assert "expired_waits" not in figures


def test_what_the_receiver_has_is_not_sent_again(pair):
    prefill, decode = pair
    for number, (tokens, sent) in enumerate([(prompt(13), 12), (prompt(13), 0), (prompt(12) + [7] * 9, 8)]):
        told = prefill.prefill(Request(str(number), tokens, kv_transfer_params=TO))
        prefill.advance()
        assert prefill.figures().get("sent_tokens", 0) == sent
        assert decode.decode(Request(str(number), tokens, kv_transfer_params=told)) == (len(tokens) - 1) // 4 * 4


def test_each_chunk_is_sent_when_it_is_saved(two_to_one):
    prefill, decode = two_to_one
    request = prefill.start(Request("a", prompt(20), kv_transfer_params=TO))
    assert prefill.admit(request)
    for computed in (8, 16, 20):
        prefill.step({"a": computed - request.num_computed_tokens})
        prefill.advance()
        assert decode.pool.explain_match(prompt(20)).matched_tokens == computed
    assert prefill.figures()["sent_tokens"] == 20
    told = prefill.finish(request)
    assert decode.decode(Request("b", prompt(20), kv_transfer_params=told)) == 16


def test_chunks_that_are_saved_together_are_sent_together(two_to_one):
    prefill, _ = two_to_one
    prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO), chunk=8)
    assert (figures := prefill.figures())["sends"] == 1
    assert figures["sent_tokens"] == 40


def test_salts_stay_apart(pair):
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(14), cache_salt="one", kv_transfer_params=TO))
    assert decode.decode(Request("b", prompt(14), cache_salt="two", kv_transfer_params=told)) == 0
    assert decode.decode(Request("c", prompt(14), cache_salt="one", kv_transfer_params=told)) == 12


def test_after_a_reset_prompts_are_sent_and_found_again(pair):
    prefill, decode = pair
    for number in range(2):
        told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
        assert decode.decode(Request(str(number), prompt(14), kv_transfer_params=told)) == 12
        for engine in pair:
            engine.advance()
            eventually(engine.planner.reset)
        assert decode.decode(Request("c", prompt(14))) == 0
        decode.advance()
        eventually(decode.planner.reset)


def test_a_prompt_is_sent_when_all_workers_have_saved_it(two_to_one):
    prefill, decode = two_to_one
    request = prefill.start(Request("a", prompt(14), kv_transfer_params=TO))
    assert prefill.admit(request)
    prefill.step({"a": 14})
    assert prefill.finish(request)["kvpool"]["tokens"] == 12
    prefill.pool.workers[0].finish_all()
    prefill.step({})
    assert prefill.index.has_work
    assert prefill.index._sends._sends == []
    prefill.pool.workers[1].finish_all()
    prefill.step({})
    assert prefill.index.has_work
    assert len(prefill.index._sends._sends) == 1
    prefill.advance()
    assert decode.pool.explain_match(prompt(14)).matched_tokens == 12


def test_what_is_cached_already_is_sent_without_a_save(two_to_one):
    prefill, decode = two_to_one
    prefill.prefill(Request("a", prompt(17)))
    told = prefill.prefill(Request("b", prompt(17), kv_transfer_params=TO))
    assert prefill.external["b"] == 16
    assert decode.decode(Request("c", prompt(17), kv_transfer_params=told)) == 16


def test_of_what_a_worker_could_not_save_the_rest_is_sent(two_to_one):
    """The receiver need not wait until its deadline, and computes what is missing."""
    prefill, decode = two_to_one
    prefill.prefill(Request("a", prompt(8)))
    prefill.pool.workers[1].fail_saves = ["later"]
    told = prefill.prefill(Request("b", prompt(20), kv_transfer_params=TO))
    assert decode.decode(Request("c", prompt(20), kv_transfer_params=told)) == 8
    assert prefill.figures()["sent_tokens"] == 8


def test_when_nothing_was_saved_the_receiver_is_told(two_to_one):
    prefill, decode = two_to_one
    prefill.pool._pool._meet("decode-0", 20)
    prefill.pool.workers[1].fail_saves = ["later"]
    told = prefill.prefill(Request("a", prompt(20), kv_transfer_params=TO))
    assert told is not None  # nobody knew it yet
    assert decode.decode(Request("b", prompt(20), kv_transfer_params=told)) == 0
    assert decode.figures()["expired_waits"] == 1
    assert prefill.figures()["failed_sends"] == 1
    assert prefill.index._sends._failed == set()  # nobody will ask


def test_a_prompt_without_room_is_not_announced(url):
    with engines(url, SHAPES["two to one"], dram_blocks=4) as (prefill, decode):
        prefill.prefill(Request("a", prompt(17, seed=1)))
        with prefill.pool._pool.match(prompt(16, seed=1)) as held:
            assert held.tokens == 16
            request = prefill.start(Request("b", prompt(20), kv_transfer_params=TO))
            assert prefill.admit(request)
            prefill.step({"b": 19})
            eventually(lambda: not prefill.index._sends.busy)
            prefill.step({"b": 1})
            assert prefill.finish(request) is None
        assert prefill.index._sends._failed == set()
        assert decode.decode(Request("c", prompt(20))) == 0


def test_a_receiver_that_is_gone_is_a_failed_send(two_to_one):
    prefill, decode = two_to_one
    prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    decode.engine.close()
    eventually(lambda: not prefill.is_member("decode-0"))
    prefill.prefill(Request("b", prompt(14), kv_transfer_params=TO))
    assert prefill.figures()["failed_sends"] == 1


def test_when_a_worker_is_lost_all_is_computed_at_both(two_to_one):
    prefill, decode = two_to_one
    prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    prefill.workers[1]._rank.close()
    with pytest.raises(kvpool.PeerLost):
        while True:
            prefill.index.pool.match(prompt(4)).close()
    told = prefill.prefill(Request("b", prompt(30, seed=1), kv_transfer_params=TO))
    assert prefill.figures()["failed_sends"] == 1
    prefill.pool.audit = lambda: None
    prefill.close()
    assert decode.decode(Request("c", prompt(30, seed=1), kv_transfer_params=told)) == 0


def test_a_prompt_that_waits_for_saves_at_a_reset_is_not_sent_and_its_receiver_is_told(two_to_one):
    prefill, decode = two_to_one
    prefill.pool._pool._meet("decode-0", 20)
    request = prefill.start(Request("a", prompt(14), kv_transfer_params=TO))
    assert prefill.admit(request)
    prefill.step({"a": 14})
    told = prefill.finish(request)
    prefill.planner.reset()
    prefill.advance()
    assert decode.decode(Request("b", prompt(14), kv_transfer_params=told)) == 0
    assert decode.figures()["expired_waits"] == 1
    assert prefill.index.clear()


def test_engines_on_other_hosts_reach_the_workers_by_tcp(url):
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("prefill-0", "decode-0"):
            made.append(WorkersEngine(url, name, listen="tcp:127.0.0.1:0"))
            stack.callback(made[-1].close)
        prefill, decode = made
        assert all(rank.address.startswith("tcp:127.0.0.1:") for rank in decode.index.pool.ranks)
        eventually(lambda: prefill.is_member("decode-0"))
        told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
        assert decode.decode(Request("b", prompt(14), kv_transfer_params=told)) == 12


# ---- an engine without requests


def test_an_engine_goes_on_until_its_workers_have_joined(url):
    engine = WorkersEngine(url, "alone", joined=False)
    assert engine.index.has_work
    engine.step({})
    assert not engine.index.has_work
    assert all(rank.joined for rank in engine.index.pool.ranks)
    engine.close()


def test_it_does_not_go_on_for_ever_when_they_cannot(url, caplog):
    engine = WorkersEngine(url, "alone", joined=False)
    engine.index._tickets = dict.fromkeys(engine.index._tickets, "no ticket")
    engine.step({})
    assert not engine.index.has_work
    assert "cannot be reached by other engines" in caplog.text
    engine.close()


def test_it_goes_on_until_all_is_saved_and_then_peers_find_it(two_to_one):
    prefill, decode = two_to_one
    prefill.run(Request("a", prompt(20)))
    assert prefill.index.has_work
    prefill.advance()
    peer = decode.pool._pool
    peer.fetch_with_insert("prefill-0", prompt(20), medium=kvpool.DRAM).wait(20)
    assert decode.decode(Request("b", prompt(20))) == 16


def test_what_follows_a_send_that_nobody_asks_about_is_asked_about(two_to_one):
    """A load has failed, and the prompt is computed again: the answer must know of the send that follows."""
    sends = two_to_one[0].index._saved_sends
    plan = SendPlan("a", "", np.arange(8, dtype=np.int32), np.arange(2), "nobody", "id", True)
    sends.plan(plan, 5)
    sends.forget("id")
    sends.plan(plan, 6)
    sends.begin(6)
    assert not sends.failed("id")
    sends.begin(7)
    assert sends.failed("id")
    sends.forget("id")
