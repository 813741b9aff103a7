"""Pools of several processes share a folder, and some are killed by SIGKILL while they write to it.

Bugs these tests are there to find: half a block that is served; a block that was said to be saved and is not there;
what a dead writer leaves behind for good; a trim that takes the file of a live writer.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator

import forked
import pytest
from victims import repeats, seed_of

import kvpool
from kvpool.storage import DirectoryStore, Storage

KILLS = repeats(12, long=300)
LAYOUT = kvpool.RawLayout(block_bytes=192 << 10, block_tokens=4)
BLOCKS = 3  # of each prompt

COMMON = """
import os, sys
import numpy as np
import kvpool
from kvpool.storage import DirectoryStore, Storage

def tokens_of(number):
    return np.arange(12, dtype=np.int32) + 100 * number

def stamped(pool, number):
    addrs = pool.alloc(3, medium=kvpool.DRAM)
    view = pool.tensor(kvpool.DRAM).numpy()
    for position, block in enumerate(kvpool.block_ids(addrs)):
        view[block] = (number + position) % 251
    pool.insert(tokens_of(number), addrs, free_duplicates=True).close()

layout = kvpool.RawLayout(block_bytes=192 << 10, block_tokens=4)
pool = kvpool.Pool(layout, dram_blocks=6, huge_pages="never", check_memory=False)
"""

# Saves one prompt after another, and says the number of each that is saved.
SAVES = """
storage = Storage(pool, DirectoryStore(PATH), model="m", write="never")
for number in range(FIRST, LAST):
    stamped(pool, number)
    done = storage.save(tokens_of(number)).wait(60)
    assert done.saved + done.present == 3, done
    os.write(1, number.to_bytes(4, "little"))
"""

# Is killed with one half of a block's bytes written.
HALF = """
write = os.pwritev
def half(descriptor, buffers, at):
    write(descriptor, [memoryview(buffers[-1])[: 96 << 10]], at)
    os.kill(os.getpid(), 9)
os.pwritev = half
"""


@contextlib.contextmanager
def process(*parts: str, **values: object) -> Iterator[tuple[forked.ForkedProcess, int]]:
    """A process that runs this code; its standard output, to read."""
    named = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    ours, its = os.pipe()
    with open(os.devnull) as nothing:
        one = forked.start(
            COMMON + named + "".join(parts), environment=dict(os.environ), files=(nothing.fileno(), its, 2)
        )
    os.close(its)
    try:
        yield one, ours
    finally:
        one.kill()
        one.wait(60)
        one.close()
        os.close(ours)


def numbers_said(descriptor: int) -> list[int]:
    """All that a process has said by its end."""
    said = b""
    while piece := os.read(descriptor, 1 << 16):
        said += piece
    return [int.from_bytes(said[at : at + 4], "little") for at in range(0, len(said) // 4 * 4, 4)]


def found(where: DirectoryStore, number: int) -> int:
    """How many blocks of a prompt a new pool finds; all of them have the right content."""
    with kvpool.Pool(LAYOUT, dram_blocks=3, huge_pages="never", check_memory=False) as pool:
        with Storage(pool, where, model="m", write="never") as storage:
            tokens = [100 * number + token for token in range(12)]
            storage.load(tokens, budget_s=60).wait()
            with pool.match(tokens) as hit:
                view = pool.tensor(kvpool.DRAM).numpy()
                for position, block in enumerate(kvpool.block_ids(hit.addrs)):
                    assert (view[block] == (number + position) % 251).all()
                return len(hit.addrs)


def grown_old(where: DirectoryStore) -> None:
    """The files that writers have left: ten minutes must have passed."""
    for folder, _, names in os.walk(where.path):
        for name in names:
            if name.endswith(".new"):
                os.utime(os.path.join(folder, name), (time.time() - 1000,) * 2)


def leftovers(where: DirectoryStore) -> int:
    return sum(name.endswith(".new") for _, _, names in os.walk(where.path) for name in names)


def test_a_prompt_that_one_process_computed_is_found_by_another(tmp_path):
    path = str(tmp_path / "s")
    with process(SAVES, PATH=path, FIRST=0, LAST=5) as (one, output):
        assert numbers_said(output) == [0, 1, 2, 3, 4]
        assert one.wait(60) == 0
    with DirectoryStore(path) as where:
        assert [found(where, number) for number in range(6)] == [3, 3, 3, 3, 3, 0]


def test_a_writer_that_is_killed_in_the_middle_of_a_block_leaves_one_file_that_the_next_trim_removes(tmp_path):
    path = str(tmp_path / "s")
    with DirectoryStore(path) as where:
        with process(HALF, SAVES, PATH=path, FIRST=0, LAST=1) as (one, output):
            assert numbers_said(output) == []
            assert one.wait(60) == -9
        assert leftovers(where) == 1
        assert found(where, 0) == 0
        assert where.trim().leftovers == 0
        grown_old(where)
        assert where.trim().leftovers == 1
        assert leftovers(where) == 0
        with process(SAVES, PATH=path, FIRST=0, LAST=1) as (_, output):
            assert numbers_said(output) == [0]
        assert found(where, 0) == 3


def test_writers_that_are_killed_at_any_moment_lose_nothing_that_was_saved(tmp_path, request):
    chance = random.Random(seed_of(request))
    path, first, saved = str(tmp_path / "s"), 0, 0
    with DirectoryStore(path) as where:
        for _ in range(KILLS):
            with process(SAVES, PATH=path, FIRST=first, LAST=first + 10_000) as (one, output):
                os.read(output, 4)  # its first
                time.sleep(chance.uniform(0, 0.05))
                one.kill()
                said = [first, *numbers_said(output)]
            assert said == list(range(first, first + len(said)))
            assert leftovers(where) <= 1
            grown_old(where)
            assert where.trim().leftovers <= 1
            assert leftovers(where) == 0
            assert [found(where, number) for number in said] == [BLOCKS] * len(said)
            found(where, said[-1] + 1)  # some of it, perhaps; and what there is is right
            where.trim(size_max=1)
            saved += len(said)
            first = said[-1] + 1
        stats = where.stats()
        assert (stats.torn, stats.rotten, stats.foreign) == (0, 0, 0)
    assert saved > KILLS


@pytest.mark.parametrize("size_max", [None, 20 * LAYOUT.block_bytes])
def test_processes_write_the_same_blocks_while_others_read_and_trim(tmp_path, size_max):
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(DirectoryStore(path, size_max=size_max))
        writers = [stack.enter_context(process(SAVES, PATH=path, FIRST=0, LAST=20)) for _ in range(2)]
        while any(one.poll() is None for one, _ in writers):
            for number in (0, 7, 19):
                found(where, number)
            where.trim()
        for one, output in writers:
            assert numbers_said(output) == list(range(20))
            assert one.wait(60) == 0
        stats = where.stats()
        assert (stats.torn, stats.rotten, stats.foreign) == (0, 0, 0)
        if size_max is None:
            assert [found(where, number) for number in range(20)] == [BLOCKS] * 20
