"""Large bodies: passed on as a stream, bounded in memory, and without effect on other requests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from router.router_kit import PATIENCE_S, connected, eventually, fakes, head_of, httpx, processes, routing, unheard
from router.test_command import listening

from kvpool.control.router import HealthSettings, InstanceSpec, RouterSettings
from kvpool.control.router.budget import STREAM_BYTES, Budget
from kvpool.control.router.errors import Refusal
from kvpool.control.router.upstream import Prober
from kvpool.errors import ArgumentError

pytestmark = pytest.mark.timeout(600)  # some start processes and wait for them
LIMITS = {"parse_bytes_max": 100_000, "body_bytes_max": 4 << 20, "held_bytes_max": 4 << 20}
LARGE = json.dumps({"prompt": "x" * 1_000_000, "pieces": 2}).encode()
UNPROBED = HealthSettings(interval_s=0, timeout_s=30.0, errors=3, backoff_s=60.0, backoff_max_s=60.0)


def pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 50_000):
        yield body[start : start + 50_000]


# ---- streams


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_a_large_body_is_passed_on_unchanged_with_and_without_its_length(path):
    with fakes("a") as one, routing(*one, **LIMITS) as running:
        for number, content in enumerate((LARGE, pieces(LARGE)), start=1):
            response = running.client.post(path, content=content, headers={"x-session-id": "s"})
            assert response.status_code == 200
            assert one[0].seen[-1][2] == LARGE
            assert ("content-length" in one[0].seen[-1][1]) == (number == 1)
            assert running.router._budget.held == 0
            if path != "/v1/embeddings":  # nothing else there is routed by its prompt
                assert running.metric("prompts_unread_total", reason="large") == number
        assert running.complete("x" * 50_000).status_code == 200
        assert one[0].seen[-1][1]["content-length"] == str(len(one[0].seen[-1][2]))


def test_large_bodies_go_to_the_least_busy_instance():
    with fakes("a", "b") as two, routing(*two, policy="longest-prefix", **LIMITS) as running:
        body = json.dumps({"prompt": "x" * 500_000, "held": True}).encode()
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(running.client.post, "/v1/completions", content=body) for _ in range(2)]
            eventually(lambda: [fake.under_way for fake in two] == [1, 1])
            for fake in two:
                fake.released.set()
            assert [each.result(PATIENCE_S).status_code for each in asked] == [200, 200]


def test_a_stream_is_tried_elsewhere_as_long_as_nothing_of_it_was_sent():
    with unheard() as port, fakes("b") as one:
        dead = InstanceSpec("a", f"http://127.0.0.1:{port}")
        with routing(dead, *one, health=UNPROBED, policy="least-load", **LIMITS) as running:
            response = running.client.post("/v1/completions", content=LARGE)
            assert response.status_code == 200
            assert one[0].seen[-1][2] == LARGE
            assert running.metric("retries_total", engine="a") == 1


def test_a_stream_whose_instance_dies_is_not_sent_twice():
    with fakes("a", "b") as two, routing(*two, **LIMITS) as running:
        body = json.dumps({"prompt": "x" * 500_000, "die": 0}).encode()
        response = running.client.post("/v1/completions", content=body)
        assert response.status_code == 502
        assert sum(len(fake.seen) for fake in two) == 1


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing_behind():
    with fakes("a") as one, routing(*one, **LIMITS) as running:
        with connected(running) as sock:
            sock.sendall(head_of(len(LARGE)) + LARGE[:300_000])
            eventually(lambda: running.states()["a"]["in_flight"] == 1)
        eventually(lambda: running.states()["a"]["in_flight"] == 0)
        assert running.router._budget.held == 0
        assert running.state("a") == "healthy"  # it is not to blame
        assert running.complete("x").status_code == 200


def test_the_missing_rest_of_a_body_is_not_waited_for():
    with fakes("a") as one, routing(*one, body_timeout_s=0.3, **LIMITS) as running, connected(running) as sock:
        sock.sendall(head_of(len(LARGE)) + LARGE[:300_000])
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert running.state("a") == "healthy"


def test_a_stream_that_turns_out_too_long_is_cut_off():
    with fakes("a") as one, routing(*one, **LIMITS) as running:
        named = running.client.post("/v1/completions", content=b"x" * (5 << 20))
        assert named.status_code == 413
        with pytest.raises(httpx.TransportError):  # the router disconnects if it does not read a body
            unnamed = running.client.post("/v1/completions", content=pieces(b"x" * (8 << 20)))
            assert unnamed.status_code == 413
            raise httpx.TransportError("it was read in time")
        assert one[0].seen == []
        assert running.metric("refused_total", reason="body_too_large") == 2


# ---- room


def test_large_bodies_wait_for_room_and_small_ones_do_not():
    async def run() -> None:
        budget = Budget(bytes_max=100, requests_max=10)  # 75 for large ones
        with budget.share() as first, budget.share() as second, budget.share() as third, budget.share() as small:
            await first.wait_for(60, PATIENCE_S)
            order = []

            async def wait(share, name: str, size: int) -> None:
                await share.wait_for(size, PATIENCE_S)
                order.append(name)

            waiting = [asyncio.create_task(wait(second, "second", 70)), asyncio.create_task(wait(third, "third", 5))]
            await asyncio.sleep(0.05)
            assert order == []  # there is room for the third one, which came after the second
            small.take(40)
            with pytest.raises(Refusal, match="bytes"):
                small.take(1)
            first.give_back()
            await asyncio.sleep(0.05)
            assert order == []  # 40 and 70 are more than 100
            small.give_back()
            await asyncio.gather(*waiting)
            assert order == ["second", "third"]
            assert budget.held == 75
        assert budget.held == 0

    asyncio.run(run())


def test_a_request_that_waits_too_long_or_leaves_takes_no_room_and_lets_others_pass():
    async def run() -> None:
        budget = Budget(bytes_max=100, requests_max=10)
        with budget.share() as first, budget.share() as late, budget.share() as gone, budget.share() as last:
            await first.wait_for(50, PATIENCE_S)
            leaving = asyncio.create_task(gone.wait_for(60, PATIENCE_S))
            await asyncio.sleep(0)
            waits = asyncio.create_task(last.wait_for(25, PATIENCE_S))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await waits
            with pytest.raises(Refusal, match="bytes") as refusal:
                await late.wait_for(1, 0.01)
            assert refusal.value.status == 503
            assert refusal.value.retry_after_s == 1
            assert budget.held == 75
        assert budget.held == 0

    asyncio.run(run())


def test_large_bodies_without_room_are_told_when_to_come_back():
    limits = LIMITS | {"held_bytes_max": 4 * STREAM_BYTES // 3 + 4}  # room for one
    with fakes("a") as one, routing(*one, body_timeout_s=3.0, **limits) as running:
        body = json.dumps({"prompt": "x" * 500_000, "stream": True, "hold_at": 0}).encode()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(running.client.post, "/v1/completions", content=body)
            eventually(lambda: one[0].under_way == 1)
            refused = running.client.post("/v1/completions", content=LARGE)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert running.complete("x").status_code == 200  # small ones have room
            one[0].released.set()
            assert first.result(PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [
        {"parse_bytes_max": 2000, "body_bytes_max": 1000},
        {"held_bytes_max": 5 << 20},
        {"parse_bytes_max": 10_000, "held_bytes_max": STREAM_BYTES},
        {"parse_bytes_max": 10_000, "body_bytes_max": 10_000, "held_bytes_max": 9_999},
        {"readers": 0},
        {"prompt_bytes_max": 0},
        {"reader_wait_s": 0},
    ],
)
def test_contradictory_limits_are_refused(wrong):
    with pytest.raises(ArgumentError):
        RouterSettings((), **wrong)


# ---- the others


def test_probes_go_on_while_the_router_is_busy(monkeypatch):
    """Its event loop stands still for longer than a probe may take, and no instance is blamed for that."""
    health = HealthSettings(interval_s=0.05, timeout_s=2.2, fails=1, passes=1, backoff_s=30.0, backoff_max_s=30.0)
    asked, stood = [], []
    with processes("a") as one, routing(*one, health=health) as running:
        loop, probe = running.router._probing._home, Prober.probe

        def stand_still() -> None:
            time.sleep(2.5)
            stood.append(1)

        async def probed(self: Prober, path: str) -> str | None:
            if not asked:
                asked.append(1)
                loop.call_soon_threadsafe(stand_still)
            return await probe(self, path)

        with monkeypatch.context() as patch:
            patch.setattr(Prober, "probe", probed)
            eventually(lambda: stood)
        assert running.complete("x").status_code == 200
        assert running.metric("ejections_total", engine="a") == 0


STREAMED = b'{"prompt": [' + b"{}," * (5 << 20) + b"1]}"  # 15 MiB
READ = b'{"prompt": [' + b"{}," * 1_390_000 + b"1]}"  # just short enough to be read


def memory_mib(process: int) -> float:
    """Of a process and those that it started."""
    total, left = 0, [process]
    while left:
        at = Path(f"/proc/{left.pop()}")
        try:
            status = (at / "status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) if "VmRSS:" in status else 0
            for task in (at / "task").iterdir():
                left += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended
    return total / 1024


@pytest.mark.parametrize("count", [4, 60] if os.environ.get("KVPOOL_LONG") else [4])
def test_large_bodies_at_once_take_neither_memory_nor_instances(count):
    with processes("a", "b", program="deaf.py") as two:
        instances = ",".join(f"{each.spec.name}={each.spec.url}" for each in two)
        with listening("--instances", instances) as (process, first):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the router
            _flood(process, f"http://{first['public']}", count)


def _flood(process: subprocess.Popen, url: str, count: int) -> None:
    statuses, honest, most = [], [], 0.0
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client, ThreadPoolExecutor(count) as pool:
        eventually(lambda: client.get("/health").json().get("available") == 2)
        for body in (STREAMED, READ):
            asked = [
                pool.submit(httpx.post, f"{url}/v1/completions", content=body, timeout=PATIENCE_S) for _ in range(count)
            ]
            while not all(each.done() for each in asked):
                honest.append(client.post("/v1/completions", json={"prompt": "hello"}).status_code)
                most = max(most, memory_mib(process.pid))
                time.sleep(0.02)
            statuses += [each.result().status_code for each in asked]
        ejections = [line for line in client.get("/metrics").text.splitlines() if "ejections_total{" in line]
    assert set(honest) == {200}
    assert 500 not in statuses
    assert most < 300
    assert ejections == []
