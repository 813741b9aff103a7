"""A library that answers for the CUDA driver, for processes that tests start: see tests/cpp/fake_cuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests" / "cpp" / "fake_cuda"
TESTS = ROOT / "tests" / "python"

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver, compiled."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("fake_cuda") / "libfake_cuda.so"
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    subprocess.run(
        [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-pthread", "-o", str(library), *sources],
        check=True, timeout=600,
    )  # fmt: skip
    return library


@pytest.fixture
def on_fake(fake_cuda: Path) -> Script:
    """Runs Python code, after the line `from fake import *`, in a process whose CUDA driver is the fake one."""

    def run(code: str, *, library: str | Path = fake_cuda, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "KVPOOL_CUDA_LIBRARY": str(library),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(TESTS), *filter(None, sys.path)]),
        }
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-W", "error", "-c", "from fake import *\n" + code],
            capture_output=True, text=True, timeout=timeout, env=environment, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done

    return run
