"""The tests of the local API, unchanged, with the device tier on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# What looks at HBM through NumPy is not for a GPU, nor is what measures memory of the machine.
FILES = ["test_swap.py", "test_prompt_cache.py", "test_alloc.py", "test_events.py", "test_state_machine.py"]


@pytest.mark.parametrize("file", FILES)
def test_the_local_suite_passes_on_a_gpu(fake_cuda, file):
    environment = {name: value for name, value in os.environ.items() if name != "KVPOOL_LONG"} | {  # hours, on the CPU
        "KVPOOL_CUDA_LIBRARY": str(fake_cuda),
        "KVPOOL_TEST_DEVICE": "cuda:0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / file)],
        cwd=TESTS.parents[1], env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
