"""Prefill and decode apart: a request becomes two, and whatever fails is tried elsewhere or told to the client."""

from __future__ import annotations

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from router.router_kit import asked_of, connected, events, eventually, fakes, head_of, logged, routing, unheard

from kvpool.control.reading.halves import divisible, for_decode, for_prefill, params_of, without_params
from kvpool.control.router import InstanceSpec, RouterSettings
from kvpool.control.router.body import HeldBody
from kvpool.errors import ArgumentError

LETTER = {"kvpool": {"from": "p1", "tokens": 32}}


def test_the_prompt_goes_to_prefill_and_its_letter_to_decode():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        prefill.params = LETTER
        response = running.complete("hello", max_tokens=7, min_tokens=3, n=2, temperature=0.0, seed=1)
        assert response.status_code == 200
        assert response.json()["instance"] == "d1"
        assert response.headers["x-kvpool-instance"] == "d1"
        assert response.headers["x-kvpool-prefill"] == "p1"
        assert asked_of(prefill) == [
            {
                "prompt": "hello",
                "temperature": 0.0,
                "seed": 1,
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {"kvpool": {"to": "d1"}},
            }
        ]
        assert asked_of(decode) == [
            {
                "prompt": "hello",
                "max_tokens": 7,
                "min_tokens": 3,
                "n": 2,
                "temperature": 0.0,
                "seed": 1,
                "kv_transfer_params": LETTER,
            }
        ]
        assert {name: each["role"] for name, each in running.states().items()} == {"p1": "prefill", "d1": "decode"}


def test_a_chat_is_streamed_by_decode_alone():
    fields = {
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 9,
        "kv_transfer_params": {"kvpool": {"to": "a client's idea"}},
    }
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        response = running.client.post("/v1/chat/completions", json=fields)
        assert [event["instance"] for event in events(response.text)[:-1]] == ["d1"] * 3
        (first,), (second,) = asked_of(prefill), asked_of(decode)
    assert first["max_completion_tokens"] == 1
    assert first["stream"] is False
    assert "stream_options" not in first
    assert first["kv_transfer_params"] == {"kvpool": {"to": "d1"}}
    # Prefill had no letter: decode computes the prompt, and is not told what the client has made up.
    assert second == {name: value for name, value in fields.items() if name != "kv_transfer_params"}


def test_prefill_is_free_while_decode_still_streams():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        with running.client.stream(
            "POST", "/v1/completions", json={"prompt": "hello", "stream": True, "hold_at": 1}
        ) as response:
            pieces = response.iter_text()
            next(pieces)
            states = running.states()
            assert (states["p1"]["in_flight"], states["d1"]["in_flight"]) == (0, 1)
            decode.released.set()
            "".join(pieces)


@pytest.mark.parametrize("status", [400, 404, 422, 500])
def test_prefills_refusal_is_the_clients_answer(status):
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        prefill.status = status
        response = running.complete("hello")
        assert response.status_code == status
        assert response.headers["x-kvpool-instance"] == "p1"
        assert asked_of(decode) == []


@pytest.mark.parametrize("wrong", [{"die": {"p1": 0}}, {"die": {"p1": 1}}, {}])
def test_a_prefill_that_fails_is_replaced(wrong):
    with fakes("p1", "p2", "d1") as (one, other, decode), routing(one, other, decode) as running:
        one.params, other.params = {"kvpool": {"from": "p1"}}, {"kvpool": {"from": "p2"}}
        one.status = 0 if wrong else 503
        running.admin.post("/instances/p2/drain")
        failed = running.complete("hello", **wrong)
        assert failed.status_code in (502, 503), "there was no other"
        running.admin.post("/instances/p2/resume")
        for number in range(4):
            response = running.complete(f"hello {number}", **wrong)
            assert response.status_code == 200
            assert response.headers["x-kvpool-prefill"] == "p2"
        assert [each["kv_transfer_params"] for each in asked_of(decode)] == [other.params] * 4


