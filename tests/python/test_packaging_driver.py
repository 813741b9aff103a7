"""Kernels that do not match the driver: `kvpool info` says so, and a GPU is used without the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cli import cuda

WITHOUT = {"cuda_kernels": "", "cuda_compiler": ""}
CU12 = {"cuda_kernels": "sm_80 compute_100", "cuda_compiler": "12.9.86"}
CU13 = {"cuda_kernels": "sm_80 compute_100", "cuda_compiler": "13.0.88"}
OLD = "too old for these kernels. Install a driver for CUDA"


@pytest.mark.parametrize(
    ("build", "driver", "runs", "text"),
    [
        (CU13, (13, 1), True, "for CUDA 13.1"),
        (CU12, (13, 0), True, "for CUDA 13.0"),  # a driver runs code of older toolkits
        (CU12, (12, 2), True, "for CUDA 12.2"),  # and of newer ones of its major version
        (CU13, (12, 4), False, f"for CUDA 12.4: {OLD} 13.0 (580 or newer), or a wheel for CUDA 12"),
        (CU13, (12, 0), False, f"for CUDA 12.0: {OLD} 13.0 (580 or newer)"),
        (CU12, (12, 0), False, f"for CUDA 12.0: {OLD} 12.1 (530 or newer)"),
        (WITHOUT, (12, 4), None, "for CUDA 12.4; without kernels, small pieces go by the copy engines"),
    ],
)
def test_info_says_whether_the_kernels_run_on_the_driver(monkeypatch, build, driver, runs, text):
    monkeypatch.setattr(cuda, "_driver_version", lambda library: driver)
    facts = cuda.collect(build)
    assert (facts["error"], facts["kernels_run"]) == (None, runs)
    assert cuda.driver_text(facts, build) == text


@pytest.mark.parametrize("library", ["libkvpool_no_such_driver.so.1", "libc.so.6"])
def test_info_says_why_there_is_no_driver(monkeypatch, library):
    monkeypatch.setenv("KVPOOL_CUDA_LIBRARY", library)
    facts = cuda.collect(CU13)
    assert (facts["driver"], facts["kernels_run"]) == (None, None)
    assert library in cuda.driver_text(facts, CU13)


# The runtime that is linked into the kernels finds a driver of CUDA 12.4, and refuses to work with it.
TOO_OLD = """
from fake import *

cuda.fake_cuda_set(b"version", 12040)
with small_pool(device="cuda:0", layout=small_layout(order="discrete")) as pool:
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4)), range(10, 14))
    pool.swap_out(4)
    with pool.match(prompt(4)) as hit, pool.swap_in(hit.addrs) as held:
        assert stamps.read(held.addrs) == [10, 11, 12, 13]
assert fake_counts("copied") >= 8
"""


def test_kernels_that_are_too_new_for_the_driver_leave_copying_to_it(fake_cuda, tmp_path):
    (tmp_path / "libcuda.so.1").symlink_to(fake_cuda)  # kernels are launched for the machine's driver alone
    tests = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if name != "KVPOOL_CUDA_LIBRARY"} | {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tests / "cuda"), str(tests), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", TOO_OLD], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
