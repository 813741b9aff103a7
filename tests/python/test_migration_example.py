"""examples/migration, small: requests move, begin and restart over processes with the tokens that they get alone.

The text of `python -m examples.migration` is checked, too: it exits with 1 if one token is wrong.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the example runs a transformer")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "examples.migration",
        "--quick",
        "--requests",
        "12",
        "--blocks",
        "16",
        "--instances",
        "4",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The tokens of every request are those that it gets alone." in done.stdout
    return done.stdout


def test_requests_move_over_processes_with_the_same_tokens(tmp_path):
    said = run("--policy", "mell", "--seed", "3", "--link-tokens", "64", "--out", str(tmp_path))
    assert "MELL" in said
    (one,) = json.loads((tmp_path / "migration.json").read_text())["runs"]
    assert one["policy"] == "mell"
    assert one["instance_seconds"] > 0


def test_kills_and_stops_in_the_middle_of_migrations_change_no_token(tmp_path):
    run("--policy", "mell", "--seed", "2", "--kill", "--stop", "--out", str(tmp_path))
    (one,) = json.loads((tmp_path / "migration.json").read_text())["runs"]
    assert one["hit"] >= 1  # as many migrations as there were


def test_wrong_arguments():
    from examples.migration.__main__ import main

    for wrong in (["--instances", "9"], ["--requests", "0"], ["--blocks", "3"], ["--policy", "x"]):
        with pytest.raises(SystemExit):
            main(wrong)
