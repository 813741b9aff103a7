"""vLLM's own load generator (`vllm bench serve`) against two servers of vLLM: round robin, and kvpool's router.

Its data set "prefix_repetition" has groups of prompts that begin alike, in a random order. It sends texts, so the
router asks the servers for the tokens of each prompt. It goes by its memory of what it sent where, then by KV events.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from bench.engines.http_client import httpx
from bench.engines.vllm_servers import BLOCK, MODEL, PYTHON, ROOT, Server, environment, free_port, router

# The command `vllm` wants a package of that name, and the one for CPUs has another: so without the command.
_PROGRAM = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser; "
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)
WAYS = ("round robin", "router", "router by events")
_PREFIXES, _PREFIX, _SUFFIX, _OUT, _IN_FLIGHT = 8, 1024, 64, 4, 4
SIZES = (
    f"{_PREFIXES} prefixes of {_PREFIX:,} tokens with endings of {_SUFFIX}, {_OUT} tokens of answer, "
    f"{_IN_FLIGHT} requests in flight"
)
_WARMING = 16  # requests
_RUN_S, _START_S = 600.0, 60.0


@dataclass(frozen=True)
class Served:
    """What a run of the load generator took.

    Attributes:
        hit_ratio: Tokens of prompts that the servers had in their own caches, of all, by the servers' count.
        ttft_mean_ms: As the load generator reports it.
        ttft_p99_ms: The same.
        requests_per_s: The same.
    """

    hit_ratio: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    requests_per_s: float


def compare(folder: Path, requests: int, rounds: int, *options: object) -> dict[str, Served]:
    """Each way in each round, in another order each time, with other prompts of the same kind. Returns medians.

    Args:
        folder: Has the model with its tokenizer.
        requests: In each way and round.
        rounds: How many.
        options: Of the servers.
    """
    with _publishing(folder, options) as (two, events):
        urls = [server.url for server in two]
        instances = ",".join(f"{server.name}={server.url}" for server in two)
        asking = ("--instances", instances, "--block-tokens", str(BLOCK), "--tokenize", "/tokenize")
        followed = ",".join(f"{server.name}={where}" for server, where in zip(two, events, strict=True))
        fronts: dict[str, Callable[[], AbstractContextManager[str]]] = {
            WAYS[0]: lambda: _round_robin(urls),
            WAYS[1]: lambda: router(*asking, up=len(two)),
            WAYS[2]: lambda: router(*asking, "--events", followed, up=len(two)),
        }
        with fronts[WAYS[0]]() as url:  # what the first prompts cost is no way's
            _serve(url, urls, folder, _WARMING, 0)
        found: dict[str, list[Served]] = {way: [] for way in WAYS}
        for number in range(rounds):
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                seed = 1 + number * len(WAYS) + WAYS.index(way)
                with fronts[way]() as url:
                    found[way].append(_serve(url, urls, folder, requests, seed))
        return {way: _median(each) for way, each in found.items()}


def _median(served: Sequence[Served]) -> Served:
    """Of each figure."""
    return Served(*(median(getattr(each, one.name) for each in served) for one in fields(Served)))


def _serve(url: str, servers: Sequence[str], folder: Path, requests: int, seed: int) -> Served:
    file = f"served-{seed}.json"
    command = [
        PYTHON, "-c", _PROGRAM, "--backend", "openai", "--base-url", url, "--model", MODEL, "--tokenizer",
        folder / "model", "--dataset-name", "prefix_repetition", "--num-prompts", requests,
        "--prefix-repetition-num-prefixes", _PREFIXES, "--prefix-repetition-prefix-len", _PREFIX,
        "--prefix-repetition-suffix-len", _SUFFIX, "--prefix-repetition-output-len", _OUT, "--ignore-eos",
        "--max-concurrency", _IN_FLIGHT, "--seed", seed, "--save-result", "--result-dir", folder, "--result-filename",
        file, "--disable-tqdm", "--ready-check-timeout-sec", 0, "--num-warmups", 0,
    ]  # fmt: skip
    before = _counts(servers)
    done = subprocess.run(
        list(map(str, command)), check=False, env=environment(), cwd=ROOT, capture_output=True, text=True,
        timeout=_RUN_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"vllm bench serve has failed: {done.stderr[-4000:]}")
    hits, asked = (after - earlier for after, earlier in zip(_counts(servers), before, strict=True))
    told = json.loads((folder / file).read_text())
    if told["completed"] != requests:
        raise RuntimeError(f"{told['completed']} of {requests} requests were answered")
    return Served(hits / asked, told["mean_ttft_ms"], told["p99_ttft_ms"], told["request_throughput"])


def _counts(urls: Sequence[str]) -> tuple[float, float]:
    """Tokens that all servers have found in their own caches, and those that they have looked for."""
    text = "\n".join(httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text for url in urls)
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("vllm:prefix_cache_")]
    hits, queries = (
        sum(float(value) for name, _, value in samples if name.startswith(f"vllm:prefix_cache_{what}_total"))
        for what in ("hits", "queries")
    )
    return hits, queries


@contextlib.contextmanager
def _publishing(folder: Path, options: Sequence[object]) -> Iterator[tuple[list[Server], list[str]]]:
    """Two servers that take texts, and where they publish KV events."""
    with contextlib.ExitStack() as stack:
        two, endpoints = [], []
        for name in ("a", "b"):
            port = free_port()
            published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
            server = Server(
                folder, name, free_port(), *options, "--kv-events-config", json.dumps(published), texts=True
            )
            stack.callback(server.kill)
            two.append(server)
            endpoints.append(f"tcp://127.0.0.1:{port}")
        for server in two:
            server.await_start()
        yield two, endpoints


@contextlib.contextmanager
def _round_robin(urls: Sequence[str]) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "bench.engines.round_robin", str(port), *urls], cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", timeout=60, trust_env=False).raise_for_status()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the proxy does not answer")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()
