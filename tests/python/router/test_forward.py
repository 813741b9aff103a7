"""Requests through a router over real sockets: passed on, refused, relayed."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from router.router_kit import PATIENCE_S, Running, events, eventually, fakes, httpx, logged, routing, unheard

from kvpool.control.router import InstanceSpec
from kvpool.control.router.body import HeldBody


@pytest.fixture(scope="module")
def pair():
    """Two fakes and a router, for tests that change neither."""
    with fakes("a", "b") as two, routing(*two) as running:
        running.fakes = {each.name: each for each in two}
        yield running


def test_an_answer_is_passed_on_unchanged_and_names_its_instance(pair):
    response = pair.complete("hello", headers={"x-request-id": "mine-1", "authorization": "Bearer key"}, pieces=2)
    assert response.status_code == 200
    name = response.headers["x-kvpool-instance"]
    assert response.json() == {"object": "text_completion", "choices": [{"text": "w0 w1 "}], "instance": name}
    assert response.headers["x-request-id"] == "mine-1"
    path, headers, body = pair.fakes[name].seen[-1]
    assert path == "/v1/completions"
    assert json.loads(body) == {"prompt": "hello", "pieces": 2}
    assert headers["authorization"] == "Bearer key"
    assert headers["x-request-id"] == "mine-1"
    assert pair.fakes[name].spec.url.endswith(headers["host"])


def test_an_invalid_request_id_is_replaced(pair):
    response = pair.complete(headers={"x-request-id": "x" * 200})
    assert len(response.headers["x-request-id"]) == 32


def test_a_chat_is_streamed_event_by_event():
    fields = {"messages": [{"role": "user", "content": "hello"}], "stream": True, "pieces": 3, "hold_at": 1}
    with (
        fakes("a") as one,
        routing(*one) as running,
        running.client.stream("POST", "/v1/chat/completions", json=fields) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = response.iter_text()
        whole = next(pieces)  # the first event is here, and the second one does not exist yet
        one[0].released.set()
        whole += "".join(pieces)
    assert [event["choices"][0]["text"] for event in events(whole)[:-1]] == ["w0 ", "w1 ", "w2 "]
    assert events(whole)[-1] == "[DONE]"


def test_other_paths_are_passed_on(pair):
    assert pair.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    response = pair.client.post("/v1/embeddings", json={"input": "x"})
    assert response.status_code == 200
    assert response.headers["x-kvpool-instance"] in ("a", "b")
    missing = pair.client.get("/v1/nothing")  # the instance says so, not the router
    assert missing.status_code == 404
    assert "x-kvpool-instance" in missing.headers


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_400_and_no_instance_is_asked(pair, body):
    seen = sum(len(each.seen) for each in pair.fakes.values())
    response = pair.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_json"
    assert "x-request-id" in response.headers
    assert sum(len(each.seen) for each in pair.fakes.values()) == seen


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": None}, {"prompt": []}, {"prompt": ""}, {"prompt": [-1]}, {"prompt": [1e300]}, {"prompt": {"a": 1}}],
)
def test_a_prompt_of_unknown_form_is_left_to_the_instance(pair, fields):
    response = pair.client.post("/v1/completions", json=fields)
    assert response.status_code == 200
    assert response.headers["x-kvpool-instance"] in ("a", "b")


def test_paths_outside_the_api_are_not_found(pair):
    response = pair.client.get("/else")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
    assert pair.client.post("/instances/a/drain").status_code == 404  # the operator's port is another


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../metrics", "/v1/..", "/v1/./models", "/v1/%2e%2e/metrics", "/v1/.%2E/metrics", "/v1/..%2fmetrics",
        "/v1/x/..;a/models", "/v1/..\\metrics", "/v1/%5cmetrics", "/v1/x?" + "y" * 20_000,
    ],
)  # fmt: skip
def test_a_path_that_an_instance_may_read_as_another_is_refused(pair, path):
    """Over a bare socket: clients tidy such paths up."""
    answer = asked_barely(pair, path)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_path"


def test_a_fragment_does_not_make_the_router_fail(pair):
    answer = asked_barely(pair, "/v1/x#y")  # one of uvicorn's two parsers cuts it off: then it is the instance's 404
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))


def asked_barely(running: Running, path: str) -> bytes:
    """All that comes back for a path that is sent as it is."""
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), PATIENCE_S) as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode("latin-1"))
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_a_body_that_is_too_long_is_refused_with_and_without_its_length():
    with fakes("a") as one, routing(*one, parse_bytes_max=10_000, body_bytes_max=10_000) as running:
        assert running.complete("x" * 9_000).status_code == 200
        named = running.complete("x" * 20_000)

        def pieces():
            for _ in range(20):
                yield b"x" * 1_000

        unnamed = running.client.post("/v1/completions", content=pieces())
        for response in (named, unnamed):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert len(one[0].seen) == 1
        assert running.metric("refused_total", reason="body_too_large") == 2


SMALL = {"parse_bytes_max": 10_000, "body_bytes_max": 10_000, "held_bytes_max": 10_000}


def test_the_bytes_of_all_requests_together_are_bounded():
    with (
        fakes("a") as one,
        routing(*one, **SMALL) as running,
    ):
        fields = {"stream": True, "pieces": 2, "hold_at": 0}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(running.complete, "x" * 8_000, **fields)  # held for as long as it may be sent again
            eventually(lambda: one[0].under_way == 1)
            refused = running.complete("x" * 8_000)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert running.complete("x" * 1_000).status_code == 200
            one[0].released.set()
            assert first.result(PATIENCE_S).text.endswith("data: [DONE]\n\n")
        assert running.complete("x" * 8_000).status_code == 200


def test_a_body_is_released_once_its_answer_begins():
    with (
        fakes("a") as one,
        routing(*one, **SMALL) as running,
    ):
        fields = {"prompt": "x" * 8_000, "stream": True, "pieces": 2, "hold_at": 1}
        with running.client.stream("POST", "/v1/completions", json=fields) as first:
            held = [each for each in gc.get_objects() if type(each) is HeldBody and each.data]
            assert held == []
            assert running.complete("x" * 8_000).status_code == 200
            one[0].released.set()
            assert first.read().endswith(b"data: [DONE]\n\n")


def test_a_body_that_never_comes_is_refused():
    with fakes("a") as one, routing(*one, body_timeout_s=0.2) as running:
        sock = socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), PATIENCE_S)
        with sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_a_hundred_streams_at_once(pair):
    async def one(client: httpx.AsyncClient, number: int) -> str:
        fields = {"prompt": f"{number} " * 50, "stream": True, "pieces": 5, "every_s": 0.05}
        return (await client.post("/v1/completions", json=fields)).text

    async def all_of_them() -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=pair.url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client, number) for number in range(100)))

    answers = [events(text) for text in asyncio.run(all_of_them())]
    assert all(answer[-1] == "[DONE]" and len(answer) == 6 for answer in answers)
    assert {answer[0]["instance"] for answer in answers} == {"a", "b"}
    assert all(len({event["instance"] for event in answer[:-1]}) == 1 for answer in answers)


def test_a_client_that_leaves_a_stream_ends_it_at_the_instance():
    with fakes("a") as one, routing(*one) as running:
        fields = {"prompt": "x", "stream": True, "pieces": 100_000, "every_s": 0.02}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            next(response.iter_bytes())
        eventually(lambda: one[0].abandoned == 1, "the instance went on")
        eventually(lambda: running.metric("clients_gone_total", engine="a") == 1)


def test_a_client_that_leaves_before_the_first_byte_ends_its_request_at_the_instance():
    with fakes("a") as one, routing(*one) as running:
        body = b'{"prompt": "x", "first_s": 600}'
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), PATIENCE_S) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: one[0].under_way == 1)
        eventually(lambda: one[0].abandoned == 1, "the instance went on")
        assert running.state("a") == "healthy"  # it was not to blame


def test_if_all_instances_are_full_the_answer_is_503_with_when_to_come_back():
    with fakes("a", "b") as two, routing(*two, in_flight_max=1, cap=1000) as running:
        fields = {"prompt": "x", "stream": True, "pieces": 100_000, "every_s": 0.02}
        with (
            running.client.stream("POST", "/v1/completions", json=fields) as first,
            running.client.stream("POST", "/v1/completions", json=fields) as second,
        ):
            assert {first.headers["x-kvpool-instance"], second.headers["x-kvpool-instance"]} == {"a", "b"}
            response = running.complete("x")
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
        eventually(lambda: running.complete("x").status_code == 200, "there is room again")
        assert max(each.most_under_way for each in two) == 1


def test_a_slow_instance_is_given_up_and_not_blamed():
    with fakes("a", "b") as two, routing(*two, first_byte_timeout_s=3.0) as running:
        response = running.complete("x", first_s=600)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "upstream_timeout"
        assert sum(len(each.seen) for each in two) == 1  # the work may be going on: no other instance gets it, too
        eventually(lambda: sum(each.abandoned for each in two) == 1)
        assert {each["state"] for each in running.states().values()} == {"healthy"}


def test_a_stream_that_stalls_ends_with_an_error_event():
    with fakes("a") as one, routing(*one, stall_timeout_s=3.0) as running:
        response = running.complete("x", stream=True, pieces=2, every_s=600)
        got = events(response.text)
        assert got[0]["choices"][0]["text"] == "w0 "
        assert "in time" in got[-1]["error"]["message"]
        eventually(lambda: one[0].abandoned == 1)


def test_a_request_ends_by_its_deadline_however_its_pieces_flow():
    with fakes("a") as one, routing(*one, deadline_s=5.0) as running:
        response = running.complete("x", stream=True, pieces=100_000, every_s=0.02)
        assert "error" in events(response.text)[-1]
        eventually(lambda: one[0].abandoned == 1)


def test_the_metrics_show_the_decisions_and_how_long_they_took(pair):
    before = {name: pair.metric(name) for name in ("decision_seconds_count", "prompt_tokens_total")}
    prompt = "a prompt that is asked twice, so that some of it is cached the second time. " * 4
    pair.complete(prompt)
    cached = pair.metric("prompt_tokens_cached_total")
    pair.complete(prompt)
    assert pair.metric("decision_seconds_count") == before["decision_seconds_count"] + 2
    assert pair.metric("decision_seconds_sum") > 0
    assert pair.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 2 * -(-len(prompt) // 4)
    assert pair.metric("prompt_tokens_cached_total") > cached
    assert sum(pair.metric("requests_total", code="200", engine=name) for name in "ab") >= 2
    assert pair.metric("instance_up", engine="a") == 1


def test_the_log_has_a_line_for_each_request_and_no_prompt():
    with fakes("a") as one, routing(*one) as running, logged() as records:
        running.complete("a secret", headers={"x-request-id": "r1", "authorization": "Bearer key"})
        eventually(lambda: any(record.getMessage() == "request" for record in records))
        fields = next(record.fields for record in records if record.getMessage() == "request")
    assert fields["request_id"] == "r1"
    assert fields["status"] == 200
    assert fields["outcome"] == "done"
    assert fields["instance"] == "a"
    assert not any("secret" in str(vars(record)) or "Bearer" in str(vars(record)) for record in records)


def test_without_instances_the_answer_is_503_and_the_router_is_not_well():
    with unheard() as port, routing(InstanceSpec("gone", f"http://127.0.0.1:{port}"), up=0) as running:
        response = running.complete("x")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_instance"
        assert running.client.get("/health").status_code == 503
