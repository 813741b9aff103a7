"""A bench on a GPU in which something fails: all other figures are there, the failure is a row, and the status is 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

# As kvpool_gpu_bench answers; one part fails after its first figure, one hangs.
PROGRAM = f"""\
#!{sys.executable}
import json, sys, time
part = sys.argv[-1]
print(json.dumps({{"device": "A GPU", "sm": 90, "driver": 13000, "kernels": "sm_90"}}))
def tell(case, piece, rate):
    for way, value in (("cudaMemcpyAsync", 100.0), ("kvpool", rate)):
        print(json.dumps({{"case": case, "piece": piece, "way": way, "values": [value] * 3}}), flush=True)
if part == "device":
    tell("device copy", 1 << 30, 100.0)
    tell("gather", 16384, 95.0)
elif part == "layouts":
    tell("discrete to aggregated", 16384, 96.0)
    print("cudaErrorIllegalAddress: copy kernel", file=sys.stderr)
    sys.exit(1)
elif part == "bus":
    tell("both ways", 65536, 97.0)
    print('{{"case": "both ways", "pie', end="", flush=True)
    time.sleep(100)
else:
    print(json.dumps({{"case": "launch", "piece": 2048, "way": "1 strips", "unit": "us", "values": [3.0] * 100}}))
"""

SPEED = """
import json, sys
from pathlib import Path
from bench.context import Context
from bench.gpu import pool_swap, speed, torch_indexing
from bench.peers.find import Peers

speed._RUN_S_MAX = 8
pool_swap.PIECES = (16 << 10, 65536)

def rates(piece, quick):
    if piece == 16 << 10:
        raise ValueError("no such luck")
    return {"both ways": [90.0]}

def torch_fails(quick):
    raise RuntimeError("CUDA error")

pool_swap.rates, torch_indexing.rates = rates, torch_fails
with Peers(set(), wanted=False, quick=True) as peers:
    report = speed.run(Context(True, Path("."), peers))
print(json.dumps({"rows": [row.as_json() for row in report.rows], "notes": report.notes}))
"""

SUITE = """
import sys
from pathlib import Path
from bench import suite
from bench.result import Report, Row, Skipped

class Bench:
    PEERS = set()
    def __init__(self, name, run):
        self.TITLE, self.run = name, run

def broken(context):
    raise KeyError("a bug")

def half(context):
    report = Report()
    with report.guarded("the first"):
        raise OSError("no such device\\nand more")
    with report.guarded("the second"):
        report.rows.append(Row("the second", 2.0))
    return report

def skipped(context):
    report = Report()
    with report.guarded("this"):
        raise Skipped("nothing to see")

def good(context):
    return Report(rows=[Row("a figure", 1.0)])

benches = {"broken": broken, "half": half, "skipped": skipped, "good": good}
for name, run in benches.items():
    sys.modules["made_up_" + name] = Bench(name, run)
suite.BENCHES = {name: "made_up_" + name for name in benches}
sys.exit(suite.main([*sys.argv[2:], "--no-peers", "--out", sys.argv[1]]))
"""


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])} | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_a_part_of_the_program_that_fails_or_hangs_costs_the_others_no_figure(tmp_path):
    program = tmp_path / "kvpool_gpu_bench"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    ran = run(SPEED, KVPOOL_GPU_BENCH=str(program))
    assert ran.returncode == 0, ran.stderr
    report: dict[str, Any] = json.loads(ran.stdout)
    values = {row["what"]: row["value"] for row in report["rows"] if not row["error"]}
    assert values["gather, 16 KiB"] == 95.0
    assert values["discrete to aggregated, 16 KiB"] == 96.0
    assert values["both ways, 64 KiB"] == 97.0
    assert values["launch, 1 strips"] == 3.0
    assert values["swap through a pool, both ways, 64 KiB"] == 90.0
    errors = {row["what"]: row["error"] for row in report["rows"] if row["error"]}
    assert "ended with 1: cudaErrorIllegalAddress: copy kernel" in errors["layouts: what this program has not measured"]
    assert "was not over" in errors["bus: what this program has not measured"]
    assert errors["swap through a pool, 16 KiB"] == "ValueError: no such luck"
    assert all(row["value"] is None and row["met"] is None for row in report["rows"] if row["error"])
    assert any("torch failed" in note for note in report["notes"])


def test_a_bench_that_raises_costs_no_other_and_sets_the_status(tmp_path):
    ran = run(SUITE, str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    assert "broken failed: KeyError" in ran.stdout
    assert "skipped skipped: nothing to see" in ran.stdout
    assert "failed: half: the first" in ran.stdout
    half = json.loads((tmp_path / "half.json").read_text())["rows"]
    assert [(row["what"], row["value"], row["error"]) for row in half] == [
        ("the first", None, "OSError: no such device"), ("the second", 2.0, ""),
    ]  # fmt: skip
    assert json.loads((tmp_path / "good.json").read_text())["rows"][0]["value"] == 1.0
    assert not (tmp_path / "broken.json").exists()


def test_without_a_failure_the_status_is_0(tmp_path):
    assert run(SUITE, str(tmp_path), "good", "skipped").returncode == 0
