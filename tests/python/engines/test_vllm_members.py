"""Engines for vLLM that send each other prompts: real pools in a real cluster, no vLLM."""

from __future__ import annotations

import time

import pytest
from attach_kit import eventually
from engines.vllm_kit import Engine, Request, prompt
from engines.vllm_members_kit import TO, connect, engines

import kvpool


def test_a_prompt_that_was_computed_elsewhere_is_loaded(pair):
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    assert told["kvpool"] == {"from": "prefill-0", "id": told["kvpool"]["id"], "tokens": 12}
    assert decode.decode(Request("b", prompt(14), kv_transfer_params=told)) == 12
    prefill.quiet()
    assert prefill.figures()["sent_tokens"] == 12
    figures = decode.figures()
    assert (figures["prompt_waits"], figures["loaded_tokens"]) == (1, 12)
    assert "expired_waits" not in figures


@pytest.mark.parametrize(("length", "tokens", "loaded"), [(3, None, 0), (4, 4, 0), (5, 4, 4), (8, 8, 4), (9, 8, 8)])
def test_a_prompt_is_sent_in_whole_blocks(pair, length, tokens, loaded):
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(length), kv_transfer_params=TO))
    assert (told and told["kvpool"]["tokens"]) == tokens
    assert decode.decode(Request("b", prompt(length), kv_transfer_params=told)) == loaded


def test_what_the_receiver_has_is_not_sent_again(pair):
    prefill, decode = pair
    connect(prefill)
    for number, (tokens, sent) in enumerate([(prompt(13), 12), (prompt(13), 0), (prompt(12) + [7] * 9, 8)]):
        told = prefill.prefill(Request(str(number), tokens, kv_transfer_params=TO))
        prefill.quiet()
        assert prefill.figures().get("sent_tokens", 0) == sent
        assert decode.decode(Request("b", tokens, kv_transfer_params=told)) == (len(tokens) - 1) // 4 * 4


@pytest.mark.parametrize("chunk", [3, 4, 6])
def test_each_chunk_is_sent_when_it_is_computed(pair, chunk):
    prefill, decode = pair
    connect(prefill)
    request = prefill.start(Request("a", prompt(18), kv_transfer_params=TO))
    assert prefill.admit(request)
    while request.num_computed_tokens < 18:
        prefill.step({"a": min(chunk, 18 - request.num_computed_tokens)})
        prefill.quiet()
        there = decode.pool.explain_match(prompt(18)).matched_tokens
        assert there == request.num_computed_tokens // 4 * 4
    assert prefill.figures()["sent_tokens"] == 16
    assert [send["private"] is not None for send in prefill.pool.sends] == [False] * (len(prefill.pool.sends) - 1) + [
        True
    ]
    assert {send["layerwise"] for send in prefill.pool.sends} == {prefill.by_layer}
    told = prefill.finish(request)
    assert decode.decode(Request("b", prompt(18), kv_transfer_params=told)) == 16


def test_what_comes_from_the_senders_cache_is_sent(pair):
    """Nothing of the prompt is computed but its last token."""
    prefill, decode = pair
    prefill.prefill(Request("a", prompt(17)))
    prefill.engine.await_saves_of(None)
    told = prefill.prefill(Request("b", prompt(17), kv_transfer_params=TO))
    assert prefill.external["b"] == 16
    assert decode.decode(Request("c", prompt(17), kv_transfer_params=told)) == 16


def test_salts_stay_apart(pair):
    prefill, decode = pair
    connect(prefill)
    told = prefill.prefill(Request("a", prompt(14), cache_salt="one", kv_transfer_params=TO))
    assert decode.decode(Request("b", prompt(14), cache_salt="two", kv_transfer_params=told)) == 0
    assert decode.decode(Request("c", prompt(14), cache_salt="one", kv_transfer_params=told)) == 12


def test_a_block_is_not_written_while_a_send_reads_it(pair):
    """The blocks are used again at once, and the sends read as late as they can."""
    prefill, decode = pair
    connect(prefill)
    prefill.pool.delayed = not prefill.by_layer
    told = [prefill.prefill(Request(str(seed), prompt(40, seed), kv_transfer_params=TO)) for seed in range(4)]
    prefill.engine.await_saves_of(None)
    for seed, said in enumerate(told):
        assert decode.decode(Request(str(seed), prompt(40, seed), kv_transfer_params=said)) == 36


def test_a_send_that_has_not_begun_is_given_up_for_a_write(pair):
    """Its member does not answer. The step does not wait for it, and nothing wrong is sent when it answers."""
    prefill, decode = pair
    prefill.pool.close_gate()
    told = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
    assert prefill.engine.saving
    prefill.prefill(Request("b", prompt(50, seed=1)))
    prefill.pool.open_gate()
    prefill.engine.close()
    assert prefill.pool.sends == []
    assert decode.decode(Request("c", prompt(40), kv_transfer_params=told)) == 0


