"""The extension with kernels in it: imports and works without CUDA, and hides its CUDA runtime."""

import ctypes
import subprocess
import sys

import pytest

from kvpool import _core, cli

# Imports and uses the library; then says which libraries of CUDA are in the process.
USE = """
import sys
import numpy as np
import kvpool

pool = kvpool.Pool(kvpool.RawLayout(block_bytes=4096), hbm_blocks=4, dram_blocks=4)
addrs = pool.alloc(2)
pool.insert(np.arange(32, dtype=np.int32), addrs).close()
assert len(pool.swap_out(2)) == 2
maps = open("/proc/self/maps").read()
print(sorted({line.split("/")[-1] for line in maps.splitlines() if "cuda" in line.split("/")[-1] or "nccl" in line}))
"""


def test_nothing_of_cuda_is_loaded_by_using_the_library():
    run = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("symbol", ["cudaLaunchKernel", "cudaMalloc", "cudaGetDevice", "__cudaRegisterFatBinary"])
def test_the_linked_runtime_is_not_seen_from_outside(symbol):
    with pytest.raises(AttributeError):
        getattr(ctypes.CDLL(_core.__file__), symbol)


def test_info_says_which_gpus_the_kernels_are_for(capsys):
    build = _core.build_info()
    assert bool(build["cuda_kernels"]) == bool(build["cuda_compiler"])
    assert cli.main(["info"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("CUDA kernels"))
    if build["cuda_kernels"]:
        assert "sm_" in line
        assert build["cuda_compiler"] in line
    else:
        assert "none" in line
