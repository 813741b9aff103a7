"""Faults that a review found; each test failed before the fix."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from kit import run_script, small_pool

import kvpool


class Fresh:
    """A sequence that makes each item when it is asked for."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> np.ndarray:
        if at >= 4:
            raise IndexError(at)
        return np.arange(at * 100, at * 100 + 64, dtype=np.int32)


@pytest.mark.parametrize("prompts", [np.arange(64, dtype=np.int32).reshape(4, 16), Fresh()])
def test_a_batch_may_be_any_sequence_even_one_that_makes_its_items(prompts):
    with small_pool() as pool:
        for _ in range(50):
            for match in pool.batch.match(prompts):
                match.close()
    index = kvpool.PromptIndex(4)
    assert [match.tokens for match in index.batch.match(prompts)] == [0] * 4


def test_a_bad_prompt_in_a_batch_of_matches_counts_nothing():
    with small_pool() as pool:
        with pytest.raises(kvpool.ArgumentTypeError):
            pool.batch.match([[1, 2, 3, 4], "no tokens"])
        assert pool.stats().match_calls == 0


def test_an_instance_index_reads_its_arguments_before_it_locks():
    run_script(
        """
import sys, threading
sys.setswitchinterval(1e-6)
index = kvpool.InstanceIndex(4)
class Again:
    def __index__(self):
        return index.blocks(1)
index.insert(range(8) and list(range(8)), 1, Again())
def wrong():
    for _ in range(3000):
        try:
            index.insert([1, 2, 3, 4], 1, now=1.5)
        except kvpool.ArgumentTypeError:
            pass
def right():
    for i in range(3000):
        index.insert([i, 2, 3, 4], 1, now=i)
threads = [threading.Thread(target=work, daemon=True) for work in (wrong, right)]
for thread in threads: thread.start()
for thread in threads: thread.join(30)
assert not any(thread.is_alive() for thread in threads), "deadlock"
"""
    )


def test_swap_in_reads_no_array_that_another_thread_writes():
    layout = kvpool.RawLayout(block_bytes=1 << 20, block_tokens=4)
    tokens = np.arange(4 * 64, dtype=np.int32)
    with kvpool.Pool(layout, hbm_blocks=64, dram_blocks=64, check_memory=False) as pool:
        pool.insert(tokens, pool.alloc(64)).close()
        for _ in range(10):
            pool.swap_out(64)
            with pool.match(tokens) as hit:
                addrs = hit.addrs.copy()
            stop = threading.Event()

            def scribble(addrs: np.ndarray = addrs, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    addrs[:] = 2**64 - 1

            with pool.match(tokens) as hit:
                addrs[:] = hit.addrs
                thread = threading.Thread(target=scribble)
                swapping = threading.Thread(target=lambda addrs=addrs: _swap(pool, addrs))
                swapping.start()
                thread.start()
                swapping.join()
                stop.set()
                thread.join()
            pool.audit()


def _swap(pool: kvpool.Pool, addrs: np.ndarray) -> None:
    try:
        pool.swap_in(addrs).close()
    except kvpool.Error:
        pass  # the scribbler was first


def test_deleting_a_partly_cached_prompt_leaves_its_siblings():
    with small_pool() as pool:
        for last in (2, 3):
            tokens = [1] * 4 + [last] * 4
            with pool.match(tokens) as hit:
                fresh = pool.alloc(2 - len(hit.addrs))
                pool.insert(tokens, np.r_[hit.addrs, fresh]).close()
        assert pool.delete([1] * 4 + [9] * 4, descendants=True) == 0
        assert pool.delete([1] * 4, descendants=True) == 3


def test_a_pool_of_a_forked_child_does_not_take_the_parents_addresses():
    with small_pool() as first:
        theirs = first.alloc(1)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            outcome = b"no error"
            try:
                with small_pool() as mine:
                    mine.alloc(1)
                    mine.free(theirs)
            except kvpool.StaleAddress:
                outcome = b"stale"
            os.write(write, outcome)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 16) == b"stale"


def test_adopted_tensors_must_be_cut_where_the_layout_is():
    layout = kvpool.KVLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)
    piece = layout.piece_bytes[0] // 4
    kvpool.Pool(layout, hbm=[np.zeros((3, 2 * piece), np.float32) for _ in range(2)]).close()
    with pytest.raises(kvpool.LayoutMismatch, match="cut a block"):
        kvpool.Pool(layout, hbm=[np.zeros((3, piece + 1), np.float32), np.zeros((3, 3 * piece - 1), np.float32)])
    with pytest.raises(kvpool.LayoutMismatch, match="no DLPack view"):
        kvpool.Pool(layout, hbm=[np.zeros(3, dtype=object)])


def test_an_index_alone_has_batches_and_explains_itself():
    index = kvpool.PromptIndex(4)
    for held in index.batch.insert([([1] * 8, [1, 2]), ([1] * 4 + [2] * 4, [7, 3])]):
        held.close()
    assert len(index) == 3
    assert [match.addrs.tolist() for match in index.batch.match([[1] * 8, [1] * 4 + [2] * 4])] == [[1, 2], [1, 3]]
    with pytest.raises(kvpool.ArgumentError):
        index.batch.insert([([5] * 4, [5]), ([6] * 5, [6])])
    assert len(index) == 3
    report = index.explain_match([1] * 6 + [9] * 2)
    assert (report.reason, report.matched_tokens, report.partial_tokens) == ("diverges", 4, 2)
    assert "4 of 8 tokens are cached" in str(report)


def test_a_closed_handle_cannot_be_entered():
    index = kvpool.PromptIndex(4)
    match = index.match([1, 2, 3, 4])
    match.close()
    with pytest.raises(kvpool.ClosedError), match:
        pass


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_bytes_in_any_wrapping_are_int32(wrap):
    tokens = np.arange(8, dtype=np.int32)
    index = kvpool.PromptIndex(4)
    index.insert(tokens, [1, 2]).close()
    assert index.peek(wrap(tokens.tobytes())) == 8