def test_a_decode_that_fails_is_replaced_and_the_prompt_sent_there():
    with fakes("p1", "d1", "d2") as (prefill, one, other), routing(prefill, one, other) as running:
        one.status = 503
        for number in range(4):
            response = running.complete(f"hello {number}")
            assert response.status_code == 200
            assert response.headers["x-kvpool-instance"] == "d2"
        sent_to = [each["kv_transfer_params"]["kvpool"]["to"] for each in asked_of(prefill)]
        assert sent_to.count("d2") == 4
        assert len(sent_to) == 4 + len(asked_of(one))


def test_without_decode_there_is_nobody():
    with unheard() as port, fakes("p1") as (prefill,):
        dead = InstanceSpec("d1", f"http://127.0.0.1:{port}", "decode")
        with routing(prefill, dead, up=1) as running:
            response = running.complete("hello")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "no_instance"
            assert asked_of(prefill) == []


def test_what_cannot_be_divided_is_answered_by_one():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode, parse_bytes_max=1 << 16) as running:
        for prompt in (["one", "two"], [[1, 2], [3]], "long " * 20_000):
            assert running.complete(prompt).headers["x-kvpool-instance"] == "p1"
        assert running.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
        assert running.complete([5, 6, 7]).headers["x-kvpool-instance"] == "d1"
        assert len(asked_of(prefill)) == 5
        assert len(asked_of(decode)) == 1


def test_a_stream_that_breaks_at_decode_ends_with_an_error():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running, logged() as records:
        response = running.complete("hello", stream=True, die={"d1": 2})
        assert "error" in events(response.text)[-1]
        noted = eventually(lambda: [each for each in records if each.msg == "request"])
        assert tuple(noted[0].fields[name] for name in ("instance", "prefill", "outcome")) == ("d1", "p1", "broken")


def test_the_same_prompt_goes_where_it_is_cached_at_both():
    names = ("p1", "p2", "d1", "d2")
    with fakes(*names) as all_four, routing(*all_four) as running:
        document = "A long document, of which many ask something. " * 40
        seen = set()
        for question in ("Who?", "What?", "Why?"):
            headers = running.complete(document + question).headers
            seen.add((headers["x-kvpool-prefill"], headers["x-kvpool-instance"]))
        assert len(seen) == 1


def test_a_client_that_leaves_ends_prefill():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        body = json.dumps({"prompt": "x", "first_s": {"p1": 600}}).encode()
        with connected(running) as sock:
            sock.sendall(head_of(len(body)) + body)
            eventually(lambda: prefill.under_way == 1)
        eventually(lambda: prefill.abandoned == 1, "prefill went on")
        assert asked_of(decode) == []


def test_while_decode_is_out_others_answer_alone():
    """The policy may prefer the idle prefill instance, which can do nothing without the other half."""
    with fakes("p1", "d1", "b") as (prefill, decode, both), routing(prefill, decode, both) as running:
        running.admin.post("/instances/d1/drain")
        for number in range(6):
            answer = running.complete(f"hello {number}")
            assert answer.status_code == 200
            assert answer.headers["x-kvpool-instance"] == "b"
            assert "x-kvpool-prefill" not in answer.headers
        assert asked_of(prefill) == []


def test_a_decode_that_falls_out_while_the_prompt_is_computed_is_not_asked():
    with fakes("p1", "d1", "d2") as (prefill, one, other), routing(prefill, one, other) as running:
        running.admin.post("/instances/d2/drain")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(running.complete, "hello", held={"p1": True}, first_s={"d1": 600})
            eventually(lambda: prefill.under_way == 1)
            running.admin.post("/instances/d2/resume")
            one.well = False
            eventually(lambda: running.state("d1") != "healthy")
            prefill.released.set()
            answer = asked.result()
        assert answer.headers["x-kvpool-instance"] == "d2"
        assert asked_of(one) == []


