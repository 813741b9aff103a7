"""A GPU without enough memory: a typed error with the numbers, and nothing is left of the failed pool."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("kind", ["virtual", "plain"])
@pytest.mark.parametrize("checked", [True, False])
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers_and_harms_no_other(on_fake, kind, checked):
    """Before the driver is asked, and by the driver itself, as when another process was quicker."""
    on_fake(f"""
MIB = 1 << 20
layout = kvpool.RawLayout(block_bytes=MIB, block_tokens=4)
options = {{"device": "cuda:0", "device_memory": {kind!r}, "check_memory": {checked}, "huge_pages": "never"}}
with kvpool.Pool(layout, 100, 2, **options) as other:
    addrs = store(other, prompt(3))
    kv = content(other, HBM)
    kv[kvpool.block_ids(addrs)] = 7
    taken, used = left(), fake_counts("bytes")
    for blocks, dram in ((158, 0), (158, 2), (300, 2), (1 << 20, 0)):
        error = raises(kvpool.OutOfMemory, lambda: kvpool.Pool(layout, blocks, dram, **options), "GPU 0")
        assert isinstance(error, MemoryError)
        assert error.needed_bytes == blocks * MIB, error.fields
        assert (error.available_bytes, error.total_bytes, error.device) == (156 * MIB, 256 * MIB, 0), error.fields
        assert (left(), fake_counts("bytes")) == (taken, used)
    # All free memory can be allocated, and is free again afterwards; another GPU has its own.
    for _ in range(2):
        with kvpool.Pool(layout, 156, 2, **options) as whole:
            assert whole.stats().device_bytes == 156 * MIB
            raises(kvpool.OutOfMemory, lambda: kvpool.Pool(layout, 1, **options))
            kvpool.Pool(layout, 256, **options | {{"device": "cuda:1"}}).close()
    assert (left(), fake_counts("bytes")) == (taken, used)
    assert len(other.swap_out(2)) == 2
    assert (kv[kvpool.block_ids(addrs)] == 7).all()
del kv
assert left() == "", left()
""")


def test_running_out_of_memory_in_any_call_while_a_pool_is_made_leaves_nothing(on_fake):
    """Out of GPU memory, or of memory for locking the host's."""
    on_fake("""
cuda.fake_cuda_failed.restype = ctypes.c_bool
descriptors = len(os.listdir("/proc/self/fd"))
failures, n = 0, 0
while True:
    n += 1
    cuda.fake_cuda_fail_nth(n, 2)
    try:
        pool = small_pool(device="cuda:0")
    except kvpool.OutOfMemory as error:
        failures += 1
        assert error.driver_code == 2, n
    else:
        cuda.fake_cuda_fail_nth(0, 0)
        pool.close()
    pool = error = None
    assert left() == "", (n, left())
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1, n  # whatever a first pool makes for all
    if not cuda.fake_cuda_failed() and n > 10:
        break
assert failures > 10
with small_pool(device="cuda:0") as pool:  # and the next one is well
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(2)), [1, 2])
    pool.swap_out(2)
    with pool.match(prompt(2)) as hit:
        assert stamps.read(hit.addrs) == [1, 2]
""")


def test_a_transfer_that_finds_no_memory_fails_alone(on_fake):
    """Buffers between a GPU and a socket are taken when they are needed."""
    on_fake("""
here, there = pair_on_gpu("sock")
with here, there:
    addrs = here.alloc(3)
    Stamps(here).write(addrs, [4, 5, 6])
    before = here.audit(), there.audit()
    cuda.fake_cuda_fail(b"cuMemHostRegister", 2)
    raises(kvpool.OutOfMemory, lambda: here.transfer("there", addrs).wait(30))
    wait_for(lambda: (here.audit(), there.audit()) == before)
    cuda.fake_cuda_fail(b"cuMemHostRegister", 0)
    done = here.transfer("there", addrs).wait(30)
    assert Stamps(there).read(done.addrs) == [4, 5, 6]
    there.inbox.receive(60).close()
""")
