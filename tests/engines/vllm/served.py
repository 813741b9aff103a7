"""vLLM's HTTP servers, and kvpool's router before them, as processes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
from vllm_process import Engine, environment_of

from bench.engines import vllm_servers
from bench.engines.vllm_servers import MODEL, free_port


class Server(vllm_servers.Server):
    """A server on kvpool that publishes KV events; in a cluster under its own name.

    Attributes:
        events: Where it publishes them.
    """

    def __init__(self, folder: Path, name: str, **extra: Any):
        port, events = free_port(), free_port()
        self.events = f"tcp://127.0.0.1:{events}"
        published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        if "cluster" in extra:
            extra |= {"name": name, "url": f"http://127.0.0.1:{port}"}
        super().__init__(
            folder, name, port, "--max-model-len", 2048, "--kv-events-config", json.dumps(published), connector=extra,
            variables=environment_of(folder, own_process=True) | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


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
    with (
        vllm_servers.router(*arguments, up=up) as url,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        yield client


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
