"""vLLM's HTTP servers, and kvpool's router before them, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from vllm_process import BLOCK, PYTHON, ROOT, Engine, environment_of

START_S = 240.0  # of a busy machine
MODEL = "tiny"
UNI = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # by "uni" vLLM takes another one on a CPU


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """An OpenAI-compatible server of vLLM on kvpool."""

    def __init__(self, folder: Path, name: str, **extra: Any):
        self.name = name
        self.errors = folder / f"server-{name}-{os.getpid()}-{id(self):x}.txt"
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.events = f"tcp://127.0.0.1:{(events := free_port())}"
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        if "cluster" in extra:
            extra |= {"name": name, "url": self.url}
        transfer = {"kv_connector": "KvpoolConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        command = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model", "--served-model-name",
            MODEL, "--skip-tokenizer-init", "--port", port, "--max-model-len", 2048, "--enforce-eager",
            "--block-size", BLOCK, "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
            "--kv-events-config", json.dumps(published), "--distributed-executor-backend", UNI,
        ]  # fmt: skip
        environment = environment_of(folder, own_process=True) | {"OMP_NUM_THREADS": "1"}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=errors, stderr=errors, env=environment, cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    def await_start(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.errors.read_text(errors="replace")[-6000:]
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            return False

        eventually(up, START_S)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # with vLLM's own processes
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def servers(folder: Path, **extras: dict[str, Any]) -> Iterator[dict[str, Server]]:
    """One for each name, started at once; `extras` are options of their connectors."""
    with contextlib.ExitStack() as stack:
        writer = Engine(folder)
        stack.callback(writer.close)
        writer("write_model", writer.model)
        running = {}
        for name, extra in extras.items():
            running[name] = Server(folder, name, **extra)
            stack.callback(running[name].kill)
        for server in running.values():
            server.await_start()
        yield running


@contextlib.contextmanager
def router(*arguments: str, up: int) -> Iterator[httpx.Client]:
    """A client of `kvpool router`, when so many instances are up."""
    command = [sys.executable, "-m", "kvpool", "router", "--port", "0", "--health-interval", "0.5", *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    try:
        assert process.stderr
        address = json.loads(process.stderr.readline())["public"]
        with httpx.Client(base_url=f"http://{address}", timeout=120, trust_env=False) as client:
            eventually(lambda: client.get("/health").json()["available"] >= up, 60)
            yield client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def complete(client: httpx.Client, tokens: list[int], length: int = 8, **fields: Any) -> httpx.Response:
    asked = {
        "model": MODEL, "prompt": tokens, "max_tokens": length, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    return client.post("/v1/completions", json=asked)


def tokens_of(response: httpx.Response) -> list[int]:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def cached_of(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def eventually(holds: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never held"
        time.sleep(0.1)
    return found
