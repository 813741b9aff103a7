"""Pools with blocks on disk are killed by SIGKILL while they write them, and the next one opens what is left.

Bugs these tests are there to find: a page whose entry was durable before its content; pages without what precedes them;
a directory that a dead process keeps locked; what was said to be flushed and is not there.
"""

from __future__ import annotations

import os
import random
import time

import forked
from victims import LONG, seed_of

import kvpool

KILLS = 60 if LONG else 5
LAYOUT = kvpool.RawLayout(block_bytes=24 << 10, block_tokens=4)
BLOCKS = 3  # of each prompt

# Writes one prompt after another, each again and again pushed out by others, and says the number of each that is
# flushed.
WRITES = """
import os
import numpy as np
import kvpool

layout = kvpool.RawLayout(block_bytes=24 << 10, block_tokens=4)
with kvpool.Pool(
    layout, dram_blocks=6, disk_blocks=24, disk_path=PATH, disk_admission="always", huge_pages="never",
    check_memory=False,
) as pool:
    view = pool.tensor(kvpool.DRAM).numpy()
    for number in range(FIRST, FIRST + 100000):
        addrs = pool.alloc(3, medium=kvpool.DRAM)
        for position, block in enumerate(kvpool.block_ids(addrs)):
            view[block] = (number + position) % 251
        tokens = np.arange(12, dtype=np.int32) + 100 * number
        pool.insert(tokens, addrs, free_duplicates=True).close()
        if number % 5 == 0:
            pool.delete(tokens)
        pool.flush()
        os.write(1, number.to_bytes(4, "little"))
"""


def tokens_of(number: int) -> list[int]:
    return [100 * number + i for i in range(4 * BLOCKS)]


def killed_after(path: str, first: int, seconds: float) -> list[int]:
    """The numbers that a process has flushed until it was killed."""
    ours, its = os.pipe()
    with open(os.devnull) as nothing:
        code = f"PATH = {path!r}\nFIRST = {first}\n{WRITES}"
        one = forked.start(code, environment=dict(os.environ), files=(nothing.fileno(), its, 2))
    os.close(its)
    try:
        os.read(ours, 4)  # it has begun
        time.sleep(seconds)
        one.kill()
        said = b"".join(iter(lambda: os.read(ours, 1 << 16), b""))
        one.wait(60)
    finally:
        one.close()
        os.close(ours)
    return [first, *(int.from_bytes(said[at : at + 4], "little") for at in range(0, len(said) // 4 * 4, 4))]


def test_what_a_killed_pool_had_flushed_is_found_and_nothing_else_is_served(tmp_path, request):
    dice = random.Random(seed_of(request))
    path, first = str(tmp_path / "kv"), 1
    for _ in range(KILLS):
        flushed = killed_after(path, first, dice.uniform(0.0, 0.2))
        with kvpool.Pool(
            LAYOUT, dram_blocks=6, disk_blocks=24, disk_path=path, huge_pages="never", check_memory=False, audit=True
        ) as pool:
            view = pool.tensor(kvpool.DRAM).numpy()
            for number in range(max(1, flushed[0] - 40), flushed[-1] + 3):
                with pool.match(tokens_of(number), into=kvpool.DRAM) as hit:
                    for position, block in enumerate(kvpool.block_ids(hit.addrs)):
                        assert (view[block] == (number + position) % 251).all(), (number, position)
                    if number in flushed[-6:]:  # of the last eight prompts that fit, no later one has pushed it out
                        assert hit.tokens == (0 if number % 5 == 0 else 4 * BLOCKS), number
            assert pool.audit().disk.lost_blocks == 0
        first = flushed[-1] + 3
