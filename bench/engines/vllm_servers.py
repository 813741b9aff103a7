"""Servers of vLLM and kvpool's router as processes, and requests that are replayed against them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from bench.engines.http_client import httpx

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVPOOL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL, BLOCK = "tiny", 32
_START_S = 300.0
_PORTS = 20000, 32000  # Linux gives connections those from 32768 on
_random = random.SystemRandom()  # apart from the seeds of tests
_returned_ports: set[int] = set()


def environment() -> dict[str, str]:
    """For a process of vLLM, in its own virtual environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return kept | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def free_port() -> int:
    """One of the loopback that nobody has now, and that was not returned before.

    It is below those that the kernel gives to connections: until a server has started, none of them takes it.
    """
    while True:
        port = _random.randrange(*_PORTS)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            if port not in _returned_ports:
                _returned_ports.add(port)
                return port


class Server:
    """An OpenAI-compatible server of vLLM, with its scheduler and its worker in one process.

    Args:
        folder: Of the model, and of what the server writes.
        name: Of the instance.
        port: Of the loopback.
        options: More of vLLM's.
        connector: Options of kvpool's connector; None for none.
        variables: The environment; None: `environment`.
        texts: Whether it takes texts and chats: the model's folder has a tokenizer then.

    Attributes:
        name: Of the instance.
        url: Where it answers.
        folder: As given.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        port: int,
        *options: object,
        connector: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        texts: bool = False,
    ) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        command: list[object] = [
            PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model", "--port", port,
            "--served-model-name", MODEL, "--enforce-eager", "--block-size", BLOCK,
            "--enable-prompt-tokens-details", "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",  # by "uni" vLLM takes another one on a CPU
            *options,
        ]  # fmt: skip
        if not texts:
            command.append("--skip-tokenizer-init")
        if connector is not None:
            transfer = {
                "kv_connector": "KvpoolConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector,
                "kv_connector_module_path": "kvpool.engines.vllm.connector",  # kvpool is not installed there
            }  # fmt: skip
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self.folder, self._log = folder, folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=variables or environment(), cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip

    def await_start(self) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"a server of vLLM has ended: {self._log.read_text(errors='replace')[-6000:]}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError("a server of vLLM did not start")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # with vLLM's own processes
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def router(*options: str, up: int) -> Iterator[str]:
    """The URL of `kvpool router`, when so many instances are up."""
    command = [sys.executable, "-m", "kvpool", "router", "--port", "0", "--health-interval", "0.5", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )
    try:
        assert process.stderr is not None
        url = f"http://{json.loads(process.stderr.readline())['public']}"
        end = time.monotonic() + _START_S
        while httpx.get(f"{url}/health", timeout=60, trust_env=False).json()["available"] < up:
            if time.monotonic() > end:
                raise RuntimeError("the instances are not up")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Measured:
    """What a replay took.

    Attributes:
        first_token_ms: Of each request, from sending it to its first token.
        cached: Tokens of prompts that came from a cache, by the servers' own count.
        prompt: Tokens of all prompts.
        seconds: From the first request to the last answer.
    """

    first_token_ms: list[float]
    cached: int
    prompt: int
    seconds: float

    @property
    def hit_ratio(self) -> float:
        return self.cached / self.prompt

    def as_json(self) -> dict[str, float]:
        """The figures."""
        return {
            "hit_ratio": self.hit_ratio,
            "ttft_mean_ms": fmean(self.first_token_ms),
            "ttft_median_ms": median(self.first_token_ms),
            "ttft_p99_ms": quantiles(self.first_token_ms, n=100)[98],
            "requests_per_s": len(self.first_token_ms) / self.seconds,
            "seconds": self.seconds,
        }


def replay(urls: Sequence[str], prompts: Sequence[Sequence[int]], out: int, in_flight: int) -> Measured:
    """Sends the prompts in their order, so many at a time, to the URLs in turn."""
    return asyncio.run(_replay(urls, prompts, out, in_flight))


async def _replay(urls: Sequence[str], prompts: Sequence[Sequence[int]], out: int, in_flight: int) -> Measured:
    times: list[float] = []
    cached: list[int] = []
    following = iter(list(enumerate(prompts)))

    async def client(session: httpx.AsyncClient) -> None:
        for number, prompt in following:
            asked = {
                "model": MODEL, "prompt": list(prompt), "max_tokens": out, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
            }  # fmt: skip
            began, first = time.perf_counter(), 0.0
            url = f"{urls[number % len(urls)]}/v1/completions"
            async with session.stream("POST", url, json=asked) as response:
                if response.status_code != 200:
                    raise RuntimeError(f"a request was refused: {(await response.aread()).decode()[:500]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if event["choices"] and not first:
                        first = time.perf_counter() - began
                    if event.get("usage") and event["usage"].get("prompt_tokens_details"):
                        cached.append(event["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
            times.append(first * 1e3)

    began = time.perf_counter()
    async with httpx.AsyncClient(timeout=600, trust_env=False) as session:
        await asyncio.gather(*(client(session) for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    if len(cached) != len(prompts):
        raise RuntimeError(f"{len(cached)} of {len(prompts)} answers say what was cached")
    return Measured(times, sum(cached), sum(map(len, prompts)), seconds)