def test_a_prefill_that_answers_alone_after_a_try_in_halves_is_not_named():
    with fakes("p1", "d1", "b") as (prefill, decode, both), routing(prefill, decode, both) as running:
        running.admin.post("/instances/b/drain")
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(running.complete, "hello", held={"p1": True}, die={"d1": 0})
            eventually(lambda: prefill.under_way == 1)
            running.admin.post("/instances/p1/drain")
            running.admin.post("/instances/b/resume")
            prefill.released.set()
            answer = asked.result()
        assert answer.headers["x-kvpool-instance"] == "b"
        assert "x-kvpool-prefill" not in answer.headers


def test_clients_do_not_say_where_caches_go():
    mine = {"kvpool": {"to": "mine"}}
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        for body in (
            json.dumps({"prompt": ["a", "b"], "kv_transfer_params": mine}),
            '{"prompt": ["a", "b"], "kv\\u005ftransfer_params": {"kvpool": {"to": "mine"}}}',
            '{"prompt": "x", "temperature": NaN, "kv_transfer_params": {"kvpool": {"to": "mine"}}}',
        ):
            running.client.post("/v1/completions", content=body)
        running.client.post("/v1/responses", json={"input": "x", "kv_transfer_params": mine})
        assert len(asked_of(prefill)) == 4
        assert not any("kv_transfer_params" in each for each in asked_of(prefill))
    with fakes("b") as (both,), routing(both) as running:  # a router that divides nothing passes everything on
        running.complete("x", kv_transfer_params=mine)
        assert asked_of(both)[0]["kv_transfer_params"] == mine


def test_prefills_answer_is_asked_for_in_legible_form():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        running.complete("hello", headers={"accept-encoding": "gzip"})
        assert prefill.seen[0][1]["accept-encoding"] == "identity"


def test_bodies_are_not_held_while_the_answer_is_streamed():
    with fakes("p1", "d1") as (prefill, decode), routing(prefill, decode) as running:
        fields = {"prompt": "long " * 10_000, "stream": True, "hold_at": 1}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            pieces = response.iter_text()
            next(pieces)
            gc.collect()
            held = [each for each in gc.get_objects() if isinstance(each, HeldBody)]
            assert held
            assert sum(len(each.data) for each in held) == 0
            decode.released.set()
            "".join(pieces)


def test_half_a_fleet_is_refused():
    with pytest.raises(ArgumentError, match="only prefill"):
        RouterSettings((InstanceSpec("p", "http://h:1", "prefill"), InstanceSpec("b", "http://h:2")))
    with pytest.raises(ArgumentError, match="only decode"):
        RouterSettings((InstanceSpec("d", "http://h:1", "decode"),))
    with pytest.raises(ArgumentError, match="role 'cook'"):
        InstanceSpec("d", "http://h:1", "cook")


# ---- bodies


def test_large_numbers_and_odd_texts_pass_unchanged():
    body = b'{"prompt": "\\ud83d\\ude00\\u0000\\n", "seed": 123456789012345678901234567890, "logit_bias": {"5": 1e400}}'
    assert divisible(body)
    for made in (for_prefill(body, False, "d"), for_decode(body, None)):
        assert b'"\\ud83d\\ude00\\u0000\\n"' in made
        assert b"123456789012345678901234567890" in made
        assert b"1e400" in made


ODD = [
    b'{"prompt": NaN}',
    b'{"prompt": ["a", "b"]}',
    b'{"prompt": [[1], [2]]}',
    b"[]",
    b"",
    b'{"\xff": 1, "prompt": "x"}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "x"' + b"".join(b',"k%d":1' % at for at in range(9000)) + b"}",
]


@pytest.mark.parametrize("body", ODD)
def test_these_are_not_divided(body):
    assert not divisible(body)
    assert without_params(body) is None


@pytest.mark.parametrize("prompt", ['"a"', "[1, 2]", "[]", "7", '["a"]', "[[1, 2]]"])
def test_these_are_divided(prompt):
    assert divisible(f'{{"prompt": {prompt}}}'.encode())
    assert divisible(b'{"messages": []}')


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{", b"{}", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 7}']
)
def test_an_answer_without_a_letter(answer):
    assert params_of(answer) is None
    assert json.loads(for_decode(b'{"prompt": "x"}', params_of(answer))) == {"prompt": "x"}
