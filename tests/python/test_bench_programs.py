"""The C++ programs of the benches are built when a bench runs: here the compiler reads each, and none is run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path for path in (ROOT / "bench").rglob("*.cpp") if path.parent.name != "gpu")  # those make builds


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_of_a_bench_is_valid_against_the_core(program):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    third_party = ROOT / "third_party"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'cpp'}"]
    command += ["-isystem", str(third_party), "-isystem", str(third_party / "ucx"), str(program)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]


def test_the_programs_are_found():
    assert {"descriptors.cpp", "copy_pieces.cpp"} <= {path.name for path in PROGRAMS}
