"""The example of logical instances does what it says, with a process for each rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "logical_instances.py"


@pytest.mark.parametrize(("prefill", "decode"), [("2x1", "1x2"), ("1x1", "2x1")])
def test_a_prompt_is_sent_to_an_instance_with_other_ranks(prefill: str, decode: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--prefill", prefill, "--decode", decode, "--layers", "4"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert "prefill -> decode: 8 blocks" in run.stdout
    assert "128 of 128 tokens cached; every rank has its part: True" in run.stdout
