"""vLLM's blocks in memory that kvpool allocates."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

import kvpool
from kvpool.engines.vllm.owned import OwnedBlocks


def lies_in_kvpools_memory(tensor: torch.Tensor) -> bool:
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= at < end:
            return "kvpool-hbm" in line
    return False


def test_the_bytes_of_blocks_are_kvpools_and_zero():
    size = (5 << 20) + 12
    with OwnedBlocks() as owned:
        blocks = torch.zeros(size, dtype=torch.int8, device="cpu")
    assert blocks.shape == (size,)
    assert blocks.dtype == torch.int8
    assert not blocks.any()
    assert owned.bytes == size
    assert lies_in_kvpools_memory(blocks)
    assert lies_in_kvpools_memory(blocks[-1:])
    blocks.fill_(3)
    gc.collect()
    assert (blocks == 3).all()


def test_all_else_is_torchs_own():
    with OwnedBlocks() as owned:
        others = [
            torch.zeros(8, 8, dtype=torch.int8), torch.zeros(64, dtype=torch.float32), torch.ones(64, dtype=torch.int8),
            torch.zeros((64,), dtype=torch.int8), torch.empty(64, dtype=torch.int8),
        ]  # fmt: skip
    outside = torch.zeros(64, dtype=torch.int8)
    assert not any(lies_in_kvpools_memory(tensor) for tensor in [*others, outside])
    assert owned.bytes == 0


def test_the_memory_goes_with_the_last_tensor():
    with OwnedBlocks():
        blocks = torch.zeros(1 << 20, dtype=torch.int8)
    view = blocks[10:20]
    del blocks
    gc.collect()
    assert lies_in_kvpools_memory(view)
    del view
    gc.collect()
    assert not re.search("kvpool-hbm", Path("/proc/self/maps").read_text())


def test_more_than_the_machine_has_is_refused_at_once():
    with OwnedBlocks(), pytest.raises(kvpool.OutOfMemory):
        torch.zeros(1 << 44, dtype=torch.int8)
