"""Two servers of vLLM on the CPU, by round robin and behind kvpool's router, with kvpool below them and without it.

Recorded traces are replayed: an id of a trace stands for a block of the prompt here, with everything before it. All
four ways see the same prompts, but for an offset of the token ids, so that no way finds what another has cached.

vLLM's own load generator then drives round robin and the router in the same way (`vllm_serve`).
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.context import Context
from bench.engines import vllm_serve
from bench.engines.vllm_servers import BLOCK, PYTHON, ROOT, Measured, Server, environment, free_port, replay, router
from bench.result import Report, Row, Skipped

TITLE = "vLLM: two servers, routed by kvpool and round robin, with kvpool's cache and without"
PEERS: set[str] = set()
_TRACES = Path(os.environ.get("KVPOOL_TRACES") or ROOT.parent / "shared" / "traces")
_WAYS = ("round robin", "router", "round robin + kvpool", "router + kvpool")
_OWN_BLOCKS = 160  # of vLLM's cache, in each server: 5,120 tokens
_LONGEST, _OUT, _IN_FLIGHT = 4096, 4, 4
_OPTIONS = ("--max-model-len", _LONGEST, "--dtype", "bfloat16", "--num-gpu-blocks-override", _OWN_BLOCKS)
# By name: the file, tokens that an id stands for here, agents, and requests in a quick and in a full run. The sessions
# of the second trace all begin with the same examples, as those of one agent do; here they are of twelve agents.
_WORKLOADS = {
    "conversations": ("mooncake_arxiv_first1000.jsonl.xz", BLOCK, 1, 60, 200),
    "twelve agents": ("derived_react_hotpotqa_blk16.jsonl.xz", 8, 12, 80, 160),
}


def run(context: Context) -> Report:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        raise Skipped(f"vLLM is not installed in {PYTHON}: make test-engines installs it")
    prompts = {}
    for name, (file, tokens, agents, quick, full) in _WORKLOADS.items():
        if not (_TRACES / file).exists():
            raise Skipped(f"{file} is not in {_TRACES} (KVPOOL_TRACES)")
        prompts[name] = _prompts(_TRACES / file, tokens, agents, context.pick(quick, full))
    measured: dict[str, dict[str, Measured]] = {name: {} for name in prompts}
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder) / "model")
        for suffix, connector in (("", None), (" + kvpool", {"dram_gib": 2})):
            with _servers(Path(folder), connector) as two:
                for number, (name, each) in enumerate(prompts.items()):
                    salt = 100 * number + 10 * bool(suffix)
                    urls = [server.url for server in two]
                    measured[name]["round robin" + suffix] = replay(urls, _salted(each, salt), _OUT, _IN_FLIGHT)
                    named = ",".join(f"{server.name}={server.url}" for server in two)
                    with router("--instances", named, up=len(two)) as url:
                        measured[name]["router" + suffix] = replay([url], _salted(each, salt + 1), _OUT, _IN_FLIGHT)
        requests, rounds = context.pick(64, 256), context.pick(1, 3)
        served = vllm_serve.compare(Path(folder), requests, rounds, *_OPTIONS)
    report = _report(prompts, measured)
    report.rows += _served_rows(served)
    report.notes.append(
        f"vllm bench serve: its data set prefix_repetition, {vllm_serve.SIZES} in random order, as texts, without "
        f"kvpool's cache; {requests} requests a way, the median of {rounds} rounds, after warming by other prompts. "
        "The router asks for tokens, and the rows name the one that follows KV events."
    )
    return report


def _served_rows(served: dict[str, vllm_serve.Served]) -> list[Row]:
    best = served["router by events"]
    others = {way: each for way, each in served.items() if each is not best}
    rows = []
    for what, key, unit, better in (
        ("tokens of prompts from vLLM's cache", "hit_ratio", "", "higher"),
        ("time to the first token, mean", "ttft_mean_ms", "ms", "lower"),
        ("time to the first token, 99th percentile", "ttft_p99_ms", "ms", "lower"),
        ("requests a second", "requests_per_s", "/s", "higher"),
    ):
        peers = {way: getattr(each, key) for way, each in others.items()}
        row = Row(f"vllm bench serve: {what}", getattr(best, key), unit, better=better, peers=peers)  # type: ignore[arg-type]
        rows.append(row)
    return rows


def _report(prompts: dict[str, list[list[int]]], measured: dict[str, dict[str, Measured]]) -> Report:
    report = Report()
    for name, ways in measured.items():
        figures = {way: ways[way].as_json() for way in _WAYS}
        best = figures["router + kvpool"]
        others = {way: each for way, each in figures.items() if way != "router + kvpool"}
        for what, key, unit, better in (
            ("tokens of prompts from a cache", "hit_ratio", "", "higher"),
            ("time to the first token, mean", "ttft_mean_ms", "ms", "lower"),
            ("time to the first token, 99th percentile", "ttft_p99_ms", "ms", "lower"),
            ("requests a second", "requests_per_s", "/s", "higher"),
        ):
            peers = {way: each[key] for way, each in others.items()}
            row = Row(f"{name}: {what}", best[key], unit, better=better, peers=peers)  # type: ignore[arg-type]
            report.rows.append(row)
        report.rows[-1].details.update(
            {"ways": figures, "requests": len(prompts[name]), "ideal": _ideal(prompts[name])}
        )
    report.notes = [
        f"Both servers on this machine, {_IN_FLIGHT} requests in flight, {_OUT} tokens of answer; vLLM's own cache has "
        f"{_OWN_BLOCKS * BLOCK:,} tokens in each. A llama with random weights, 8 layers, bfloat16.",
        "One unbounded cache would have "
        + ", ".join(f"{_ideal(each):.3f} of the tokens ({name})" for name, each in prompts.items()),
        "The client is this bench's own: requests in the order of the trace, not at its times.",
    ]
    return report


def _prompts(file: Path, id_tokens: int, agents: int, count: int) -> list[list[int]]:
    with lzma.open(file, "rt") as lines:
        rows = [json.loads(next(lines)) for _ in range(count)]
    prompts = []
    for row in rows:
        offset = 1_000_003 * (row.get("session", 0) % agents)
        tokens = [token for each in row["hash_ids"] for token in _tokens(each + offset, id_tokens)]
        prompts.append(tokens[: _LONGEST - _OUT - 1])
    return prompts


def _tokens(number: int, count: int) -> list[int]:
    """Those of an id; other ids have others."""
    return [(number * 7919 + at * at * 31 + at * number % 101) % 480 for at in range(count)]


def _salted(prompts: Sequence[Sequence[int]], salt: int) -> list[list[int]]:
    """The same prompts for another way: nothing that a cache has of one begins one of these."""
    return [[3 + salt % 480, *(3 + (token + salt) % 480 for token in prompt[1:])] for prompt in prompts]


def _ideal(prompts: Sequence[Sequence[int]]) -> float:
    """The share of tokens in whole blocks that an unbounded cache of all would have."""
    seen: set[int] = set()
    hit = 0
    for prompt in prompts:
        chain, found = 0, True
        for at in range(0, (len(prompt) - 1) // BLOCK * BLOCK, BLOCK):
            chain = hash((chain, *prompt[at : at + BLOCK]))
            found = found and chain in seen
            hit += BLOCK * found
            seen.add(chain)
    return hit / sum(map(len, prompts))


def _write_model(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from bench.engines import tiny_llama, tiny_tokenizer, vllm_engine as e; "
        "folder = Path(sys.argv[1]); tiny_llama.write(folder, hidden=e.HIDDEN, layers=e.LAYERS, heads=e.HEADS, "
        "kv_heads=e.KV_HEADS, head_dim=e.HEAD_DIM); tiny_tokenizer.write(folder)"
    )
    subprocess.run([PYTHON, "-c", program, str(folder)], check=True, cwd=ROOT, env=environment())


@contextlib.contextmanager
def _servers(folder: Path, connector: dict[str, Any] | None) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        two = []
        for name in ("a", "b"):
            two.append(Server(folder, name, free_port(), *_OPTIONS, connector=connector))
            stack.callback(two[-1].kill)
        for server in two:
            server.await_start()
        replay([server.url for server in two], [[5] * 300] * 4, _OUT, 2)  # warms up
        yield two
