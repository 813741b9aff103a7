"""Prefill and decode in two processes of vLLM: what is left to send after a prefill, and the first token at decode."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import kvpool
from bench.context import Context
from bench.engines.vllm_ttft import PYTHON, TOKENS, Process, prompt_of
from bench.result import Report, Row, Skipped

TITLE = "vLLM: a prompt of 4,097 tokens is computed in one process and answered in another"
PEERS: set[str] = set()
_LEFT_TARGET_MS = 0.3
_HIT_TARGET = 1.5  # of vLLM's own cache
_TO = {"kvpool": {"to": "decode-0"}}
_WAYS = (  # name, by_layer, while_saving
    ("by request", False, False),
    ("by request, while saving", False, True),
    ("by layer", True, False),
    ("by layer, while saving", True, True),
)


def run(context: Context) -> Report:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        raise Skipped(f"vLLM is not installed in {PYTHON}: make test-engines installs it")
    rounds = context.pick(5, 11)
    with _engines() as (prefill, decode, versions):
        times = _rounds(prefill, decode, rounds)
    middle = {name: median(values) for name, values in times.items()}
    details = {"versions": versions, "ms": times, "rounds": rounds}
    report = Report()
    report.rows = [
        Row("left to send after prefill, by layer, before the prompt is saved", middle["left, by layer"], "ms"),
        Row("the same beside the save, as in service", middle["left, by layer, while saving"], "ms",
            target=_LEFT_TARGET_MS),
        Row("left to send after prefill, by request", middle["left, by request"], "ms", details=details),
        Row("the same beside the save", middle["left, by request, while saving"], "ms"),
        Row("prefill, sent by layer / not sent", middle[f"prefill, {_WAYS[3][0]}"] / middle["prefill"], "x"),
        Row("prefill, sent by request / not sent", middle[f"prefill, {_WAYS[1][0]}"] / middle["prefill"], "x"),
        Row(
            "first token at decode, of a prompt that has arrived", middle["decode"], "ms",
            peers={name: middle[name] for name in ("computed", "vLLM's cache")},
        ),
        Row("the same / hit in vLLM's own cache", middle["decode"] / middle["vLLM's cache"], "x",
            target=_HIT_TARGET),
        Row("prefill by layer, then decode / computed at decode", middle["both"] / middle["computed"], "x"),
    ]  # fmt: skip
    report.notes = [
        f"vLLM {versions['vllm']}, torch {versions['torch']}, on the CPU; a llama with random weights of 8 layers and "
        "4 KV heads of 64 in bfloat16: 32 MiB of KV for the prompt. One of the two engines works at a time.",
        "What is left: from the end of the last layer until the receiver has the prompt in its cache. To measure it, "
        "the step waits, before it begins to save the prompt to its DRAM, or beside that, on the same cores; the "
        "times of prefill include it.",
    ]
    return report


@contextmanager
def _engines() -> Iterator[tuple[Process, Process, dict[str, Any]]]:
    url = f"local://bench-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefill, decode = Process(folder), Process(folder)
        try:
            how = {"model": str(folder / "model"), "max_len": TOKENS + 64, "connector": True}
            versions = prefill("start", role="kv_producer", options={"cluster": url, "name": "prefill-0"}, **how)
            decode("start", role="kv_consumer", options={"cluster": url, "name": "decode-0"}, **how)
            prefill("ask", prompts=[prompt_of(200, 99)], out=1, params=_TO)  # connects
            yield prefill, decode, versions
        finally:
            prefill.close()
            decode.close()
            kvpool.Cluster.forget(url)


def _rounds(prefill: Process, decode: Process, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what was measured, one for each round; the first two rounds warm up."""
    times: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        told = _round(prefill, decode, prompt_of(TOKENS, number))
        if number >= 2:
            for name, value in told.items():
                times.setdefault(name, []).append(value)
    return times


def _round(prefill: Process, decode: Process, prompt: list[int]) -> dict[str, float]:
    how: dict[str, Any] = {"prompts": [prompt], "out": 1}
    plain = prefill("ask", **how)
    times = {"prefill": plain["ms"]}
    answers = [plain]
    for name, by_layer, while_saving in _WAYS:
        prefill("time_sends", while_saving=while_saving)
        _forget(prefill, decode)
        prefill("send_by_layer", by_layer=by_layer)
        sent = prefill("ask", params=_TO, **how)
        got = decode("ask", params=sent["params"], **how)
        if got["cached"] != [TOKENS - 1]:
            raise RuntimeError(f"{got['cached']} tokens came from the other engine")
        times |= {f"prefill, {name}": sent["ms"], f"left, {name}": prefill("left")["ms"]}
        times |= {"decode": got["ms"], "both": sent["ms"] + got["ms"]}  # the last way counts
        answers += [sent, got]
    own = decode("ask", **how)
    _forget(prefill, decode)
    computed = decode("ask", **how)
    times |= {"vLLM's cache": own["ms"], "computed": computed["ms"]}
    if len({str(answer["tokens"]) for answer in (*answers, own, computed)}) != 1:
        raise RuntimeError("the answers differ")
    return times


def _forget(*engines: Process) -> None:
    for engine in engines:
        if not engine("forget_all")["ok"]:
            raise RuntimeError("an engine has not forgotten what was cached")
