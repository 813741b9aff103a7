"""Secondary tiers of vLLM's offloading: kvpool's beside vLLM's own for files, which lie in memory here."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.context import Context
from bench.engines.vllm_tier_process import BLOCK_BYTES, BLOCKS
from bench.engines.vllm_ttft import PYTHON, Process
from bench.result import Report, Row, Skipped

TITLE = "vLLM: a job of a secondary tier, 64 blocks of 2 MiB"
PEERS: set[str] = set()
_FILES = "vLLM's tier fs on tmpfs"
_OF_COPY = 0.8  # of one thread's copy
_LOOK_UP_US = 10.0


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
            tiers["kvpool"]("start", tier={"type": "kvpool", "dram_blocks": 2 * BLOCKS})
            version = tiers[_FILES]("start", tier={"type": "fs", "root_dir": str(folder / "blocks")})["vllm"]
            told = [_round(tiers, number) for number in range(rounds + 2)][2:]  # the first ones touch memory anew
        finally:
            for process in tiers.values():
                process.close()
    middle = {what: median(each[what] for each in told) for what in told[0]}
    report = Report()
    report.rows = [
        Row(what, middle[f"kvpool {what}"], "GB/s", _OF_COPY * middle["copy"], "higher",
            peers={_FILES: middle[f"{_FILES} {what}"], "a copy by one thread": middle["copy"]},
            details={"rounds": told})
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
    gigabytes = BLOCKS * BLOCK_BYTES / 1e9
    told: dict[str, Any] = {}
    for name, tier in tiers.items():
        told[f"{name} store"] = gigabytes / tier("store", number=number)["s"]
        told[f"{name} load"] = gigabytes / tier("load")["s"]
    looked_up = tiers["kvpool"]("look_up")
    if looked_up["hits"] != BLOCKS:
        raise RuntimeError(f"{looked_up['hits']} of {BLOCKS} blocks are found")
    return {**told, "look up": looked_up["us"], "copy": gigabytes / tiers["kvpool"]("copy")["s"]}
