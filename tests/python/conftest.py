"""Libraries that answer for the CUDA driver and for NCCL, for processes that tests start: see tests/cpp/fake_cuda."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parents[1] / "cpp"
CORE = FAKES.parents[1] / "cpp"


def _compiled(name: str, folder: Path, *options: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    library = folder / f"lib{name}.so"
    sources = map(str, sorted((FAKES / name).glob("*.cpp")))
    subprocess.run(
        [compiler, "-std=c++20", "-O0", *options, f"-I{CORE}", "-shared", "-fPIC", "-pthread", "-o", str(library),
         *sources, "-ldl"],
        check=True, timeout=600,
    )  # fmt: skip
    return library


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver, compiled: for KVPOOL_CUDA_LIBRARY."""
    return _compiled("fake_cuda", tmp_path_factory.mktemp("fakes"))


@pytest.fixture(scope="session")
def host_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, compiled for the CPU: for FAKE_CUDA_KERNELS, by which the fake driver finds them."""
    folder = tmp_path_factory.mktemp("fakes")
    return _compiled("host_kernels", folder, "-O2", "-fvisibility=hidden", f"-I{FAKES / 'host_kernels'}")


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NCCL, which works over the fake driver alone: for KVPOOL_NCCL."""
    return _compiled("fake_nccl", tmp_path_factory.mktemp("fakes"))
