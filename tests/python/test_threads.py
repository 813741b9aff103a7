"""Eight threads against one pool. Every block has a stamp that no other block has; a wrong byte is a failure.

A block of a cached prompt reads (what names its prefix, its own stamp), over and over. So a thread that matches sees
whether the block is that page's, whether it is whole, and whether it stays as it is while it is pinned. A block that is
active reads its owner's stamp until the owner lets go of it.

By default for some seconds; KVPOOL_LONG=1 runs 10^6 operations a thread, whatever it takes.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from kit import BLOCK, LONG, prompt, small_pool

import kvpool
from kvpool import DRAM, HBM, MIXED

THREADS = 8
OPERATIONS = 1_000_000  # a thread
SECONDS_MAX = None if LONG else 3
WORDS = 64  # of 8 bytes, in a block


@pytest.fixture(autouse=True)
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], count: int = THREADS) -> None:
    """Runs work(0), work(1), ... in threads; raises the first error of any of them."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if LONG else 100)
        assert not thread.is_alive(), "a thread does not end"
    if errors:
        raise errors[0]


class Worker:
    """One thread: its own blocks, its own dice."""

    stamps = itertools.count(1)

    def __init__(self, pool: kvpool.Pool, number: int, seed: int) -> None:
        self.pool = pool
        self.dice = random.Random(seed * 1000 + number)
        self.words = {medium: pool.tensor(medium).numpy().view(np.uint64) for medium in (HBM, DRAM)}
        self.own: dict[int, int] = {}  # address of an active block -> stamp
        self.done: Counter[str] = Counter()

    def tokens(self) -> np.ndarray:
        """One of a few hundred prompts that share prefixes."""
        branch = [self.dice.randrange(3) for _ in range(self.dice.randint(1, 5))]
        return np.repeat(np.array(branch, np.int32), BLOCK)

    def block(self, addr: int) -> np.ndarray:
        place = kvpool.decode_address(addr)
        return self.words[place.medium][place.block]

    # ---- stamps

    def fill(self, addrs: np.ndarray) -> None:
        for addr in addrs.tolist():
            self.own[addr] = next(Worker.stamps)
            self.block(addr)[:] = self.own[addr]

    def check_own(self, addr: int) -> int:
        stamp = self.own.pop(addr)
        assert (self.block(addr) == stamp).all(), "somebody wrote to an active block"
        return stamp

    def name_pages(self, addrs: list[int], tokens: np.ndarray, first: int) -> None:
        for at, addr in enumerate(addrs):
            stamp = self.check_own(addr)
            words = self.block(addr)
            words[0::2] = zlib.crc32(tokens[: (first + at + 1) * BLOCK].tobytes())
            words[1::2] = stamp

    def read_pages(self, addrs: np.ndarray, tokens: np.ndarray) -> list[int]:
        """The stamps of a prompt's blocks, which must be its own and whole."""
        stamps = []
        for at, addr in enumerate(addrs.tolist()):
            words = self.block(addr)
            assert (words[0::2] == zlib.crc32(tokens[: (at + 1) * BLOCK].tobytes())).all(), "another prompt's block"
            assert (words[1::2] == words[1]).all(), "a block of two halves"
            stamps.append(int(words[1]))
        return stamps

    # ---- operations

    def alloc_and_free(self) -> None:
        addrs = self.pool.alloc(self.dice.randint(1, 6), medium=self.dice.choice((HBM, DRAM, MIXED)))
        self.fill(addrs)
        if self.dice.random() < 0.7 or len(self.own) > 4:
            self.free_own()

    def free_own(self) -> None:
        addrs = list(self.own)
        for addr in addrs:
            self.check_own(addr)
        self.pool.free(addrs)

    def serve(self) -> None:
        """What an engine does: match, compute what is missing, insert, decode on it."""
        tokens = self.tokens()
        with self.pool.match(tokens) as hit:
            before = self.read_pages(hit.addrs, tokens)
            cached = len(hit.addrs)
            fresh = self.pool.alloc(len(tokens) // BLOCK - cached, medium=self.dice.choice((HBM, MIXED)))
            self.fill(fresh)
            self.name_pages(fresh.tolist(), tokens, cached)
            with self.pool.insert(tokens, np.r_[hit.addrs, fresh], free_duplicates=True) as held:
                assert len(self.read_pages(held.addrs, tokens)) == len(tokens) // BLOCK
                assert self.read_pages(hit.addrs, tokens) == before, "a block changed while it was pinned"

    def read(self) -> None:
        tokens = self.tokens()
        with self.pool.match(tokens) as hit:
            before = self.read_pages(hit.addrs, tokens)
            time.sleep(0)
            assert self.read_pages(hit.addrs, tokens) == before, "a block changed while it was pinned"
            self.done["hit"] += bool(before)

    def read_in_hbm(self) -> None:
        tokens = self.tokens()
        with self.pool.match(tokens) as hit:
            before = self.read_pages(hit.addrs, tokens)
            with self.pool.swap_in(hit.addrs) as held:
                assert (kvpool.media(held.addrs) == HBM).all()
                assert self.read_pages(held.addrs, tokens) == before, "swap_in brought other bytes"
                assert self.read_pages(hit.addrs, tokens) == before, "a block changed while it was pinned"
                self.done["swapped in"] += int((kvpool.media(hit.addrs) == DRAM).sum())

    def swap_out(self) -> None:
        self.done["swapped out"] += len(self.pool.swap_out(self.dice.randint(1, 6)))

    def evict(self) -> None:
        self.done["evicted"] += self.pool.evict(self.dice.randint(1, 3), medium=self.dice.choice((HBM, DRAM, MIXED)))

    def delete(self) -> None:
        self.done["deleted"] += self.pool.delete(self.tokens(), descendants=self.dice.random() < 0.3)

    def look(self) -> None:
        self.pool.explain_match(self.tokens())
        stats = self.pool.stats()
        for tier in (stats.hbm, stats.dram):
            assert tier.free + tier.active + tier.historical + tier.reserved == tier.capacity

    def run(self, operations: int, until: float | None) -> None:
        verbs = [self.serve] * 6 + [self.read] * 5 + [self.read_in_hbm] * 3 + [self.alloc_and_free] * 2
        verbs += [self.swap_out] * 2 + [self.evict, self.delete, self.look]
        for _ in range(operations):
            verb = self.dice.choice(verbs)
            try:
                verb()
            except (kvpool.OutOfBlocks, kvpool.StaleAddress, kvpool.StateError) as error:
                # Others hold too much; another thread swapped the prompt in; what is to be deleted is pinned.
                self.done[type(error).__name__] += 1
            self.done[verb.__name__] += 1
            if until is not None and time.monotonic() > until:
                break
        self.free_own()


@pytest.mark.timeout(0 if LONG else 120)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_no_thread_reads_a_wrong_byte(policy):
    seed = int(os.environ.get("KVPOOL_SEED") or random.randrange(1 << 30))
    print(f"KVPOOL_SEED={seed}")  # replays the dice; the threads' order is their own
    layout = kvpool.RawLayout(block_bytes=8 * WORDS, block_tokens=BLOCK)
    with small_pool(48, 40, layout, policy=policy, audit=False) as pool:
        workers = [Worker(pool, number, seed) for number in range(THREADS)]
        until = None if SECONDS_MAX is None else time.monotonic() + SECONDS_MAX
        in_threads(lambda number: workers[number].run(OPERATIONS, until))
        done = sum((worker.done for worker in workers), Counter())
        stats = pool.audit()
        for tier in (stats.hbm, stats.dram):
            assert (tier.active, tier.reserved, tier.pinned) == (0, 0, 0)
            assert tier.free + tier.historical == tier.capacity
        assert stats.allocated_blocks == stats.freed_blocks + stats.inserted_blocks
        reader = Worker(pool, THREADS, seed)
        for depth in range(1, 6):
            for branch in itertools.product(range(3), repeat=depth):
                tokens = np.repeat(np.array(branch, np.int32), BLOCK)
                with pool.match(tokens) as hit:
                    reader.read_pages(hit.addrs, tokens)
        pool.evict(100, medium=MIXED)
        pool.evict(100, medium=MIXED)
        stats = pool.audit()
        assert (stats.hbm.free, stats.dram.free, stats.index_blocks) == (48, 40, 0)
        # It was a test of something.
        for what in ("hit", "swapped in", "swapped out", "evicted", "deleted"):
            assert done[what] > 0, (what, done)


@pytest.mark.timeout(0 if LONG else 120)
def test_large_copies_race_with_matches():
    """Blocks large enough that a swap lets the others in: a match keeps a block that is just being moved."""
    words = 1 << 15  # 256 KiB
    layout = kvpool.RawLayout(block_bytes=8 * words, block_tokens=BLOCK)
    with small_pool(12, 12, layout, audit=False, copy_threads=2) as pool:
        views = {medium: pool.tensor(medium).numpy().view(np.uint64) for medium in (HBM, DRAM)}
        for name in range(4):
            addrs = pool.alloc(3)
            for at, block in enumerate(kvpool.block_ids(addrs).tolist()):
                views[HBM][block] = 10 * name + at
            pool.insert(prompt(3, name), addrs).close()
        until = time.monotonic() + (60 if LONG else 3)

        def read(number: int) -> None:
            dice = random.Random(number)
            while time.monotonic() < until:
                name = dice.randrange(4)
                with pool.match(prompt(3, name)) as hit:
                    for at, addr in enumerate(hit.addrs.tolist()):
                        place = kvpool.decode_address(addr)
                        assert (views[place.medium][place.block][:: words // 16] == 10 * name + at).all()
                    if number % 2:
                        try:
                            pool.swap_in(hit.addrs).close()
                        except (kvpool.OutOfBlocks, kvpool.StaleAddress):
                            pass

        def swap(number: int) -> None:
            while time.monotonic() < until:
                pool.swap_out(1 + number % 4)

        in_threads(lambda number: read(number) if number < 4 else swap(number), 6)
        stats = pool.audit()
        assert stats.index_blocks == 12
        assert stats.swapped_out_blocks > 0
        assert stats.swapped_in_blocks > 0


def test_a_full_pool_gives_each_block_to_one_thread():
    """More is asked for than there is: all or nothing, and no block is given out twice."""
    with small_pool(32, 16, kvpool.RawLayout(64, BLOCK), audit=False) as pool:
        owner = np.zeros((2, 32), np.int64)
        refusals = [0] * THREADS

        def work(number: int) -> None:
            dice = random.Random(number)
            for _ in range(20_000 if LONG else 1_500):
                try:
                    addrs = pool.alloc(dice.randint(1, 16), medium=dice.choice((HBM, DRAM, MIXED)), evict=False)
                except kvpool.OutOfBlocks as error:
                    assert error.requested > error.free  # noqa: PT017
                    refusals[number] += 1
                    continue
                at = (kvpool.media(addrs).astype(int) - 1, kvpool.block_ids(addrs))
                assert (owner[at] == 0).all()
                owner[at] = number + 1
                time.sleep(0)
                assert (owner[at] == number + 1).all()
                owner[at] = 0
                pool.free(addrs)

        in_threads(work)
        assert sum(refusals) > 0
        stats = pool.audit()
        assert (stats.hbm.free, stats.dram.free) == (32, 16)


def test_closing_a_pool_in_use_ends_the_calls_of_its_users():
    for _ in range(50 if LONG else 10):
        pool = small_pool(32, 32, audit=False)
        ended: list[int] = []  # by which thread: to count them up, threads would have to take turns
        started = threading.Barrier(THREADS + 1)

        def work(number: int, pool: kvpool.Pool = pool, ended: list[int] = ended, started=started) -> None:
            started.wait()
            name = number % 4
            try:
                while True:
                    try:
                        pool.insert(prompt(4, name), pool.alloc(4), free_duplicates=True).close()
                        with pool.match(prompt(4, name)) as hit, pool.swap_in(hit.addrs):
                            pool.swap_out(3)
                    except (kvpool.OutOfBlocks, kvpool.StaleAddress):
                        pass
            except kvpool.ClosedError:
                ended.append(number)

        def close(pool: kvpool.Pool = pool, started=started) -> None:
            started.wait()
            time.sleep(0.02)
            pool.close()

        in_threads(lambda number, work=work, close=close: work(number) if number < THREADS else close(), THREADS + 1)
        assert sorted(ended) == list(range(THREADS))


def test_an_index_alone_is_used_by_many_threads():
    index = kvpool.PromptIndex(1)
    stream = index.subscribe(1 << 40)

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(50_000 if LONG else 2_000):
            tokens = [dice.randrange(4) for _ in range(dice.randint(1, 6))]
            # A value says which page it stands for, so a match can tell whether it is the right one.
            values = [zlib.crc32(bytes(tokens[: at + 1])) for at in range(len(tokens))]
            with index.match(tokens) as hit:
                assert hit.addrs.tolist() == values[: hit.tokens]
            if dice.random() < 0.5:
                with index.insert(tokens, values) as held:
                    assert held.addrs.tolist() == values
            if dice.random() < 0.3:
                index.evict(dice.randint(1, 5))

    in_threads(work)
    index.audit()
    stats = index.stats()
    assert stats["evictable"] == stats["blocks"]
    where = set()
    for event in stream:
        pages = [tuple(event.tokens[: end + 1].tolist()) for end in range(event.first_block, len(event.tokens))]
        if isinstance(event, kvpool.StoredEvent):
            assert not where & set(pages)
            where |= set(pages)
        else:
            assert where >= set(pages)
            where -= set(pages)
    assert stream.lost == 0
    assert len(where) == len(index)


def test_a_reader_of_events_keeps_up_with_writers():
    with small_pool(24, 24, audit=False) as pool, pool.subscribe() as stream:
        stop = threading.Event()
        sequences: list[int] = []

        def drain() -> None:
            while not stop.is_set():
                sequences.extend(event.sequence for event in stream)
            sequences.extend(event.sequence for event in stream)

        reader = threading.Thread(target=drain)
        reader.start()

        def write(number: int) -> None:
            for step in range(300):
                try:
                    pool.insert(prompt(2, number * 10 + step % 5), pool.alloc(2), free_duplicates=True).close()
                except kvpool.OutOfBlocks:
                    pass

        in_threads(write, 4)
        stop.set()
        reader.join(60)
        assert stream.lost == 0
        assert sequences == list(range(1, len(sequences) + 1))