def test_prompts_wait_for_the_connection_and_go_then(pair):
    prefill, decode = pair
    prefill.pool.close_gate()
    told = prefill.prefill(Request("a", prompt(20), kv_transfer_params=TO), chunk=8)
    assert prefill.pool.sends == []
    prefill.pool.open_gate()
    assert decode.decode(Request("c", prompt(20), kv_transfer_params=told)) == 16
    assert [send["tokens"] for send in prefill.pool.sends] == [20]  # what was to be sent in chunks goes together


def test_a_step_knows_what_the_one_before_it_will_send(pair):
    """With asynchronous scheduling a step is planned before the last one has begun."""
    prefill, _ = pair
    prefill.prefill(Request("a", prompt(17)))
    prefill.engine.await_saves_of(None)
    sending = prefill.start(Request("b", prompt(17), kv_transfer_params=TO))
    assert prefill.admit(sending)
    sending.num_computed_tokens = 16
    step = prefill.planner.plan({"b": 1}, lambda _: [sending.blocks])
    assert (len(step.sends), step.saves) == (1, [])
    other = prefill.start(Request("c", prompt(10, seed=1)))
    assert prefill.admit(other)
    assert prefill.planner.plan({"c": 10}, lambda _: [other.blocks]).written == set(other.blocks)


def test_what_is_on_its_way_is_not_sent_with_every_chunk(url):
    """Only with the last one, which must say that the prompt is complete."""
    with engines(url, "prefill-0", "decode-0") as (prefill, decode):
        connect(prefill)
        prefill.pool.delayed = True
        request = prefill.start(Request("a", prompt(22), kv_transfer_params=TO))
        assert prefill.admit(request)
        prefill.step({"a": 8})
        prefill.step({"a": 4})
        prefill.by_layer = True
        prefill.step({"a": 4})
        prefill.by_layer = False
        assert [send["tokens"] for send in prefill.pool.sends] == [8]
        prefill.step({"a": 6})
        assert [send["tokens"] for send in prefill.pool.sends] == [8, 20]
        told = prefill.finish(request)
        prefill.engine.await_saves_of(None)
        assert decode.decode(Request("b", prompt(22), kv_transfer_params=told)) == 20


# ---- failures of sends


def test_nothing_is_announced_that_could_not_be_sent(pair):
    prefill, _ = pair
    connect(prefill)
    prefill.pool.errors = [kvpool.PeerLost("the test says so")]
    assert prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO)) is None
    assert prefill.figures()["failed_sends"] == 1
    assert not prefill.engine._sends.busy
    assert prefill.prefill(Request("b", prompt(14), kv_transfer_params=TO)) is not None


@pytest.mark.parametrize("to", ["nobody", "prefill-0"])
def test_a_member_that_is_not_there_costs_nothing(pair, to):
    prefill, _ = pair
    assert prefill.prefill(Request("a", prompt(14), kv_transfer_params={"kvpool": {"to": to}})) is None
    assert prefill.figures()["failed_sends"] == 1


def test_nothing_is_announced_to_a_member_that_could_not_be_reached(pair):
    """Until it can be: each prompt tries again."""
    prefill, decode = pair
    prefill.pool.unreachable = True
    prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    eventually(lambda: not prefill.engine.sending)
    prefill.pool.close_gate()
    assert prefill.prefill(Request("b", prompt(14), kv_transfer_params=TO)) is None
    prefill.pool.unreachable = False
    prefill.pool.open_gate()
    eventually(lambda: not prefill.engine.sending)
    told = prefill.prefill(Request("c", prompt(14), kv_transfer_params=TO))
    assert decode.decode(Request("d", prompt(14), kv_transfer_params=told)) == 12
    assert prefill.figures()["failed_sends"] == 1
    prefill.pool.peers.disconnect("decode-0")
    prefill.pool.close_gate()
    assert prefill.prefill(Request("e", prompt(14), kv_transfer_params=TO)) is not None


def test_prefill_goes_on_when_the_receiver_is_gone(pair):
    prefill, decode = pair
    connect(prefill)
    decode.engine.close()
    for number in range(3):
        prefill.prefill(Request(str(number), prompt(40, number), kv_transfer_params=TO))
    eventually(lambda: not prefill.engine.saving)
    assert prefill.figures()["failed_sends"] == 3


def test_a_receiver_without_room_computes_at_once(url):
    with engines(url, "prefill-0", "decode-0", dram_blocks=9) as (prefill, decode):
        prefill.pool.close_gate()  # it fails after the answer
        told = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
        request = decode.start(Request("b", prompt(40), kv_transfer_params=told))
        assert decode.planner.match(request, 0) == (None, False)
        prefill.pool.open_gate()
        eventually(lambda: not prefill.engine.sending)
        assert prefill.figures()["failed_sends"] == 1
        eventually(lambda: decode.planner.match(request, 0) == (0, False))
        assert decode.figures()["expired_waits"] == 1
        eventually(lambda: decode.pool.stats().dram.active == 0)  # what carried the word is free


