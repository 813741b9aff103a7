"""A machine with a driver that refuses what its GPU can do: pools are made, say what they lack, and work."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("memory", ["virtual", "plain"])
def test_peers_connect_by_another_route_if_memory_cannot_be_exported(on_fake, memory):
    """A container may be without the right to hand over descriptors, and a GPU in parts without IPC handles."""
    on_fake(f"""
import logging
notes = []
class Notes(logging.Handler):
    def emit(self, record):
        notes.append(record.getMessage())
logging.getLogger("kvpool.peers").addHandler(Notes())
cuda.fake_cuda_fail(b"cuMemExportToShareableHandle", 800)
cuda.fake_cuda_fail(b"cuIpcGetMemHandle", 800)
from transfer.kit import Child
child = Child()
settings = dict(device_memory={memory!r}, layout=byte_layout(), routes=("cuda_ipc", "sock"))
with small_pool(device="cuda:0", name="here", **settings) as here:
    where = here.peers.listen(address_of("sock"))
    if {memory!r} == "virtual":  # of plain memory it is known for each allocation: those without a handle go by sock
        assert any("cuda_ipc" in note and "800" in note for note in notes), notes
    child(
        "there = small_pool(device='cuda:0', layout=small_layout(dtype='uint8'), routes=('cuda_ipc', 'sock'))\\n"
        "there.peers.connect(where); None\\n"
        "there.fetch('here', theirs).wait(); None", where=where, theirs=here.alloc(2))
    if {memory!r} == "virtual":
        assert child("[list(peer.routes) for peer in there.peers.list()]") == [["sock"]]
    # Into HBM here, which cannot be exported.
    child("sent = there.transfer('here', there.alloc(2), medium=kvpool.HBM); sent.wait(); None")
    assert child("sent.stats.route") == "sock"
child.kill()
""")


def test_a_pool_takes_plain_memory_if_virtual_memory_is_refused(on_fake):
    on_fake("""
for code in (800, 801):
    cuda.fake_cuda_reset()
    cuda.fake_cuda_fail(b"cuMemCreate", code)
    with small_pool(device="cuda:0") as pool:
        assert len(pool.alloc(2)) == 2
        assert fake_counts("cuMemAlloc") == 1
    raises(kvpool.Unsupported, lambda: small_pool(device="cuda:0", device_memory="virtual"), "cuMemCreate")
""")


def test_a_gpu_that_another_process_uses_exclusively_is_reported_as_such(on_fake):
    on_fake("""
cuda.fake_cuda_fail(b"cuDevicePrimaryCtxRetain", 46)
made = lambda: small_pool(device="cuda:0")
error = raises(kvpool.Unsupported, made, "EXCLUSIVE_PROCESS", "CUDA_ERROR_DEVICE_UNAVAILABLE")
assert error.driver_code == 46
cuda.fake_cuda_fail(b"cuDevicePrimaryCtxRetain", 0)
with small_pool(device="cuda:0"):
    pass
""")


@pytest.mark.parametrize("how", ["refused", "off"])
def test_pieces_are_copied_one_by_one_if_batches_are_refused_or_off(on_fake, how):
    on_fake(f"""
if {how!r} == "off":
    os.environ["KVPOOL_CUDA_BATCHES"] = "0"
cuda.fake_cuda_fail(b"cuMemcpyBatchAsync_v2", 1)
with small_pool(device="cuda:0", layout=small_layout(order="discrete")) as pool:
    store(pool, prompt(1))
    assert len(pool.swap_out(1)) == 1  # a piece for each layer, K and V
    assert fake_counts("cuMemcpyBatchAsync_v2") == {0 if how == "off" else 1}
    assert fake_counts("copied") > 1
""")
