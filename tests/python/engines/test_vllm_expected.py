"""Requests that wait for prompts of other engines, and prompts that wait for their requests."""

from __future__ import annotations

from attach_kit import eventually
from engines.vllm_kit import Request, prompt
from engines.vllm_members_kit import TO, MemberEngine, connect

import kvpool


def expect(decode: MemberEngine, tokens: list[int], peer: str = "prefill-0", number: str = "1", size: int = 12):
    said = {"kvpool": {"from": peer, "id": number, "tokens": size}}
    return decode.start(Request("b", tokens, kv_transfer_params=said))


def test_a_request_waits_until_the_deadline_and_computes(pair):
    _, decode = pair
    request = expect(decode, prompt(14))
    for _ in range(3):
        assert decode.planner.match(request, 0) == (None, False)
        decode.step({})
    other = Request("c", prompt(30, seed=1))
    assert decode.prefill(other) is None  # others go on meanwhile
    decode.clock.now += 19.9
    assert decode.planner.match(request, 0) == (None, False)
    decode.clock.now += 0.2
    assert decode.planner.match(request, 0) == (0, False)
    assert decode.admit(request)
    decode.step({"b": 14})
    decode.check(request)
    assert decode.figures()["expired_waits"] == 1


def test_nobody_waits_for_an_engine_that_is_gone(pair):
    prefill, decode = pair
    request = expect(decode, prompt(14))
    assert decode.planner.match(request, 0) == (None, False)
    prefill.close()
    eventually(lambda: not decode.engine.is_member("prefill-0"))
    assert decode.planner.match(request, 0) == (0, False)
    assert decode.planner.match(expect(decode, prompt(14), peer="nobody"), 0) == (0, False)


def test_a_request_does_not_wait_for_what_is_cached(pair):
    _, decode = pair
    decode.prefill(Request("a", prompt(14)))
    decode.engine.await_saves_of(None)
    assert decode.decode(Request("x", prompt(14))) == 12
    request = expect(decode, prompt(14))
    assert decode.planner.match(request, 0)[0] == 12
    decode.finish(request)
    request = expect(decode, prompt(12), size=12)  # whose last block it cannot load
    assert decode.planner.match(request, 0)[0] == 8


def test_a_beginning_is_no_reason_to_go(pair):
    """Half of the prompt is cached: the request waits for the rest, and loads it."""
    prefill, decode = pair
    decode.prefill(Request("a", prompt(9)))
    decode.engine.await_saves_of(None)
    request = expect(decode, prompt(18), size=16)
    assert decode.planner.match(request, 0) == (None, False)
    decode.finish(request)
    told = prefill.prefill(Request("b", prompt(18), kv_transfer_params=TO))
    assert decode.decode(Request("c", prompt(18), kv_transfer_params=told)) == 16
    prefill.quiet()
    assert prefill.figures()["sent_tokens"] == 8


def test_what_arrives_during_the_look_up_is_loaded(pair):
    prefill, decode = pair
    connect(prefill)
    request = prefill.start(Request("a", prompt(14), kv_transfer_params=TO))
    assert prefill.admit(request)
    prefill.step({})
    told = {"kvpool": {"from": "prefill-0", "id": prefill.planner._outgoing._prompts["a"].id, "tokens": 12}}
    waiting = decode.start(Request("b", prompt(14), kv_transfer_params=told))
    look_up = decode.engine.pin

    def pin(*arguments):
        found = look_up(*arguments)
        prefill.step({"a": 14})
        eventually(lambda: decode.engine.arrived(told["kvpool"]["id"]))
        decode.engine.pin = look_up
        return found

    decode.engine.pin = pin
    assert decode.planner.match(waiting, 0) == (None, False)
    assert decode.planner.match(waiting, 0)[0] == 12


def test_what_has_arrived_stays_until_its_request_comes(pair):
    """Others need the room meanwhile."""
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
    eventually(lambda: decode.engine.arrived(told["kvpool"]["id"]))
    assert decode.pool.evict(64, kvpool.DRAM) == 0
    assert decode.decode(Request("b", prompt(40), kv_transfer_params=told)) == 36
    decode.engine.await_saves_of(None)
    assert decode.pool.evict(64, kvpool.DRAM) == 10


def test_what_arrives_for_nobody_goes_after_a_time(pair):
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(40), kv_transfer_params=TO))
    eventually(lambda: decode.engine.arrived(told["kvpool"]["id"]))
    decode.clock.now += 41
    assert not decode.engine.arrived(told["kvpool"]["id"])
    assert decode.pool.evict(64, kvpool.DRAM) == 10


def test_what_arrives_for_nobody_holds_at_most_half_of_the_cache(pair):
    prefill, decode = pair
    for seed in range(9):  # more than there is room for
        told = prefill.prefill(Request("a", prompt(40, seed), kv_transfer_params=TO))
        eventually(lambda told=told: decode.engine.arrived(told["kvpool"]["id"]))
    decode.pool.evict(64, kvpool.DRAM)
    assert decode.pool.stats().dram.historical == 30


def test_what_has_arrived_and_was_dropped_is_computed(pair):
    """A prompt under the id of another, or a reset: nobody waits in vain."""
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    eventually(lambda: decode.engine.arrived(told["kvpool"]["id"]))
    assert decode.decode(Request("b", prompt(14, seed=5), kv_transfer_params=told)) == 0
    assert decode.planner.reset()
    assert decode.pool.stats().dram.historical == 0


def test_a_load_of_what_arrived_may_fail(pair):
    prefill, decode = pair
    told = prefill.prefill(Request("a", prompt(14), kv_transfer_params=TO))
    request = decode.start(Request("b", prompt(14), kv_transfer_params=told))
    eventually(lambda: decode.planner.match(request, 0)[0] == 12)
    assert decode.admit(request)
    decode.planner.failed(set(request.blocks[:3]))
    assert decode.planner.match(request, 0) == (0, False)
