"""A GPU that is really lost: in a separate process a kernel traps, which ends the context with all its memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_memory import driver
from lost_verbs import VERBS

CUDA_TESTS = Path(__file__).resolve().parents[1] / "python" / "cuda"

# The driver compiles it. The fake has no kernels, and only records the loss.
LOSE = '''
PTX = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry lose()
{
    trap;
}
\\0"""

def lose_gpu():
    if is_fake():
        cuda.fake_cuda_lose(0, 719)
        return
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"lose")
    ends = ctypes.c_void_p(new_stream())
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, ends, None, None)
    assert cuda.cuStreamSynchronize(ends) != 0, "the kernel has not ended the context"
'''

SCRIPT = """
from fake import *
from gpu_memory import is_fake

there = small_pool(name="there", lease_s=10.0, routes=("sock",))  # on no GPU: it lives on
pool = small_pool(device="cuda:0", lease_s=10.0, routes=("sock",))
assert pool.peers.connect(there.peers.listen(address_of("sock"))) == "there"
"""

CHECKS = """
lose_gpu()
first = raises(kvpool.DeviceLost, verbs["swap_out"])
assert first.driver_code, first
silent = []
for name, verb in verbs.items():
    try:
        verb()
    except kvpool.DeviceLost as error:
        assert error.driver_code == first.driver_code, name
    else:
        silent.append(name)
assert silent == []
assert pool.stats().hbm.capacity == pool.audit().hbm.capacity
opened.transfer.cancel()
assert opened.transfer.exception(60) is not None
hit.close()
theirs = there.alloc(2)
raises(kvpool.PeerLost, lambda: there.transfer(pool.peers.name, theirs).wait(30))
there.free(theirs)
pool.close()
raises(kvpool.ClosedError, verbs["alloc"])
wait_for(lambda: there.peers.list() == [], 30)
wait_for(lambda: there.audit().hbm.free == there.audit().hbm.capacity, 30)
raises(kvpool.DeviceLost, lambda: small_pool(device="cuda:0"))  # the process has no other context there
there.close()
print("all told")
"""


@pytest.fixture(autouse=True)
def _a_gpu() -> None:
    try:
        count = ctypes.c_int()
        found = driver().cuInit(0) == 0 and driver().cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError as error:
        pytest.skip(f"no CUDA driver: {error}")
    if not found:
        pytest.skip("no CUDA GPU")


def run(code: str, timeout: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(CUDA_TESTS), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


def test_every_verb_says_that_the_gpu_is_lost_and_close_works_and_other_processes_have_the_gpu_as_before():
    lost = run(SCRIPT + LOSE + VERBS + CHECKS, 150)
    assert (lost.returncode, lost.stdout.splitlines()[-1:]) == (0, ["all told"]), lost.stdout + lost.stderr
    other = run(
        "from fake import *\nwith small_pool(device='cuda:0') as pool:\n    store(pool, prompt(2))\n"
        "    assert len(pool.swap_out(2)) == 2\n",
        100,
    )
    assert other.returncode == 0, other.stderr
