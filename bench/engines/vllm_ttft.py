"""Time to the first token in vLLM: computed, from vLLM's cache, from kvpool; and what the connector costs a step."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.context import Context
from bench.result import Report, Row, Skipped

TITLE = "vLLM: time to the first token of a prompt of 4,097 tokens"
PEERS: set[str] = set()
ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVPOOL_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
TOKENS = 4097
_HIT_TARGET = 1.2  # of vLLM's own cache
_STEP_TARGET = 1.0  # percent
_REQUEST_TARGET_US = 50.0


class Process:
    """A process with an engine."""

    def __init__(self, folder: Path, module: str = "bench.engines.vllm_engine") -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        environment |= {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        }  # fmt: skip
        self._errors = (folder / "engine.log").open("a")
        self._process = subprocess.Popen(
            [PYTHON, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        told: dict[str, Any] = json.loads(line) if line else {"error": "the engine's process has ended"}
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def run(context: Context) -> Report:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        raise Skipped(f"vLLM is not installed in {PYTHON}: make test-engines installs it")
    rounds = context.pick(5, 15)
    with _engines() as (plain, offload, versions):
        times = _first_tokens(plain, offload, rounds)
        watched = _decode(offload)
    report = Report()
    middle = {name: median(values) for name, values in times.items()}
    details = {"versions": versions, "ms": times, "rounds": rounds}
    kvpool, own = middle["kvpool"], middle["vLLM's cache"]
    report.rows = [
        Row("hit in kvpool", kvpool, "ms", peers={k: v for k, v in middle.items() if k != "kvpool"}, details=details),
        Row("hit in kvpool / hit in vLLM's own cache", kvpool / own, "x", target=_HIT_TARGET),
        Row("computed / hit in kvpool", middle["computed"] / kvpool, "x", better="higher"),
        Row("the connector's part of a decoding step", watched["percent"], "%", target=_STEP_TARGET, details=watched),
        Row("the connector's work for a scheduled request", watched["request_us"], "us", target=_REQUEST_TARGET_US),
    ]
    report.notes = [
        f"vLLM {versions['vllm']}, torch {versions['torch']}, on the CPU, one process; a llama with random weights of "
        "8 layers and 4 KV heads of 64 in bfloat16: 32 MiB of KV for the prompt.",
        "A round asks for a new prompt in each way; the engine without a connector and the one with it take turns.",
    ]
    return report


@contextmanager
def _engines() -> Iterator[tuple[Process, Process, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain, offload = Process(folder), Process(folder)
        try:
            how = {"model": str(folder / "model"), "max_len": TOKENS + 64}
            plain("start", connector=False, **how)
            versions = offload("start", connector=True, **how)
            yield plain, offload, versions
        finally:
            plain.close()
            offload.close()


def _first_tokens(plain: Process, offload: Process, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by way, one for each round; the first two rounds warm up."""
    names = ("computed", "vLLM's cache", "vLLM's cache, with the connector", "kvpool")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        how: dict[str, Any] = {"prompts": [prompt_of(TOKENS, number)], "out": 1}
        told = [plain("ask", **how), plain("ask", **how)]
        offload("ask", **how)
        offload("await_saves")
        told.append(offload("ask", **how))
        offload("forget")
        told.append(offload("ask", **how))
        cached = [answer["cached"][0] for answer in told]
        if cached != [0, TOKENS - 1, TOKENS - 1, TOKENS - 1] or len({str(answer["tokens"]) for answer in told}) != 1:
            raise RuntimeError(f"the ways differ: {cached}, {[answer['tokens'] for answer in told]}")
        if number >= 2:
            for name, answer in zip(names, told, strict=True):
                times[name].append(answer["ms"])
    return times


def _decode(offload: Process) -> dict[str, float]:
    """Eight requests that decode together."""
    told = offload("watched", prompts=[prompt_of(200, 100 + number) for number in range(8)], out=200)
    return {
        "percent": 100e3 * told["seconds"] / told["ms"],
        "request_us": 1e6 * told["seconds"] / told["scheduled"],
        "steps": told["steps"],
        "step_ms": told["ms"] / told["steps"],
    }


def prompt_of(length: int, seed: int) -> list[int]:
    return [(at * at * 7 + at * 13 + 3 + seed * 31) % 500 + 3 for at in range(length)]
