"""Scripts in processes with the fake CUDA driver: see tests/cpp/fake_cuda."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from kit import DEVICE

Script = Callable[..., subprocess.CompletedProcess[str]]


def run_script(code: str, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    prelude = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom fake import *\n"
    done = forked.run(prelude + code, timeout=timeout, environment=os.environ | variables)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done


@pytest.fixture
def on_fake(fake_cuda: Path) -> Script:
    """Runs Python code, after the line `from fake import *`, in a process with the fake CUDA driver."""

    def run(code: str, *, library: str | Path = fake_cuda, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return run_script(code, timeout, KVPOOL_CUDA_LIBRARY=str(library))

    return run


LAUNCHES = """
def launches(seen=[0]):
    now = fake_counts("cuLaunchKernel")
    since, seen[0] = now - seen[0], now
    return since
"""


@pytest.fixture
def on_kernels(fake_cuda: Path, host_kernels: Path) -> Script:
    """As on_fake, and the driver has kernels (tests/cpp/host_kernels). In the code launches() is how many kernels were
    launched since it was last asked."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return run_script(LAUNCHES + code, 120, KVPOOL_CUDA_LIBRARY=str(fake_cuda), FAKE_CUDA_KERNELS=str(host_kernels))

    return run


@pytest.fixture
def on_gpu(request: pytest.FixtureRequest) -> Script:
    """The same, for tests that ask nothing of the fake: on a real GPU where KVPOOL_TEST_DEVICE names one."""
    if DEVICE == "cpu":
        return request.getfixturevalue("on_fake")
    return lambda code: run_script(code, 120)
