"""Secondary tiers of vLLM's offloading: kvpool's beside vLLM's own for files, which lie in memory here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.context import Context
from bench.engines.vllm_tier_process import JOB_BYTES
from bench.engines.vllm_ttft import PYTHON, Process
from bench.result import Report, Row, Skipped

TITLE = "vLLM: a job of a secondary tier, 128 MiB in blocks of 2 MiB"
PEERS: set[str] = set()
_FILES = "vLLM's tier fs on tmpfs"
_BLOCK_BYTES = 2 << 20
_SMALLER = {"64 KiB": 64 << 10, "192 KiB": 192 << 10}  # of models with few KV heads, or many workers
_OF_COPY = 0.8  # of one thread's copy
_LOOK_UP_US = 10.0
_GIGABYTES = JOB_BYTES / 1e9


def run(context: Context) -> Report:
    if not list(PYTHON.parents[1].glob("lib/python*/site-packages/vllm")):
        raise Skipped(f"vLLM is not installed in {PYTHON}: make test-engines installs it")
    rounds = context.pick(5, 25)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        tiers = {
            "kvpool": Process(folder, "bench.engines.vllm_tier_process"),
            _FILES: Process(folder, "bench.engines.vllm_tier_process"),
        }
        try:
            _start(tiers["kvpool"], _BLOCK_BYTES)
            files = {"type": "fs", "root_dir": str(folder / "blocks")}
            version = tiers[_FILES]("start", tier=files, block_bytes=_BLOCK_BYTES)["vllm"]
            told = [_round(tiers, number) for number in range(rounds + 2)][2:]  # the first ones touch memory anew
        finally:
            for process in tiers.values():
                process.close()
        smaller = {size: _smaller(folder, block_bytes, rounds) for size, block_bytes in _SMALLER.items()}
    middle = {what: median(each[what] for each in told) for what in told[0]}
    report = Report()
    report.rows = [
        Row(what, middle[f"kvpool {what}"], "GB/s", None if "beside" in what else _OF_COPY * middle["copy"], "higher",
            peers={_FILES: middle[f"{_FILES} {what}"], "a copy by one thread": middle["copy"]},
            details={"rounds": told})
        for what in ("store", "load", "load beside a store")
    ]  # fmt: skip
    for size, told_of_it in smaller.items():
        rates = {what: median(each[what] for each in told_of_it) for what in told_of_it[0]}
        report.rows += [
            Row(f"{what}, blocks of {size}", rates[f"kvpool {what}"], "GB/s", better="higher",
                peers={"a copy by one thread": rates["copy"]}, details={"rounds": told_of_it})
            for what in ("store", "load")
        ]  # fmt: skip
    report.rows.append(Row("look a block up that is there", middle["look up"], "us", _LOOK_UP_US))
    report.notes = [
        f"vLLM {version}: the tiers as its factory makes them, without an engine; from the call until the job has "
        "ended. vLLM's own offloading (OffloadingConnector, SimpleCPUOffloadConnector) does not run on a CPU."
    ]
    return report


def _round(tiers: dict[str, Process], number: int) -> dict[str, float]:
    """Rates, in turns; and the time of a look-up."""
    told: dict[str, Any] = {}
    for name, tier in tiers.items():
        told |= _rates(name, tier, number)
        told[f"{name} load beside a store"] = _GIGABYTES / tier("load_beside_a_store", number=number)["s"]
    looked_up = tiers["kvpool"]("look_up")
    if looked_up["hits"] != JOB_BYTES // _BLOCK_BYTES:
        raise RuntimeError(f"{looked_up['hits']} blocks are found, and not all")
    return {**told, "look up": looked_up["us"], "copy": _GIGABYTES / tiers["kvpool"]("copy")["s"]}


def _smaller(folder: Path, block_bytes: int, rounds: int) -> list[dict[str, float]]:
    """Rates of kvpool's tier with smaller blocks."""
    tier = Process(folder, "bench.engines.vllm_tier_process")
    try:
        _start(tier, block_bytes)
        return [
            {**_rates("kvpool", tier, number), "copy": _GIGABYTES / tier("copy")["s"]} for number in range(rounds + 2)
        ][2:]
    finally:
        tier.close()


def _start(tier: Process, block_bytes: int) -> None:
    """Kvpool's, with room for two jobs."""
    tier("start", tier={"type": "kvpool", "dram_blocks": 2 * (JOB_BYTES // block_bytes)}, block_bytes=block_bytes)


def _rates(name: str, tier: Process, number: int) -> dict[str, float]:
    stored = tier("store", number=number)["s"]
    return {f"{name} store": _GIGABYTES / stored, f"{name} load": _GIGABYTES / tier("load")["s"]}
