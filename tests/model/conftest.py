"""The examples are scripts, so their folder is put on the path. A tiny model, and pools that are checked at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

if TYPE_CHECKING:
    from llama import Llama, LlamaConfig

    import kvpool

MakePool = Callable[[int, int], "kvpool.Pool"]


@pytest.fixture(scope="session")
def config() -> LlamaConfig:
    torch = pytest.importorskip("torch")
    from llama import LlamaConfig

    torch.set_num_threads(1)  # the matrices are tiny

    return LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, block_tokens=4, tokens_max=256)


@pytest.fixture(scope="session")
def model(config: LlamaConfig) -> Llama:
    from llama import Llama

    return Llama(config, seed=3)


@pytest.fixture
def make_pool(config: LlamaConfig) -> Iterator[MakePool]:
    """Makes pools of (hbm_blocks, dram_blocks). At the end each must add up, with no block active and none pinned."""
    from serving import kv_layout

    import kvpool

    pools: list[kvpool.Pool] = []

    def make(hbm_blocks: int, dram_blocks: int) -> kvpool.Pool:
        pools.append(kvpool.Pool(kv_layout(config), hbm_blocks=hbm_blocks, dram_blocks=dram_blocks, device="cpu"))
        return pools[-1]

    yield make
    for pool in pools:
        pool.audit()
        stats = pool.stats()
        for medium in (stats.hbm, stats.dram):
            assert (medium.active, medium.pinned) == (0, 0)
            assert medium.free + medium.historical == medium.capacity
        pool.close()
