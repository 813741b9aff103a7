"""torch beside kvpool on a GPU: one memory, and streams that both know."""

from __future__ import annotations

import pytest
from kit import content, prompt, small_layout, small_pool

import kvpool
from kvpool import HBM

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch is not installed for CUDA", allow_module_level=True)

LONG_CYCLES = 200_000_000  # of the GPU's clock: a tenth of a second, which no copy of these takes


@pytest.fixture
def pool():
    with small_pool(8, 8, small_layout(dtype="bfloat16"), device="cuda:0") as pool:
        yield pool


def test_a_view_is_a_torch_tensor_of_the_same_memory(pool):
    tensor = torch.from_dlpack(pool.tensor(HBM))
    assert (tensor.dtype, tensor.device, tuple(tensor.shape)) == (
        torch.bfloat16, torch.device("cuda:0"), pool.tensor(HBM).shape,
    )  # fmt: skip
    ids = kvpool.block_ids(pool.alloc(3)).tolist()
    tensor[ids] = 3.0
    torch.cuda.synchronize()
    assert (content(pool, HBM)[ids] == 0x4040).all()  # 3.0 in bfloat16, which NumPy does not have


@pytest.mark.parametrize("named", [True, False])
def test_swap_follows_the_work_of_a_torch_stream(pool, named):
    tensor = torch.from_dlpack(pool.tensor(HBM))
    stream = torch.cuda.Stream()
    addrs = pool.alloc(4)
    ids = kvpool.block_ids(addrs).tolist()
    tensor[ids] = 1.0
    torch.cuda.synchronize()
    pool.insert(prompt(4), addrs).close()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        for block in ids:
            tensor[block].fill_(2.0)
    pool.swap_out(4, **({"stream": stream} if named else {}))
    tensor[ids] = 5.0
    with pool.match(prompt(4)) as hit, pool.swap_in(hit.addrs, stream=torch.cuda.current_stream()) as held:
        assert (tensor[kvpool.block_ids(held.addrs).tolist()] == 2.0).all().item()


def test_the_cuda_array_interface_gives_a_torch_tensor_of_the_same_memory(pool):
    """It names no stream to wait for; torch orders its work by its own streams."""
    tensor = torch.as_tensor(pool.tensor(HBM), device="cuda:0")  # bfloat16 has no name there: 16-bit integers
    shared = torch.from_dlpack(pool.tensor(HBM))
    assert tensor.data_ptr() == shared.data_ptr()
    assert tensor.stride() == shared.stride()
    ids = kvpool.block_ids(pool.alloc(2)).tolist()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES // 10)
        shared[ids] = 3.0
        seen = tensor[ids].to(torch.int32)
    stream.synchronize()
    assert (seen == 0x4040).all().item()
