"""Engines whose pages hold K and V of a token side by side: moved and cut as such, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transfer.kit import address_of, prompt

import kvpool
from kvpool import KVLayout, ParallelConfig, Pool, RankArena

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 4, 4, 4, 8, 6
SPLIT = KVLayout(LAYERS, HEADS, DIM, "float16", TOKENS)
FUSED = KVLayout(LAYERS, HEADS, DIM, "float16", TOKENS, pages="fused")
RAW = kvpool.RawLayout(FUSED.block_bytes, TOKENS)
OPTIONS: dict[str, Any] = {"huge_pages": "never", "check_memory": False}
TP2 = ParallelConfig(tp=2)


def pages(seed: int) -> list[np.ndarray]:
    """[block, head, token, 2 * dim], a tensor a layer: no two elements of a seed are the same."""
    count = BLOCKS * HEADS * TOKENS * 2 * DIM
    numbers = np.random.default_rng(seed).permutation(1 << 16)[: LAYERS * count].astype(np.uint16)
    return [part.view(np.float16).reshape(BLOCKS, HEADS, TOKENS, 2 * DIM) for part in np.split(numbers, LAYERS)]


def empty() -> list[np.ndarray]:
    return [np.zeros((BLOCKS, HEADS, TOKENS, 2 * DIM), np.float16) for _ in range(LAYERS)]


def heads_of(rank: int, tensors: list[np.ndarray]) -> list[np.ndarray]:
    half = HEADS // 2
    return [np.ascontiguousarray(tensor[:, rank * half : (rank + 1) * half]) for tensor in tensors]


def same(a: list[np.ndarray], a_blocks: Any, b: list[np.ndarray], b_blocks: Any) -> bool:
    return all(x[a_blocks].tobytes() == y[b_blocks].tobytes() for x, y in zip(a, b, strict=True))


@contextlib.contextmanager
def two_ranks(layout: KVLayout, tensors: list[np.ndarray]) -> Iterator[Pool]:
    with contextlib.ExitStack() as opened:
        pool = opened.enter_context(Pool(layout, BLOCKS, parallel=TP2, name="ranks", **OPTIONS))
        for rank in range(2):
            ticket = pool.ranks.export(rank)
            opened.enter_context(RankArena.join(ticket, hbm=heads_of(rank, tensors), **OPTIONS))
        pool.ranks.wait(60)
        yield pool


def test_pages_of_k_beside_v_that_are_declared_as_split_are_refused_by_the_receiver() -> None:
    with pytest.raises(kvpool.LayoutMismatch, match='dims="HND", pages="fused"'):
        Pool(SPLIT, hbm=empty(), **OPTIONS)
    with pytest.raises(kvpool.LayoutMismatch, match='dims="HND", pages="fused"'), two_ranks(SPLIT, pages(1)):
        pass


def test_two_ranks_send_pages_of_k_beside_v_to_one() -> None:
    content, arrived = pages(1), empty()
    with two_ranks(FUSED, content) as sender, Pool(FUSED, hbm=arrived, name="one", **OPTIONS) as receiver:
        sender.peers.connect(receiver.peers.listen(address_of("sock-unix")))
        addrs = sender.alloc(BLOCKS)
        tokens = prompt(BLOCKS, block_tokens=TOKENS)
        sender.transfer_with_insert("one", tokens, addrs).wait(60)
        with receiver.match(tokens) as hit:
            assert len(hit.addrs) == BLOCKS
            assert same(arrived, kvpool.block_ids(hit.addrs), content, kvpool.block_ids(addrs))


def test_one_sends_pages_of_k_beside_v_to_two_ranks_and_gets_them_back() -> None:
    content, back = pages(2), empty()
    with two_ranks(FUSED, empty()) as ranks, Pool(FUSED, hbm=content, name="one", **OPTIONS) as one:
        one.peers.connect(ranks.peers.listen(address_of("sock-unix")))
        addrs = one.alloc(BLOCKS)
        sent = one.transfer("ranks", addrs, private=b"x")
        sent.wait(60)
        with ranks.inbox.receive(timeout=60) as item, Pool(FUSED, hbm=back, name="back", **OPTIONS) as third:
            ranks.peers.connect(third.peers.listen(address_of("sock-unix")))
            mine = third.fetch("ranks", item.addrs).wait(60).addrs
            assert same(back, kvpool.block_ids(mine), content, kvpool.block_ids(addrs))


def packed(tensors: list[np.ndarray]) -> list[np.ndarray]:
    """[block, layer, head, token, 2 * dim]: a block is one run of bytes."""
    return [np.stack(tensors, axis=1)]


@pytest.mark.parametrize("layout", [FUSED, RAW], ids=["fused", "raw"])
def test_pools_of_the_same_pages_move_them_whole(layout: Any) -> None:
    content, arrived = packed(pages(3)), packed(empty())
    with (
        Pool(layout, hbm=content, name="a", **OPTIONS) as a,
        Pool(layout, hbm=arrived, dram_blocks=BLOCKS, name="b", **OPTIONS) as b,
    ):
        a.peers.connect(b.peers.listen(address_of("sock-unix")))
        addrs = a.alloc(BLOCKS)
        tokens = prompt(BLOCKS, block_tokens=TOKENS)
        a.transfer_with_insert("b", tokens, addrs).wait(60)
        b.swap_out(BLOCKS)
        for tensor in arrived:
            tensor[:] = 0
        with b.match(tokens) as hit, b.swap_in(hit.addrs) as held:
            assert same(arrived, kvpool.block_ids(held.addrs), content, kvpool.block_ids(addrs))


def test_raw_pages_are_not_shared_among_ranks() -> None:
    with two_ranks(FUSED, pages(4)) as ranks, Pool(RAW, hbm=packed(empty()), name="one", **OPTIONS) as one:
        with pytest.raises(kvpool.LayoutMismatch, match="raw blocks of 2048 bytes in 1 piece"):
            one.peers.connect(ranks.peers.listen(address_of("sock-unix")))
        with pytest.raises(kvpool.LayoutMismatch, match="raw blocks of 2048 bytes in 1 piece"):
            ranks.peers.connect(one.peers.listen(address_of("sock-unix")))
