"""Pool, planner, table and kernel together: the kernels are compiled for the CPU and run in the fake driver's streams
(tests/cpp/host_kernels), where every address that they touch must be mapped or registered for that GPU.

What is tested elsewhere with the fake's copies in their place is run once more here, as far as it meets a kernel.
"""

from __future__ import annotations

import pytest
from gpu_suites import run_on_gpu
from kit import LONG

# Files, and their tests that move bytes by kernels, as pytest's -k; KVPOOL_LONG runs all of them.
SUITES = {
    "test_swap.py": "",
    "transfer/test_layouts.py": "go_to_a_peer or differently_meet",
    "cuda/test_streams.py": "swap_out_copies or layer",
}


@pytest.mark.parametrize("file", SUITES)
def test_a_suite_passes_with_kernels(fake_cuda, fake_nccl, host_kernels, file):
    outcome = run_on_gpu(
        file, timeout=280, only="" if LONG else SUITES[file], KVPOOL_LONG="", KVPOOL_CUDA_LIBRARY=str(fake_cuda),
        KVPOOL_NCCL=str(fake_nccl), FAKE_CUDA_KERNELS=str(host_kernels),
    )  # fmt: skip
    outcome.check(file, nccl=True, all_of_it=False)


@pytest.mark.parametrize(
    ("file", "only"),
    [
        ("test_swap.py", "every_bit"),
        ("cuda/test_streams.py", "swap_out_copies"),
    ],
)
def test_a_suite_fails_when_the_kernels_write_wrong_bytes(fake_cuda, host_kernels, file, only):
    outcome = run_on_gpu(
        file, timeout=280, only=only, KVPOOL_LONG="", KVPOOL_CUDA_LIBRARY=str(fake_cuda),
        FAKE_CUDA_KERNELS=str(host_kernels), HOST_KERNELS_BREAK="1", PYTEST_ADDOPTS="-x --hypothesis-seed=0",
    )  # fmt: skip
    assert outcome.code == 1, outcome.output
    assert outcome.failures, outcome.output
    assert all("assert" in failure for failure in outcome.failures), outcome.failures  # and no other exception


SWAP = """
pool = small_pool(8, 8, small_layout(order={order!r}, dtype="uint8"), device="cuda:0")
stamps = Stamps(pool)
stamps.write(store(pool, prompt(4)), range(10, 14))
launches()
pool.swap_out(4, stream=new_stream())
assert launches() == 1  # one for all blocks
with pool.match(prompt(4)) as hit:
    assert stamps.read(hit.addrs) == [10, 11, 12, 13]
    with pool.swap_in(hit.addrs, stream=0) as held:
        assert launches() == 1
        assert stamps.read(held.addrs) == [10, 11, 12, 13]
assert fake_counts("pageable") == 0
pool.close()
del stamps
assert left() == "contexts=1 streams=1", left()  # of the stream above
"""


@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_a_swap_is_one_launch_each_way(on_kernels, order):
    on_kernels(SWAP.format(order=order))


def test_a_kernel_writes_into_a_peers_gpu(on_kernels):
    """Out of discrete blocks, into aggregated ones of another GPU, and back at that pool's word."""
    on_kernels("""
settings = dict(routes=("cuda_ipc",), lease_s=10.0)
here = small_pool(8, 8, small_layout(order="discrete"), device="cuda:0", **settings)
there = small_pool(8, 8, small_layout(order="aggregated"), device="cuda:1", name="there", **settings)
here.peers.connect(there.peers.listen(address_of("x")))
addrs = here.alloc(3)
Stamps(here).write(addrs, [4, 5, 6])
launches()
done = here.transfer("there", addrs, timeout=30).wait(60)
assert launches() > 0
assert Stamps(there).read(done.addrs) == [4, 5, 6]
there.inbox.receive(30).close()
theirs = there.alloc(2)
Stamps(there).write(theirs, [7, 8])
launches()
fetched = here.fetch("there", theirs, timeout=30).wait(60)
assert launches() > 0
assert Stamps(here).read(fetched.addrs) == [7, 8]
assert fake_counts("pageable") == 0
here.close()
there.close()
""")


def test_a_kernel_that_meets_memory_that_is_not_registered_loses_the_gpu(on_kernels):
    on_kernels("""
pool = small_pool(8, 8, small_layout(dtype="uint8"), device="cuda:0")
store(pool, prompt(4))
new_stream()  # so that a context is current
call("cuMemHostUnregister", ctypes.c_void_p(content(pool, DRAM).__array_interface__["data"][0]))
assert raises(kvpool.DeviceLost, lambda: pool.swap_out(4), "(700)").driver_code == 700
""")
