"""Attention over sequences of which a part lies with a peer, with values that make every result easy to know.

All keys are 0, so all tokens weigh the same; all values of a sequence are one number, so that is every element of the
result, whichever blocks take part. A block that was reused, not written yet, or is of another layer changes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from deeds import call

import kvpool

__all__ = ["attend", "attend_and_come_back", "attend_for_ever", "attend_to_shown", "borrowed", "fill", "half_lent"]

TIMEOUT = 20.0


def fill(pool: kvpool.Pool, addrs: Any, value: float) -> None:
    """Keys 0 and values `value` in all layers; the layer's number is added."""
    kv = pool.tensor(kvpool.HBM).numpy()  # [block, layer, k/v, ...]
    for block in kvpool.block_ids(addrs):
        kv[block, :, 0] = 0.0
        for layer in range(kv.shape[1]):
            kv[block, layer, 1] = value + layer


def borrowed(pool: kvpool.Pool, peer: str, blocks: int, value: float) -> Any:
    """So many blocks of a peer, filled; it has all of the content."""
    own = pool.alloc(blocks)
    try:
        fill(pool, own, value)
        lent = pool.alloc(blocks, instance=peer)
        pool.transfer(peer, own, to=lent, timeout=TIMEOUT).wait()
    finally:
        pool.free(own)
    return lent


def half_lent(pool: kvpool.Pool, peer: str, blocks: int, value: float) -> Any:
    """A sequence of so many blocks of a peer, and as many of this pool behind them."""
    lent = borrowed(pool, peer, blocks, value)
    own = pool.alloc(blocks)
    fill(pool, own, value)
    return pool.sequence(np.concatenate([lent, own]))


def attend(pool: kvpool.Pool, seq: Any, value: float, dice: random.Random, where: Any = "auto") -> list[str]:
    """Attention of a random layer and some queries; what is wrong with the result."""
    layer, rows = dice.randrange(4), dice.choice([1, 1, 3, 16])
    q = np.full((rows, dice.choice([4, 8]), 64), dice.random(), np.float32)
    got = pool.attend(layer, q, [seq], query_tokens=[rows], where=where, timeout=TIMEOUT).wait().finish("float32")
    if (got == value + layer).all():
        return []
    return [f"layer {layer}: {value + layer} in all elements, and {np.unique(got)[:4]} are there"]


def attend_for_ever(
    pool: kvpool.Pool, seq: Any, value: float, seed: float, wrong: list[str], done: Any = None, where: Any = "auto"
) -> None:
    """Attends until the peer is lost, which it raises."""
    dice = random.Random(seed)
    while True:
        try:
            wrong += attend(pool, seq, value, dice, where)
        except kvpool.Busy:
            time.sleep(0.001)
        if done is not None:
            done.append(1)


def attend_and_come_back(
    pool: kvpool.Pool, address: str, tell: Callable[[str], None], blocks: int, seed: int, where: Any = "auto"
) -> None:
    """Borrows, and attends for ever; connects again when the peer is lost. Tells that it is back, and wrong results."""
    dice = random.Random(seed)
    value = 100.0
    while True:
        value += 1.0
        mine: Any = []
        try:
            peer = call(pool, address)
            seq = half_lent(pool, peer, blocks, value)
            mine = seq.addrs[blocks:]
            tell("back")
            while True:
                for text in attend(pool, seq, value, dice, where):
                    tell(text)
        except (kvpool.PeerLost, kvpool.StaleAddress, kvpool.OutOfBlocks, kvpool.Busy, kvpool.DeadlineExceeded):
            if len(mine):
                seq.close()
                pool.free(mine)
            time.sleep(0.002)


def attend_to_shown(
    pool: kvpool.Pool, tell: Callable[[str], None], shown: Any, value: float, seed: int, where: Any = "auto"
) -> None:
    """Attends to blocks that a peer has and keeps, until it is lost. Tells of the first result, and of wrong ones."""
    own = pool.alloc(len(shown))
    fill(pool, own, value)
    dice = random.Random(seed)
    with pool.sequence(np.concatenate([np.array(shown, np.uint64), own])) as seq:
        began = False
        while True:
            try:
                for text in attend(pool, seq, value, dice, where):
                    tell(text)
            except (kvpool.PeerLost, kvpool.StaleAddress) as error:
                tell(type(error).__name__)
                break
            if not began:
                tell("attends")
                began = True
    pool.free(own)
