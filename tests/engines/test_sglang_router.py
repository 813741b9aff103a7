"""`kvpool router` before a real HTTP server of SGLang, which runs on the CPU by the stubs of `sglang/cpu`.

One server: its start takes most of the time. What it caches, it tells by its KV events; the router believes nothing
else, because each prompt is first computed past it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from bench.engines.vllm_servers import free_port, router

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVPOOL_SGLANG_PYTHON") or ROOT / ".venv-sglang" / "bin" / "python")
PAGE = 16
SYSTEM = {"role": "system", "content": "You answer questions about a document. " * 4}


class Server:
    """SGLang's server, and where it publishes."""

    def __init__(self, folder: Path) -> None:
        port, self.events, self.replay = free_port(), free_port(), free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "log"
        command = [
            PYTHON,
            ROOT / "tests/engines/sglang/http_server.py",
            folder / "model",
            port,
            self.events,
            self.replay,
        ]
        path = os.pathsep.join(map(str, (ROOT / "tests/engines/sglang", ROOT / "src", ROOT)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, start_new_session=True, cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip

    def await_start(self) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=30, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"SGLang's server did not start: {self._log.read_text(errors='replace')[-6000:]}")

    def ask(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        response = httpx.post(f"{self.url}{path}", json=fields, timeout=120, trust_env=False)
        assert response.status_code == 200, response.text
        return response

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # with SGLang's own processes
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/sglang")):
        pytest.skip(f"SGLang is not installed in {PYTHON}: make test-engines installs it")
    server = Server(tmp_path_factory.mktemp("sglang"))
    try:
        server.await_start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    where = {"--instances": server.url, "--events": f"tcp://127.0.0.1:{server.events}",
             "--events-replay": f"tcp://127.0.0.1:{server.replay}"}  # fmt: skip
    options = [part for option, value in where.items() for part in (option, f"s={value}")]
    options += ["--block-tokens", str(PAGE), "--tokenize", "/tokenize", "--tokenize-timeout", "30"]
    with router(*options, up=1) as url, httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        eventually(lambda: events_of(client)["synced"])
        yield client


def eventually(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := holds()):
        assert time.monotonic() < end, "it never held"
        time.sleep(0.05)
    return found


def events_of(client: httpx.Client) -> dict[str, Any]:
    events: dict[str, Any] = client.get("/instances").json()["instances"][0]["events"]
    return events


def blocks(client: httpx.Client) -> int:
    count: int = client.get("/instances").json()["instances"][0]["cached_blocks"]
    return count


def believed(client: httpx.Client, path: str, fields: dict[str, Any]) -> tuple[int, int]:
    """How many tokens of a prompt the router believed to be cached, and how many were so by SGLang's own count."""

    def count() -> int:
        name = "kvpool_router_prompt_tokens_cached_total "
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name)]
        return int(float(lines[0].removeprefix(name)))

    before = count()
    answer = client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return count() - before, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def chat(question: str, **fields: Any) -> dict[str, Any]:
    said = [SYSTEM | {"content": f"{question} {SYSTEM['content']}"}, {"role": "user", "content": question}]
    return {"model": "tiny", "messages": said, "max_tokens": 2, "temperature": 0, **fields}


def test_chats_and_texts_are_known_by_the_servers_events(server: Server, client: httpx.Client) -> None:
    text = {"model": "tiny", "prompt": "A text that is no chat. " * 8, "max_tokens": 2}
    for path, fields in (("/v1/chat/completions", chat("Who?")), ("/v1/completions", text)):
        before = blocks(client)
        server.ask(path, fields)
        eventually(lambda before=before: blocks(client) > before)
        known, cached = believed(client, path, fields)
        assert known > 0
        assert abs(known - cached) <= PAGE, "as SGLang counts; the last token is always computed"
    assert 'prompts_untokenized_total{reason="' not in client.get("/metrics").text
    assert (events_of(client)["malformed"], events_of(client)["left_out"]) == (0, 0)


def test_a_salt_is_a_namespace_to_both(server: Server, client: httpx.Client) -> None:
    fields = chat("Which tenant?", cache_salt="tenant")
    before = blocks(client)
    server.ask("/v1/chat/completions", fields)
    eventually(lambda: blocks(client) > before)
    known, cached = believed(client, "/v1/chat/completions", chat("Which tenant?", cache_salt="other"))
    assert (known, cached) == (0, 0)
    known, cached = believed(client, "/v1/chat/completions", fields)
    assert known > 0
    assert abs(known - cached) <= PAGE


def test_streams_and_tokens_pass(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=chat("Stream?", stream=True)) as answer:
        assert answer.status_code == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")
    fields = {"model": "tiny", "prompt": list(range(10, 60)), "max_tokens": 2}
    assert client.post("/v1/completions", json=fields).status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_server_that_clears_its_cache_is_forgotten(server: Server, client: httpx.Client) -> None:
    eventually(lambda: blocks(client) > 0)

    def cleared() -> bool:  # not while a request has not ended for the scheduler
        response = httpx.post(f"{server.url}/flush_cache", timeout=60, trust_env=False)
        server.ask("/v1/completions", {"model": "tiny", "prompt": "!", "max_tokens": 1})  # events go out with a step
        return response.status_code == 200 and blocks(client) <= 1

    eventually(cleared)
