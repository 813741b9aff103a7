"""Instances that die, hang, are sick and come back. Those that are killed are processes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
from router.router_kit import (
    PATIENCE_S,
    QUICK,
    asking_alone,
    events,
    eventually,
    fakes,
    httpx,
    logged,
    processes,
    routing,
    unheard,
)

from kvpool.control.router import HealthSettings, InstanceSpec
from kvpool.control.router.upstream import Prober

pytestmark = pytest.mark.timeout(600)  # it starts processes and waits for them


def test_an_instance_that_dies_before_the_first_byte_costs_the_client_nothing():
    with processes("p") as killed, fakes("a") as one, routing(*killed, *one) as running:
        with asking_alone(running, "p", "a", first_s={"p": 600}) as asked:
            killed[0].process.kill()
            response = asked.result(PATIENCE_S)
        assert response.status_code == 200
        assert response.headers["x-kvpool-instance"] == "a"
        assert running.metric("retries_total", engine="p") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_instance_that_dies_after_its_headers_costs_the_client_nothing(stream):
    with fakes("a", "b") as two, routing(*two, retries=0) as running:
        assert running.complete("x", die=0, stream=stream).status_code == 502
    with fakes("a", "b") as two, routing(*two) as running:
        response = running.complete("x", die=0, stream=stream)  # both do
        assert response.status_code == 502
        assert response.json()["error"]["type"] == "upstream_error"
        assert [len(each.seen) for each in two] == [1, 1]
        assert running.complete("x", stream=stream).status_code == 200


def test_an_instance_that_is_killed_in_a_stream_ends_it_with_an_error_event():
    with processes("p") as killed, routing(*killed) as running:
        fields = {"prompt": "x", "stream": True, "pieces": 100_000, "every_s": 0.02}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            pieces = response.iter_text()
            text = next(pieces)
            killed[0].process.kill()
            text += "".join(pieces)  # a whole answer, for HTTP
        got = events(text)
        assert "error" not in got[0]
        assert got[-1]["error"]["code"] == "upstream_failed"
        assert got[-1]["error"]["message"]
        assert all("error" not in event for event in got[:-1])
        eventually(lambda: running.metric("streams_broken_total", engine="p") == 1)


def test_half_an_event_is_not_passed_on():
    with fakes("a") as one, routing(*one) as running:
        got = events(running.complete("x", stream=True, pieces=5, die=2).text)
        assert [event["choices"][0]["text"] for event in got[:-1]] == ["w0 ", "w1 "]
        assert got[-1]["error"]["type"] == "upstream_error"


def test_a_stream_that_breaks_after_its_end_is_whole():
    with fakes("a") as one, routing(*one) as running:
        got = events(running.complete("x", stream=True, pieces=2, die="done").text)
        assert len(got) == 3
        assert got[-1] == "[DONE]"
        assert running.metric("streams_broken_total", engine="a") == 0


def test_a_body_that_breaks_off_is_not_taken_for_a_whole_one():
    with fakes("a") as one, routing(*one) as running, pytest.raises(httpx.RemoteProtocolError):
        running.complete("x", die=1)


def test_an_instance_that_answers_503_is_asked_again_only_when_no_other_is_left():
    with fakes("a", "b") as two, routing(*two) as running:
        first = running.where("same prompt " * 20)
        full = next(each for each in two if each.name == first)
        full.status = 503
        assert running.where("same prompt " * 20) != first
        for each in two:
            each.status = 503
        response = running.complete("x")
        assert response.status_code == 503
        assert response.json() == {"error": {"message": "by the fake"}}


def test_the_remaining_instance_is_asked_although_another_failed_meanwhile():
    """Two tries and two instances that are up: but one of the tried ones is no longer up."""
    no_probes = HealthSettings(interval_s=0, errors=1, backoff_s=600.0, backoff_max_s=600.0)
    with unheard() as port, fakes("b", "c") as two:
        gone = InstanceSpec("gone", f"http://127.0.0.1:{port}")
        with routing(gone, *two, health=no_probes, policy="least-load", warmup_s=0.0) as running:
            for each in two:
                each.status = 503
            running.complete("x")
            assert [len(each.seen) for each in two] == [1, 1]


def test_an_answer_of_500_is_passed_to_the_client():
    with fakes("a", "b") as two, routing(*two) as running:
        for each in two:
            each.status = 500
        assert running.complete("x").status_code == 500
        assert sum(len(each.seen) for each in two) == 1


def test_retries_are_bounded():
    with fakes("a", "b", "c", "d") as four, routing(*four, retries=1) as running:
        response = running.complete("x", die=0)
        assert response.status_code == 502
        assert sum(len(each.seen) for each in four) == 2


def test_requests_that_may_not_be_sent_twice_are_not():
    with fakes("a", "b") as two, routing(*two) as running:
        response = running.client.post("/v1/embeddings", json={"input": "x", "die": 0})
        assert response.status_code == 502
        assert sum(len(each.seen) for each in two) == 1


def test_a_sick_instance_gets_no_requests_and_comes_back():
    with fakes("a", "b") as two, routing(*two, warmup_s=0.0) as running:
        two[0].well = False
        eventually(lambda: running.state("a") == "out")
        assert {running.where(f"{number} " * 30) for number in range(10)} == {"b"}
        assert running.metric("ejections_total", engine="a") == 1
        assert running.metric("instance_up", engine="a") == 0
        two[0].well = True
        eventually(lambda: running.state("a") == "healthy")
        eventually(lambda: running.where(f"{os.urandom(8).hex()} " * 30) == "a")


def test_a_probe_that_fails_in_an_unforeseen_way_is_a_failed_probe_and_not_the_last_one(monkeypatch):
    with fakes("a") as one, routing(*one) as running:

        async def fails(self: Prober, path: str) -> str | None:
            raise RuntimeError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(Prober, "probe", fails)
            eventually(lambda: running.state("a") == "out")
        eventually(lambda: running.state("a") == "healthy")
        assert running.complete("x").status_code == 200


def test_the_reason_why_an_instance_was_never_well_is_logged_once_each():
    def causes() -> list[str]:
        return [each.fields["cause"] for each in records if each.getMessage() == "instance not up"]

    with logged() as records, unheard() as port:
        spec = InstanceSpec("late", f"http://127.0.0.1:{port}")
        with routing(spec, up=0, health=replace(QUICK, path="/nowhere")) as running:
            eventually(causes)
            (first,) = [each.fields for each in records if each.getMessage() == "instance not up"]
            assert first == {"instance": "late", "url": spec.url, "path": "/nowhere", "cause": "Connection refused"}
            with fakes("late", port=port):  # where nothing listened for some probes
                eventually(lambda: causes()[-1] == "it answered with status 404")
            assert running.state("late") == "starting"
        assert all(one != next_one for one, next_one in pairwise(causes()))


def test_requests_alone_eject_an_unreachable_instance_and_bring_it_back():
    """Without probes: errors exclude, time leads to a trial, an answer ends it."""
    no_probes = HealthSettings(interval_s=0, errors=1, backoff_s=0.1, backoff_max_s=0.2)
    with (
        unheard() as port,
        fakes("a") as one,
        routing(
            InstanceSpec("gone", f"http://127.0.0.1:{port}"), *one, health=no_probes, policy="least-load"
        ) as running,
    ):
        for _ in range(4):
            assert running.complete("x").status_code == 200
        assert running.metric("ejections_total", engine="gone") >= 1
        with fakes("gone", port=port):
            eventually(lambda: running.complete("x").status_code == 200 and running.state("gone") == "healthy")
        assert running.state("a") == "healthy"


def test_a_restarted_instance_is_used_again_at_the_same_address():
    with processes("p") as first, fakes("a") as one, routing(*first, *one, warmup_s=0.0) as running:
        first[0].process.kill()
        first[0].process.wait(PATIENCE_S)
        with unheard(int(first[0].spec.url.rpartition(":")[2])) as port:
            eventually(lambda: running.state("p") == "out")
            assert running.where("x" * 100) == "a"
            with fakes("again", port=port):
                eventually(lambda: running.state("p") == "healthy")
                eventually(lambda: running.where(f"{os.urandom(8).hex()} " * 30) == "p")


def test_requests_that_wait_for_a_hanging_instance_are_sent_elsewhere_when_it_is_ejected():
    """A stopped process keeps its connections: nothing breaks, nothing comes. Its probes tell."""
    quick = HealthSettings(interval_s=0.1, timeout_s=5.0, fails=3, passes=1, backoff_s=0.1)
    with processes("p") as stopped, fakes("a") as one, routing(*stopped, *one, health=quick) as running:
        process = stopped[0].process
        with asking_alone(running, "p", "a", first_s={"p": 600}) as asked:
            process.send_signal(signal.SIGSTOP)
            try:
                response = asked.result(PATIENCE_S)
                assert response.status_code == 200
                assert response.headers["x-kvpool-instance"] == "a"
                eventually(lambda: running.state("p") == "out")
            finally:
                process.send_signal(signal.SIGCONT)
        eventually(lambda: running.state("p") == "healthy")


def test_half_of_a_hundred_streams_lose_their_instance():
    with processes("p") as killed, fakes("a") as one, routing(*killed, *one, warmup_s=0.0, health=QUICK) as running:

        async def stream(client: httpx.AsyncClient, number: int, begun: asyncio.Semaphore) -> tuple[str, list]:
            pieces = {"a": 20, "p": 100_000}  # the streams of the killed one do not end before
            fields = {"prompt": f"{number} " * 40, "stream": True, "pieces": pieces, "every_s": 0.2}
            text = ""
            async with client.stream("POST", "/v1/completions", json=fields) as response:
                name = response.headers["x-kvpool-instance"]
                async for piece in response.aiter_text():
                    if name == "p" and not text:
                        begun.release()
                    text += piece
                return name, events(text)

        async def all_of_them() -> list[tuple[str, list]]:
            begun = asyncio.Semaphore(0)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=running.url, timeout=PATIENCE_S, limits=limits, trust_env=False
            ) as client:
                tasks = [asyncio.create_task(stream(client, number, begun)) for number in range(100)]
                for _ in range(10):
                    await begun.acquire()
                killed[0].process.kill()
                return await asyncio.gather(*tasks)

        answers = asyncio.run(all_of_them())
        for name, got in answers:  # each ends once, and says how
            assert "error" in got[-1] if name == "p" else got[-1] == "[DONE]"
            assert all("error" not in event for event in got[:-1])
        assert {name for name, _ in answers} == {"a", "p"}
        assert running.state("a") == "healthy"
