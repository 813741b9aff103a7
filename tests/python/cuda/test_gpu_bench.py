"""The benches for a GPU, in a small form over a library that answers for the CUDA driver.

So that they run at once where there is a GPU. Their figures mean nothing here, and are not looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# One layer, four blocks: 2.5 MiB of HBM in each process.
SMALL = """
import json, sys
from pathlib import Path
from bench.context import Context
from bench.gpu import fig11, links
from bench.peers.find import Peers
from bench.result import Skipped

for module in (links, fig11):
    module._LAYERS = 1
links._QUICK_BLOCKS, links._QUICK_CALLS, links._QUICK_CEILING_BYTES = 4, 5, 1 << 20
fig11._QUICK_TOKENS = 64
fig11._WAYS = [way for way in fig11._WAYS if way.route != "nccl"]  # there is no stand-in for it here
with Peers(set(), wanted=False, quick=True) as peers:
    context = Context(True, Path("."), peers)
    for module in (links, fig11):
        try:
            report = module.run(context)
        except Skipped as reason:
            print(json.dumps({"skipped": str(reason)}))
        else:
            print(json.dumps({"rows": [row.as_json() for row in report.rows], "notes": report.notes + peers.notes}))
"""


def run_small(library: str) -> list[dict[str, object]]:
    environment = os.environ | {
        "KVPOOL_CUDA_LIBRARY": library, "UCX_LOG_LEVEL": "fatal",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", SMALL],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_without_a_gpu_they_say_so_and_measure_nothing():
    for found in run_small("/nowhere/libcuda.so"):
        assert list(found) == ["skipped"]
        assert str(found["skipped"]).startswith("no CUDA GPU: ")


def test_they_run_to_their_end_and_what_they_send_arrives(fake_cuda):
    links, fig11 = run_small(str(fake_cuda))
    rows = [row["what"] for row in links["rows"]]  # type: ignore[attr-defined]
    assert [what for what in rows if what.startswith("cuda_ipc, 4 scattered")] == rows[:2], links
    assert rows[2:] == ["transfer() of 1 blocks, until it returns", "transfer() of 16 blocks, until it returns"], links
    assert "cuda_ipc: aggregated" in [row["what"] for row in fig11["rows"]], fig11  # type: ignore[attr-defined]
    # What cannot run here is left out, and said.
    assert any(note.startswith("ucx: ") or "left out" in note for note in fig11["notes"]), fig11  # type: ignore[attr-defined]
