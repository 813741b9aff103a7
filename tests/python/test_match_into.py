"""Pool.match(into=HBM): a hit that is in HBM, in one step."""

from __future__ import annotations

import threading

import pytest
from kit import BLOCK, Stamps, prompt, refused, small_pool, store

import kvpool
from kvpool import DRAM, HBM


def test_a_hit_in_dram_is_brought_to_hbm_and_pinned_there():
    with small_pool() as pool:
        stamps = Stamps(pool)
        stamps.write(store(pool, prompt(4)), range(4))
        assert len(pool.swap_out(3)) == 3
        with pool.match([*prompt(4), *range(500, 500 + BLOCK)], into=HBM) as hit:
            assert hit.tokens == 4 * BLOCK
            assert kvpool.media(hit.addrs).tolist() == [HBM] * 4
            assert stamps.read(hit.addrs) == [0, 1, 2, 3]
            stats = pool.audit()
            assert (stats.hbm.pinned, stats.dram.historical, stats.swapped_in_blocks) == (4, 0, 3)
            assert len(pool.swap_out(4)) == pool.evict(4, HBM) == 0
        assert pool.audit().hbm.pinned == 0


def test_a_hit_in_hbm_is_an_ordinary_hit():
    with small_pool() as pool:
        addrs = store(pool, prompt(2))
        with pool.match(prompt(2), into=HBM) as hit:
            assert hit.addrs.tolist() == addrs.tolist()
            assert pool.stats().swapped_in_blocks == 0
        with pool.match(prompt(3, 7), into=HBM) as hit:
            assert (hit.tokens, hit.addrs.size) == (0, 0)


def test_without_room_for_the_whole_hit_nothing_is_brought_and_nothing_pinned():
    with small_pool() as pool:
        store(pool, prompt(4))
        assert len(pool.swap_out(4)) == 4
        capacity = pool.stats().hbm.capacity
        own = pool.alloc(capacity - 3)
        with pytest.raises(kvpool.OutOfBlocks):
            pool.match(prompt(4), into=HBM)
        assert pool.audit().dram.pinned == 0
        with pool.match(prompt(4)) as hit:
            assert kvpool.media(hit.addrs).tolist() == [DRAM] * 4
        pool.free(own[:1])
        with pool.match(prompt(4), into=HBM) as hit:
            assert hit.tokens == 4 * BLOCK


@pytest.mark.parametrize(
    ("into", "error"),
    [(DRAM, kvpool.ArgumentError), (kvpool.MIXED, kvpool.ArgumentError), (kvpool.DISK, kvpool.Unsupported),
     (True, kvpool.ArgumentTypeError), ("HBM", kvpool.ArgumentTypeError), ([], kvpool.ArgumentTypeError)],
)  # fmt: skip
def test_only_hbm_can_be_matched_into(into, error):
    with small_pool() as pool:
        store(pool, prompt(1))
        with refused(pool, error):
            pool.match(prompt(1), into=into)
        with refused(pool, kvpool.ArgumentError, "stream"):
            pool.match(prompt(1), stream=1)


def test_many_threads_find_prompts_that_others_move():
    """Each hit is whole and in HBM while other threads swap it in and out."""
    with small_pool(audit=False) as pool:
        stamps = Stamps(pool)
        stamps.write(store(pool, prompt(4)), range(4))
        failures: list[BaseException] = []
        stop = threading.Event()

        def move() -> None:
            while not stop.is_set():
                pool.swap_out(4)

        def find() -> None:
            try:
                for _ in range(300):
                    with pool.match(prompt(4), into=HBM) as hit:
                        assert hit.tokens == 4 * BLOCK
                        assert kvpool.media(hit.addrs).tolist() == [HBM] * 4
                        assert stamps.read(hit.addrs) == [0, 1, 2, 3]
            except BaseException as error:
                failures.append(error)

        mover = threading.Thread(target=move)
        finders = [threading.Thread(target=find) for _ in range(3)]
        for thread in (mover, *finders):
            thread.start()
        for thread in finders:
            thread.join()
        stop.set()
        mover.join()
        assert failures == []
        assert pool.audit().hbm.pinned == 0