def test_a_receiver_that_is_full_computes_at_the_deadline(url):
    """Not even a word of the failure has room."""
    with engines(url, "prefill-0", "decode-0", dram_blocks=4) as (prefill, decode):
        held = decode.pool.alloc(4, medium=kvpool.DRAM)
        prefill.pool.close_gate()
        told = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
        prefill.pool.open_gate()
        eventually(lambda: not prefill.engine.sending)
        request = decode.start(Request("b", prompt(40), kv_transfer_params=told))
        assert decode.planner.match(request, 0) == (None, False)
        decode.clock.now += 30
        assert decode.planner.match(request, 0) == (0, False)
        decode.pool.free(held)


def test_what_was_computed_from_a_failed_load_is_not_sent(pair):
    prefill, decode = pair
    connect(prefill)
    request = prefill.start(Request("a", prompt(20), kv_transfer_params=TO))
    assert prefill.admit(request)
    prefill.engine.suspects.update(request.blocks[:2])
    prefill.planner._loading["a"] = request.blocks[:2]
    step = prefill.planner.plan({"a": 20}, lambda _: [request.blocks])
    prefill.engine.suspects.update(request.blocks[:2])  # as a load does that fails in this step
    prefill._execute(step, {"a": 20})
    prefill.planner.failed(set(request.blocks[:2]))
    eventually(lambda: not prefill.engine.saving)
    assert decode.pool.explain_match(prompt(20)).matched_tokens == 0
    prefill.step({"a": 20})
    told = prefill.finish(request)
    assert decode.decode(Request("b", prompt(20), kv_transfer_params=told)) == 16


def test_a_step_whose_model_fails_leaves_nothing_open(url):
    with engines(url, "prefill-0", "decode-0", by_layer=True) as (prefill, decode):
        connect(prefill)
        request = prefill.start(Request("a", prompt(20), kv_transfer_params=TO))
        assert prefill.admit(request)
        step = prefill.planner.plan({"a": 20}, lambda _: [request.blocks])
        prefill.engine.begin_step()
        prefill.engine.layer_computed(0, step.sends)
        (send,) = prefill.engine._sends._sends
        prefill.engine.begin_step()
        assert isinstance(send.transfer.exception(10), kvpool.Cancelled)
        assert decode.pool.explain_match(prompt(20)).matched_tokens == 0


def test_an_engine_alone_ignores_what_is_said_of_others(caplog):
    engine = Engine()
    for params in (TO, {"kvpool": {"from": "prefill-0", "id": "1", "tokens": 12}}):
        request = Request("a", prompt(14), kv_transfer_params=params)
        engine.run(request)
        assert engine.planner.answer("a") is None
        assert "in no cluster" in caplog.text
        caplog.clear()
    engine.pool.finish_all()
    engine.close()


def test_a_step_may_take_longer_than_a_send(url):
    with engines(url, "prefill-0", "decode-0", by_layer=True, timeout_s=0.05) as (prefill, decode):
        connect(prefill)
        request = prefill.start(Request("a", prompt(14), kv_transfer_params=TO))
        assert prefill.admit(request)
        step = prefill.planner.plan({"a": 14}, lambda _: [request.blocks])
        prefill.engine.begin_step()
        for layer in range(2):
            prefill._compute_layer(request, 14, layer)
            prefill.engine.layer_computed(layer, step.sends)
            time.sleep(0.1)  # the model computes
        prefill.engine.send(step.sends[0])
        prefill.quiet()
        assert decode.pool.explain_match(prompt(14)).matched_tokens == 12


def test_a_layer_that_cannot_be_sent_ends_the_send(url):
    """The receiver is lost between two layers."""
    with engines(url, "prefill-0", "decode-0", by_layer=True) as (prefill, decode):
        connect(prefill)
        request = prefill.start(Request("a", prompt(20), kv_transfer_params=TO))
        assert prefill.admit(request)
        step = prefill.planner.plan({"a": 20}, lambda _: [request.blocks])
        prefill.engine.begin_step()
        prefill.engine.layer_computed(0, step.sends)
        decode.engine.close()
        eventually(lambda: prefill.engine._sends._sends[0].over)
        prefill.engine.layer_computed(1, step.sends)
        for send in step.sends:
            prefill.engine.send(send)
        assert not prefill.engine._sends.busy
        assert prefill.figures()["failed_sends"] == 1
        assert prefill.finish(request) is None


def test_a_reset_stops_what_was_computed_before(pair):
    prefill, _ = pair
    request = prefill.start(Request("a", prompt(20), kv_transfer_params=TO))
    assert prefill.admit(request)
    prefill.step({"a": 8})
    prefill.engine.await_saves_of(None)
    before = len(prefill.pool.sends)
    assert prefill.planner.reset()
    prefill.step({"a": 12})
    assert prefill.finish(request) is None
    assert len(prefill.pool.sends) == before
