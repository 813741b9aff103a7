"""The rounds of the bench that drives vLLM's load generator, without vLLM: their order, their prompts, and medians."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx2" if sys.version_info >= (3, 11) else "httpx")

from bench.engines import vllm_serve


def test_ways_take_turns_at_being_first_and_each_run_has_prompts_of_another_seed(monkeypatch):
    runs: list[tuple[str, int]] = []

    @contextlib.contextmanager
    def front(way):
        yield way

    @contextlib.contextmanager
    def publishing(folder, options):
        yield [SimpleNamespace(name=name, url=f"http://{name}") for name in "ab"], ["tcp://a:1", "tcp://b:1"]

    def serve(url, servers, folder, requests, seed):
        runs.append((url, seed))
        return vllm_serve.Served(0.5, float(seed), 10.0 * seed, 1.0)

    monkeypatch.setattr(vllm_serve, "_publishing", publishing)
    monkeypatch.setattr(vllm_serve, "_round_robin", lambda urls: front("round robin"))
    monkeypatch.setattr(
        vllm_serve, "router", lambda *options, up: front("router by events" if "--events" in options else "router")
    )
    monkeypatch.setattr(vllm_serve, "_serve", serve)
    found = vllm_serve.compare(Path(), 64, 3)
    assert len({seed for _, seed in runs}) == len(runs) == 10  # the first one warms the servers
    first, second, third = vllm_serve.WAYS
    assert [way for way, _ in runs[1:]] == [first, second, third, second, third, first, third, first, second]
    for way in vllm_serve.WAYS:
        seeds = sorted(seed for each, seed in runs[1:] if each == way)
        assert found[way] == vllm_serve.Served(0.5, float(seeds[1]), 10.0 * seeds[1], 1.0)
