"""Libraries that stand in for the CUDA driver and for NCCL, for processes that tests start: see tests/cpp/fake_cuda."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "cpp"


def _compiled(name: str, spare: Path, *options: str) -> Path:
    """Compiled once for all workers and all runs: in build/fakes, or in `spare` where that is not writable."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    sources = sorted((FAKES / name).glob("*.cpp"))
    # All files as one: the headers that they share take most of the time.
    whole = "".join(f'#include "{source}"\n' for source in sources)
    command = [compiler, "-std=c++20", "-O0", *options, f"-I{ROOT / 'cpp'}", "-shared", "-fPIC", "-pthread"]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr([command, version]).encode())
    # One may include headers of another, and of the core.
    used = [
        *FAKES.glob("fake_*/*"),
        *FAKES.glob("host_kernels/*"),
        *ROOT.glob("cuda/*"),
        *ROOT.glob("cpp/kvpool/*/*.h"),
    ]
    for file in sorted(path for path in used if path.is_file()):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    folder = ROOT / "build" / "fakes"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError:
        folder = spare
        lock = (folder / f"{name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / f"lib{name}-{digest.hexdigest()[:16]}.so"
        if not library.exists():
            for old in folder.glob(f"lib{name}-*"):
                old.unlink()
            made = library.with_suffix(".new")
            subprocess.run(
                [*command, "-o", str(made), "-xc++", "-", "-ldl"], input=whole.encode(), check=True, timeout=600
            )
            made.rename(library)
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
