"""What errors of a new pool, and of addresses, say to somebody who thinks in layers, heads, tokens and GiB."""

from __future__ import annotations

import numpy as np
import pytest
from kit import refused, small_pool

import kvpool
from kvpool.alloc.refusals import amount, words_of

LAYOUT = kvpool.KVLayout(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
SMALL = kvpool.KVLayout(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=4)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (5 << 20, "5 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1,024 TiB"),
    ],
)
def test_amounts_are_read_easily(count, text):
    assert amount(count) == text


def test_a_layout_in_words():
    assert words_of(LAYOUT) == "80 layers of 8 KV heads x 128, bfloat16, 16 tokens a block"
    assert words_of(SMALL).startswith("2 layers of 1 KV head x 8")
    assert words_of(kvpool.RawLayout(2048)) == "raw blocks of 2 KiB"


def test_too_little_memory_is_told_in_blocks_tokens_and_gib():
    with pytest.raises(kvpool.OutOfMemory) as caught:
        kvpool.Pool(LAYOUT, hbm_blocks=1_000_000)
    error = caught.value
    assert error.needed_bytes == 1_000_000 * LAYOUT.block_bytes
    fit = error.available_bytes // LAYOUT.block_bytes
    assert f"4.77 TiB of {amount(error.available_bytes)}: a block takes 5 MiB (80 layers of 8 KV heads x 128" in str(
        error
    )
    assert f"about {fit:,} blocks fit, {16 * fit:,} tokens" in str(error)
    assert isinstance(error.__cause__, kvpool.OutOfMemory)


def test_tensors_that_do_not_fit_are_described_beside_the_layout():
    with pytest.raises(kvpool.LayoutMismatch) as caught:
        kvpool.Pool(SMALL, hbm=[np.zeros((4, 2, 1, 4, 8), np.float32)])
    assert caught.value.offered_bytes == 256
    assert "2 layers of 1 KV head x 8, float32" in str(caught.value)
    assert "2 tensors of [block, 2, 1, 4, 8]" in str(caught.value)
    assert str(caught.value).endswith("given 1 tensor, the first (4, 2, 1, 4, 8) of float32")
    with pytest.raises(
        kvpool.LayoutMismatch, match=r"raw blocks of 1 KiB; given 1 tensor, the first \(4, 8\) of uint8"
    ):
        kvpool.Pool(kvpool.RawLayout(1024), hbm=[np.zeros((4, 8), np.uint8)])


def test_a_block_that_is_too_large_is_told_in_gib():
    with pytest.raises(kvpool.ArgumentError, match="64,000 GiB"):
        kvpool.KVLayout(layers=2**20, kv_heads=2**10, head_dim=1000)


@pytest.mark.parametrize(
    ("wrong", "right"), [("tcp://10.0.0.1:7000", "tcp:10.0.0.1:7000"), ("unix://@name", "unix:@name")]
)
def test_an_address_that_is_written_as_a_url_is_refused_with_the_right_form(wrong, right):
    with small_pool(secret="a secret") as pool:
        for verb in (pool.peers.listen, pool.peers.connect):
            with refused(pool, kvpool.ArgumentError, f"write {right}, without slashes"):
                verb(wrong)
