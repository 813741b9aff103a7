"""Which store a tier has: one for itself, or one that engines share; and options that give none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tier_kit import BLOCK_BYTES, Offloading, key, keys

import kvpool
from kvpool.engines.vllm.tier_store import close_store

PRIMARY = 4  # blocks


@pytest.fixture
def shared() -> Iterator[dict[str, Any]]:
    yield {"store": "shared", "dram_blocks": 16, "model": "tiny, FLASH_ATTN"}
    close_store("shared")


def test_engines_of_a_process_share_a_store_and_it_outlives_them(shared: dict[str, Any]) -> None:
    first, second = Offloading(PRIMARY, shared), Offloading(PRIMARY, shared)
    first.store(keys(0, 3))
    assert second.found(keys(0, 4)) == [True, True, True, False]
    first.close()
    second.store(keys(10, 3))
    second.close()
    third = Offloading(8, shared)
    assert third.found([*keys(0, 3), *keys(10, 3)]) == [True] * 6
    assert close_store("shared")
    assert not close_store("shared")
    third.store(keys(20, 3))  # as if its memory were lost: the primary tier serves
    assert third.found([*keys(20, 3), key(30)]) == [True] * 3 + [False]
    third.close()
    fourth = Offloading(PRIMARY, shared)
    assert fourth.found(keys(0, 3)) == [False] * 3
    fourth.close()


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        ({}, {"model": "other"}),
        ({"model": "tiny, TRITON_ATTN"}, {}),
        ({}, {"kv_cache_layout": "LBHNC"}),
        ({}, {"world_size": 2}),  # of the same bytes together: each worker has the half of the heads
        ({}, {"canonical_layout": True}),
    ],
)
def test_engines_whose_blocks_differ_share_the_memory_and_no_block(
    shared: dict[str, Any], option: dict[str, Any], fields: dict[str, Any]
) -> None:
    first, second = Offloading(PRIMARY, shared), Offloading(PRIMARY, shared | option, **fields)
    first.store(keys(0, 3))
    assert second.found(keys(0, 3)) == [False] * 3
    first.close()
    second.close()


def test_canonical_blocks_are_those_of_any_number_of_workers(shared: dict[str, Any]) -> None:
    first, second = (Offloading(PRIMARY, shared, canonical_layout=True, world_size=number) for number in (1, 2))
    first.store(keys(0, 3))
    assert second.found(keys(0, 3)) == [True] * 3
    first.close()
    second.close()


def test_a_store_whose_blocks_cannot_be_told_apart_is_refused(shared: dict[str, Any]) -> None:
    with pytest.raises(kvpool.ArgumentError, match="how its cache is laid out"):
        Offloading(PRIMARY, shared, kv_cache_layout=None)
    del shared["model"]
    with pytest.raises(kvpool.ArgumentError, match="needs the option model"):
        Offloading(PRIMARY, shared)
    with pytest.raises(kvpool.ArgumentTypeError, match="model must be"):
        Offloading(PRIMARY, shared | {"model": 7})
    assert not close_store("shared")


def test_a_store_of_another_size_is_refused(shared: dict[str, Any]) -> None:
    first = Offloading(PRIMARY, shared)
    with pytest.raises(kvpool.LayoutMismatch, match="4096 bytes, and this engine's primary tier of 8192"):
        Offloading(PRIMARY, shared, block_bytes=2 * BLOCK_BYTES)
    with pytest.raises(kvpool.ArgumentError, match="16 blocks, and 17 are asked for"):
        Offloading(PRIMARY, shared | {"dram_blocks": 17})
    first.close()


@pytest.mark.parametrize(
    ("tier", "error", "says"),
    [
        ({"dram_gb": 1}, kvpool.ArgumentError, "dram_gib"),
        ({"dram_gib": 1, "dram_blocks": 1}, kvpool.ArgumentError, "not both"),
        ({"dram_gib": 1e-7}, kvpool.ArgumentError, "4096"),
        ({"dram_gib": float("nan")}, kvpool.ArgumentError, "above 0"),
        ({"dram_gib": "4"}, kvpool.ArgumentTypeError, "number"),
        ({"dram_blocks": True}, kvpool.ArgumentTypeError, "number"),
        ({"dram_blocks": 0}, kvpool.ArgumentError, "above 0"),
        ({"store": 7}, kvpool.ArgumentTypeError, "name"),
        ({"store": ""}, kvpool.ArgumentTypeError, "name"),
    ],
)
def test_wrong_options_are_typed_errors(tier: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Offloading(PRIMARY, tier)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(kvpool.OutOfMemory):
        Offloading(PRIMARY, {"dram_blocks": 1 << 23}, block_bytes=1 << 20)
