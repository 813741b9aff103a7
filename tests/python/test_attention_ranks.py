"""I8: instances keep their tensor parallelism, and the attention of each of their ranks spreads over lenders.

A rank attends for its own heads, over blocks with these heads only. So it borrows from a pool of exactly that layout. A
lender makes such a pool for each rank that borrows, in a space which its own model shares with these guests.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from attention_kit import BLOCK, layout_of, pool_of, query, write_kv

import kvpool
from kvpool import HBM, ParallelConfig

TP2 = ParallelConfig(tp=2)
WHOLE = layout_of(kv_heads=4)
PARTS = [part.layout for part in TP2.slices(WHOLE)]
HEADS = [part.heads for part in TP2.slices(WHOLE)]
GROUP = 2  # query heads for each KV head
LEAF = 1024 // BLOCK
BLOCKS = 2 * LEAF + 2
TOKENS = 2 * 1024 + 20
LINK: dict[str, Any] = {"secret": "s", "lease_s": 60.0, "huge_pages": "never", "attend_threads": 2}
_numbers = itertools.count()


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connected(borrower: kvpool.Pool, lender: kvpool.Pool) -> str:
    """The lender's name. A pool of a space has its model's name only within the space."""
    return borrower.peers.connect(lender.peers.listen(f"unix:@kvpool-ranks-attend-{os.getpid()}-{next(_numbers)}"))


def whole_answers(closing: ExitStack, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and V of all heads as the pages of one pool, and what attention of each layer over them gives there."""
    pool = closing.enter_context(pool_of(WHOLE, hbm=BLOCKS, dram=0))
    addrs = pool.alloc(BLOCKS)
    write_kv(pool, addrs, np.random.default_rng(1), TOKENS)
    pages = pool.tensor().numpy()[kvpool.block_ids(addrs)].copy()
    with pool.sequence(addrs, tokens=TOKENS) as seq:
        layers = [pool.attend(layer, q, [seq]).wait().finish("float32") for layer in range(WHOLE.layers)]
    return pages, np.stack(layers)


def lender_of(closing: ExitStack, own: kvpool.KVLayout, guests: list[kvpool.KVLayout]) -> list[kvpool.Pool]:
    """A pool for each guest, in memory that the lender's own model shares with them."""
    space = closing.enter_context(kvpool.Space(0, "16MiB", layouts=[own, *guests]))
    space.load("own", own, dram_reserve="4MiB")
    return [space.load(f"guest-{n}", layout, **LINK) for n, layout in enumerate(guests)]


def answers_of(pool: kvpool.Pool, seq: Any, q: np.ndarray, where: str) -> np.ndarray:
    return np.stack([pool.attend(n, q, [seq], where=where).wait().finish("float32") for n in range(WHOLE.layers)])


@pytest.mark.parametrize("where", ["there", "here", "auto"])
def test_the_ranks_of_a_tp2_instance_borrow_from_a_lender_of_one_rank(closing: ExitStack, where: str) -> None:
    """The scheduler numbers the blocks. Each worker's engine has written them, and its rank offloads its part."""
    q = query(np.random.default_rng(2), heads=GROUP * WHOLE.kv_heads)
    pages, want = whole_answers(closing, q)
    lent = lender_of(closing, WHOLE, PARTS)
    scheduler = closing.enter_context(
        kvpool.Pool(WHOLE, hbm_blocks=BLOCKS + 3, parallel=TP2, engine_allocates=True, name="tp2", **LINK)
    )
    numbers = [BLOCKS + 2 - i for i in range(BLOCKS)]  # as an engine hands them out: in no order that a run would need
    scheduler.adopt(numbers)
    for n, part in enumerate(PARTS):
        tensors = [np.zeros((BLOCKS + 3, *part.shape[1:]), np.float32) for _ in range(part.layers)]
        memory = closing.enter_context(kvpool.Pool(part, hbm=tensors, engine_allocates=True, name=f"rank-{n}", **LINK))
        closing.enter_context(kvpool.RankArena.join(scheduler.ranks.export(n), memory=memory))
        lender = connected(memory, lent[n])
        heads = slice(HEADS[n].start, HEADS[n].stop)
        for layer, tensor in enumerate(tensors):
            tensor[numbers] = pages[:, layer][:, :, heads]
        mine = slice(heads.start * GROUP, heads.stop * GROUP)
        seq = closing.enter_context(memory.sequence(memory.adopt(numbers), tokens=TOKENS))
        assert np.array_equal(answers_of(memory, seq, q[:, mine], "here"), want[:, :, mine])
        memory.free(seq.offload(2 * LEAF, to=lender))
        for tensor in tensors:
            tensor[numbers[: 2 * LEAF]] = np.nan  # the engine uses these blocks for something else
        assert np.array_equal(answers_of(memory, seq, q[:, mine], where), want[:, :, mine])
    scheduler.ranks.wait(60)


