"""DISK as a medium: what is evicted from memory is found there, and comes back."""

from __future__ import annotations

import numpy as np
import pytest
from disk_kit import disk_pool, media_of, store_stamped, to_disk, use
from kit import BLOCK, Stamps, cached_tokens, prompt, refused, store

import kvpool
from kvpool import DISK, DRAM, HBM


def test_what_was_used_twice_goes_to_disk_instead_of_being_dropped(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        store_stamped(pool, prompt(3), 0)
        use(pool, prompt(3))
        pool.flush()
        pool.free(pool.alloc(8, medium=DRAM))
        assert media_of(pool, prompt(3)) == [DISK] * 3
        stats = pool.audit()
        assert stats.evicted_blocks == 0
        assert (stats.disk.used, stats.disk.copies, stats.disk.moved_blocks) == (3, 0, 3)


def test_what_was_used_once_is_dropped(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        store_stamped(pool, prompt(3), 0)
        assert pool.flush() == 0
        pool.free(pool.alloc(8, medium=DRAM))
        assert cached_tokens(pool, prompt(3)) == 0
        assert pool.audit().disk.used == 0


def test_the_setting_always_writes_what_was_used_once(tmp_path):
    with disk_pool(tmp_path / "kv", disk_admission="always") as pool:
        store_stamped(pool, prompt(3), 0)
        pool.flush()
        pool.free(pool.alloc(8, medium=DRAM))
        assert media_of(pool, prompt(3)) == [DISK] * 3


def test_blocks_come_back_from_disk_with_their_content(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(4), 10)
        stamps = Stamps(pool)
        with pool.match(prompt(4), into=DRAM) as hit:
            assert kvpool.media(hit.addrs).tolist() == [DRAM] * 4
            assert stamps.read(hit.addrs) == [10, 11, 12, 13]
            stats = pool.audit()
            assert (stats.disk.brought_blocks, stats.disk.used, stats.disk.copies) == (4, 4, 4)
        # The copies stay: the next eviction costs no write.
        written = pool.stats().disk.written_blocks
        pool.evict(8)
        assert media_of(pool, prompt(4)) == [DISK] * 4
        pool.flush(everything=True)
        assert pool.audit().disk.written_blocks == written


def test_a_swap_in_brings_a_part_of_a_hit_and_keeps_the_order(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(4), 10)
        with pool.match(prompt(4)) as hit:
            assert kvpool.media(hit.addrs).tolist() == [DISK] * 4
            with pool.swap_in(hit.addrs[1:3], medium=DRAM) as part:
                assert Stamps(pool).read(part.addrs) == [11, 12]
            with pool.swap_in(hit.addrs, medium=DRAM) as all_of_it:
                assert Stamps(pool).read(all_of_it.addrs) == [10, 11, 12, 13]
            assert pool.audit().disk.brought_blocks == 4


def test_a_swap_in_by_a_thread_of_the_pool_gives_the_same(tmp_path):
    with disk_pool(tmp_path / "kv", hbm_blocks=4) as pool:
        to_disk(pool, prompt(3), 20)
        with pool.match(prompt(3)) as hit:
            with pool.swap_in(hit.addrs, medium=DRAM, wait=False).wait(30).result as brought:
                assert Stamps(pool).read(brought.addrs) == [20, 21, 22]
            with pool.swap_in(hit.addrs, wait=False).wait(30).result as brought:
                assert kvpool.media(brought.addrs).tolist() == [HBM] * 3
                assert Stamps(pool).read(brought.addrs) == [20, 21, 22]
        assert pool.audit().dram.pinned == 0


def test_a_hit_on_disk_is_matched_into_hbm(tmp_path):
    with disk_pool(tmp_path / "kv", hbm_blocks=4) as pool:
        to_disk(pool, prompt(3), 20)
        with pool.match(prompt(3), into=HBM) as hit:
            assert kvpool.media(hit.addrs).tolist() == [HBM] * 3
            assert Stamps(pool).read(hit.addrs) == [20, 21, 22]
        # From HBM to DRAM, and from there to the slots that it had.
        pool.swap_out(3)
        pool.evict(8)
        assert media_of(pool, prompt(3)) == [DISK] * 3
        assert pool.audit().disk.written_blocks == 3


def test_two_holders_of_one_hit_bring_it_once(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        to_disk(pool, prompt(3), 0)
        with pool.match(prompt(3)) as one, pool.match(prompt(3)) as other:
            with pool.swap_in(one.addrs, medium=DRAM) as first, pool.swap_in(other.addrs, medium=DRAM) as second:
                assert first.addrs.tolist() == second.addrs.tolist()
        assert pool.audit().disk.brought_blocks == 3


def test_the_coldest_pages_leave_a_full_disk(tmp_path):
    with disk_pool(tmp_path / "kv", disk_blocks=6) as pool:
        for name in range(3):
            to_disk(pool, prompt(3, name), 10 * name)
        assert [cached_tokens(pool, prompt(3, name)) // BLOCK for name in range(3)] == [0, 3, 3]
        with pool.match(prompt(3, 2), into=DRAM) as hit:
            assert Stamps(pool).read(hit.addrs) == [20, 21, 22]
        assert pool.audit().disk.used == 6


def test_a_prompt_goes_to_disk_from_its_first_block_on(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        store_stamped(pool, prompt(2), 0)
        use(pool, prompt(2))
        store_stamped(pool, prompt(2, 1), 10)
        longer = np.concatenate([prompt(2), prompt(2, 5)])
        with pool.match(prompt(2)) as hit:
            more = pool.alloc(2, medium=DRAM)
            Stamps(pool).write(more, [2, 3])
            with pool.insert(longer, [*hit.addrs, *more]):
                pass
        pool.flush()
        pool.evict(8)
        assert media_of(pool, longer) == [DISK] * 2, "the pages behind were used once"
        assert cached_tokens(pool, prompt(2, 1)) == 0


def test_delete_evict_and_forget_know_disk(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        for name in range(3):
            to_disk(pool, prompt(2, name), 0)
        assert pool.delete(prompt(2, 0)) == 2
        assert pool.audit().disk.used == 4
        assert pool.evict(1, DISK) == 1
        with pool.match(prompt(2, 2)) as hit:
            assert pool.forget(hit.addrs[:1]) == 2
            assert cached_tokens(pool, prompt(2, 2)) == 0
            pool.audit()
        assert pool.audit().disk.used == 1
        assert pool.evict(10, DISK) == 1
        assert pool.audit().disk.free == 32


def test_events_tell_of_moves_to_disk(tmp_path):
    with disk_pool(tmp_path / "kv") as pool:
        events = pool.subscribe()
        to_disk(pool, prompt(2), 0)
        moved = [event for event in events.drain() if isinstance(event, kvpool.MovedEvent)]
        assert [kvpool.media(event.addrs).tolist() for event in moved] == [[DISK] * 2]


def test_nothing_but_swaps_reads_blocks_on_disk(tmp_path):
    with disk_pool(tmp_path / "kv", hbm_blocks=4) as pool:
        to_disk(pool, prompt(2), 0)
        with pool.match(prompt(2)) as hit:
            into = pool.alloc(2, medium=HBM)
            with refused(pool, kvpool.Unsupported, "DISK", position=0):
                pool.sequence(hit.addrs)
            with refused(pool, kvpool.Unsupported, "DISK"):
                pool.alloc(1, medium=DISK)
            with refused(pool, kvpool.Unsupported, "DISK", position=0):
                pool.swap_in(hit.addrs, into=into)
            with refused(pool, kvpool.ArgumentError):
                pool.tensor(DISK)
            with refused(pool, kvpool.StateError):
                pool.free(hit.addrs)
            pool.free(into)


def test_a_pool_without_a_disk_refuses_its_verbs():
    with kvpool.Pool(kvpool.RawLayout(64), dram_blocks=2, huge_pages="never") as pool:
        for call in (pool.flush, lambda: pool.evict(1, DISK), lambda: pool.swap_in([], medium=DRAM)):
            with refused(pool, kvpool.Unsupported, "DISK"):
                call()
        assert pool.stats().disk is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"disk_blocks": 4}, kvpool.ArgumentError),
        ({"disk_path": "x"}, kvpool.ArgumentError),
        ({"disk_blocks": -1, "disk_path": "x"}, kvpool.ArgumentError),
        ({"disk_blocks": 4, "disk_path": "x", "dram_blocks": 0, "hbm_blocks": 4}, kvpool.ArgumentError),
        ({"disk_blocks": 4.0, "disk_path": "x"}, kvpool.ArgumentTypeError),
        ({"disk_blocks": 4, "disk_path": 7}, kvpool.ArgumentTypeError),
        ({"disk_blocks": 4, "disk_path": "x", "disk_admission": "twice"}, kvpool.ArgumentError),
    ],
)
def test_wrong_arguments_make_no_pool_and_no_folder(tmp_path, monkeypatch, arguments, error):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        kvpool.Pool(kvpool.RawLayout(64), **{"dram_blocks": 4, "huge_pages": "never"} | arguments)
    assert not list(tmp_path.iterdir())


def test_memory_in_ranks_has_no_disk(tmp_path):
    with pytest.raises(kvpool.Unsupported):
        kvpool.Pool(
            kvpool.KVLayout(layers=2, kv_heads=2, head_dim=8), dram_blocks=4, disk_blocks=4, disk_path=tmp_path / "kv",
            parallel=kvpool.ParallelConfig(tp=2),
        )  # fmt: skip
    assert not (tmp_path / "kv").exists()


def test_content_stays_right_while_pages_come_and_go(tmp_path):
    """Random calls; every block that a match brings has the stamp that was stored."""
    random = np.random.default_rng(7)
    with disk_pool(tmp_path / "kv", disk_blocks=24, dram_blocks=10, hbm_blocks=6) as pool:
        stamps = Stamps(pool)
        for step in range(300):
            name = int(random.integers(6))
            tokens = prompt(int(random.integers(1, 5)), name)
            match int(random.integers(7)):
                case 0 | 1:
                    blocks = len(tokens) // BLOCK
                    addrs = pool.alloc(blocks, medium=[HBM, DRAM][step % 2])
                    stamps.write(addrs, range(100 * name, 100 * name + blocks))
                    with pool.insert(tokens, addrs, free_duplicates=True):
                        pass
                case 2 | 3:
                    with pool.match(tokens, into=DRAM if step % 2 else HBM) as hit:
                        expected = list(range(100 * name, 100 * name + hit.tokens // BLOCK))
                        assert stamps.read(hit.addrs) == expected
                case 4:
                    pool.flush(everything=step % 2 == 0)
                case 5:
                    pool.evict(int(random.integers(1, 6)), [HBM, DRAM, DISK][step % 3])
                case 6:
                    pool.delete(tokens, descendants=True)
        assert pool.audit().disk.brought_blocks > 0
        store(pool, prompt(2, 9), medium=DRAM, evict=True)