def test_a_borrower_of_one_rank_borrows_from_both_ranks_of_a_tp2_lender(closing: ExitStack) -> None:
    """The lender's ranks keep half of the heads each for their own model, and lend whole blocks."""
    q = query(np.random.default_rng(2), heads=GROUP * WHOLE.kv_heads)
    pages, want = whole_answers(closing, q)
    borrower = closing.enter_context(kvpool.Pool(WHOLE, hbm_blocks=BLOCKS, name="tp1", **LINK))
    lenders = [connected(borrower, lender_of(closing, part, [WHOLE])[0]) for part in PARTS]
    addrs = borrower.alloc(BLOCKS)
    borrower.tensor().numpy()[kvpool.block_ids(addrs)] = pages
    with borrower.sequence(addrs, tokens=TOKENS) as seq:
        for lender in lenders:
            borrower.free(seq.offload(LEAF, to=lender))
        assert len(set(seq.instances)) == 3
        for where in ("there", "here", "auto"):
            assert np.array_equal(answers_of(borrower, seq, q, where), want)
        borrower.free(seq.bring_home(2 * LEAF, medium=HBM))
        assert not seq.instances.any()
        assert np.array_equal(answers_of(borrower, seq, q, "auto"), want)
        addrs = seq.addrs
    borrower.free(addrs)


def test_a_lender_that_ends_takes_the_same_tokens_from_every_rank(closing: ExitStack) -> None:
    lender = ExitStack()
    lent = lender_of(lender, WHOLE, PARTS)
    kept = []
    for n, part in enumerate(PARTS):
        rank = closing.enter_context(kvpool.Pool(part, hbm_blocks=BLOCKS, name=f"rank-{n}", **LINK))
        name = connected(rank, lent[n])
        seq = closing.enter_context(rank.sequence(rank.alloc(BLOCKS), tokens=TOKENS))
        rank.free(seq.offload(LEAF, to=name))
        kept.append((rank, seq))
    lender.close()
    q = query(np.random.default_rng(2), heads=GROUP * 2)
    for rank, seq in kept:
        with pytest.raises(kvpool.PeerLost) as caught:
            rank.attend(0, q, [seq]).wait(60)
        assert caught.value.lost == [(0, [(0, 1024)])]
        assert seq.lost == [(0, 1024)]


def test_a_rank_cannot_borrow_from_a_pool_of_the_whole_layout(closing: ExitStack) -> None:
    """Blocks of the lender's own model have other heads: the ways meet in a typed error, not in wrong bytes."""
    rank = closing.enter_context(kvpool.Pool(PARTS[0], hbm_blocks=BLOCKS, name="rank-0", **LINK))
    lender = closing.enter_context(kvpool.Pool(WHOLE, hbm_blocks=0, dram_blocks=BLOCKS, name="whole", **LINK))
    before = lender.stats().dram.free
    with pytest.raises(kvpool.LayoutMismatch):
        connected(rank, lender)
    assert lender.stats().dram.free == before
