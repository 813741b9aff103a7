"""swap_out and swap_in with ``wait=False``: a thread of the pool does the work."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading

import numpy as np
import pytest
from kit import Stamps, prompt, refused, run_script, small_layout, small_pool, store
from transfer.kit import eventually

import kvpool
from kvpool import DRAM, HBM

LONG_S = 60


@pytest.fixture
def pool():
    with small_pool() as pool:
        yield pool


def test_a_background_swap_gives_the_same_result_as_a_blocking_one(pool):
    stamps = Stamps(pool)
    stamps.write(store(pool, prompt(4)), [1, 2, 3, 4])
    out = pool.swap_out(3, wait=False)
    assert out.wait() is out
    assert out.done()
    assert kvpool.media(out.result).tolist() == [DRAM] * 3
    assert (out.result.dtype, out.exception()) == (np.uint64, None)
    with pool.match(prompt(4)) as hit:
        swap = pool.swap_in(hit.addrs, wait=False)
    with swap.wait(LONG_S).result as held:
        assert held is swap.result
        assert kvpool.media(held.addrs).tolist() == [HBM] * 4
        assert stamps.read(held.addrs) == [1, 2, 3, 4]
        assert pool.stats().hbm.pinned == 4
        assert len(pool.swap_out(4)) == 0
    assert pool.stats().hbm.pinned == 0
    assert (pool.stats().swapped_out_blocks, pool.stats().swapped_in_blocks) == (3, 3)


def test_the_keyword_may_ask_for_a_blocking_call(pool):
    store(pool, prompt(2))
    moved = pool.swap_out(2, wait=True)
    assert kvpool.media(moved).tolist() == [DRAM] * 2
    with pool.swap_in(moved, wait=True) as held:
        assert kvpool.media(held.addrs).tolist() == [HBM] * 2


def test_swapped_in_blocks_are_pinned_from_the_call_on(pool):
    store(pool, prompt(3))
    moved = pool.swap_out(3)
    swap = pool.swap_in(moved, wait=False)
    assert pool.evict(8, medium=DRAM) == pool.evict(8, medium=HBM) == 0
    with pytest.raises(kvpool.StateError, match="pinned"):
        pool.delete(prompt(3))
    with swap.wait().result as held:
        assert len(held.addrs) == 3
    assert pool.delete(prompt(3)) == 3


def test_swaps_of_one_direction_come_in_the_order_of_their_calls(pool):
    store(pool, prompt(6))
    swaps = [pool.swap_out(1, wait=False) for _ in range(6)]
    swaps[-1].wait(LONG_S)
    assert all(swap.done() for swap in swaps)
    assert len({int(swap.result[0]) for swap in swaps}) == 6
    back = [pool.swap_in(swap.result, wait=False) for swap in swaps]
    back[-1].wait(LONG_S)
    for swap in back:
        swap.result.close()
    assert pool.stats().hbm.historical == 6


def test_swaps_in_of_the_same_blocks_share_them(pool):
    store(pool, prompt(3))
    pool.swap_out(3)
    with pool.match(prompt(3)) as hit:  # or the addresses might be stale before the last call
        swaps = [pool.swap_in(hit.addrs, wait=False) for _ in range(4)]
    held = [swap.wait(LONG_S).result for swap in swaps]
    assert {tuple(one.addrs.tolist()) for one in held} == {tuple(held[0].addrs.tolist())}
    for one in held:
        assert pool.stats().hbm.pinned == 3
        one.close()
    assert (pool.stats().hbm.pinned, pool.stats().dram.free) == (0, 8)


def test_a_swap_can_be_awaited(pool):
    async def serve():
        store(pool, prompt(4))
        out = await pool.swap_out(4, wait=False)
        with (await pool.swap_in(out.result, wait=False)).result as held:
            assert kvpool.media(held.addrs).tolist() == [HBM] * 4
        with pytest.raises(kvpool.OutOfBlocks):
            await pool.swap_in(await down(), wait=False)

    async def down():
        moved = (await pool.swap_out(4, wait=False)).result
        pool.alloc(6)
        return moved

    asyncio.run(serve())


def test_many_tasks_await_swaps_both_ways_while_the_loop_runs():
    with small_pool(64, 64) as pool:
        for name in range(16):
            store(pool, prompt(2, name))

        async def serve(name):
            for _ in range(5):
                await pool.swap_out(4, wait=False)
                with pool.match(prompt(2, name)) as hit:
                    swap = pool.swap_in(hit.addrs, wait=False)
                with (await swap).result as held:
                    assert kvpool.media(held.addrs).tolist() == [HBM] * 2

        async def all_of_them():
            await asyncio.gather(*(serve(name) for name in range(16)))

        asyncio.run(all_of_them())
        assert pool.stats().index_blocks == 32
        assert pool.stats().hbm.pinned == 0


def test_the_descriptor_is_readable_when_the_swap_is_done(pool):
    store(pool, prompt(2))
    swap = pool.swap_out(2, wait=False)
    ready, _, _ = select.select([swap], [], [], LONG_S)
    assert ready == [swap]
    assert swap.done()


def test_wrong_arguments_are_refused_by_the_call(pool):
    addrs = store(pool, prompt(3))
    pool.swap_out(1)
    mine = pool.alloc(2)
    cold = pool.explain_match(prompt(3)).addrs[2:]
    with refused(pool, kvpool.StaleAddress):
        pool.swap_in(addrs, wait=False)
    with refused(pool, kvpool.StateError, "active"):
        pool.swap_in(mine, wait=False)
    with refused(pool, kvpool.ArgumentError, needed=1, given=2):
        pool.swap_in(cold, into=mine, wait=False)
    with refused(pool, kvpool.ArgumentTypeError):
        pool.swap_out("1", wait=False)
    with pool.swap_in(cold, into=mine[:1], wait=False).wait().result as held:
        assert held.addrs.tolist() == mine[:1].tolist()
    pool.free(mine[1:])


def test_the_handle_raises_later_failures_and_the_pool_is_unchanged(pool):
    store(pool, prompt(4))
    moved = pool.swap_out(4)
    pool.alloc(6)
    with refused(pool, kvpool.OutOfBlocks, requested=4, free=2):
        pool.swap_in(moved, wait=False).wait()
    swap = pool.swap_in(moved, wait=False)
    error = swap.exception(LONG_S)
    assert isinstance(error, kvpool.OutOfBlocks)
    with pytest.raises(kvpool.OutOfBlocks):
        _ = swap.result
    assert "failed" in repr(swap)


def test_dropping_a_handle_leaves_nothing_pinned(pool):
    store(pool, prompt(2))
    moved = pool.swap_out(2)
    pool.swap_in(moved, wait=False)
    last = pool.swap_in([], wait=False)  # behind it
    last.wait(LONG_S).result.close()
    gc.collect()
    eventually(lambda: pool.stats().hbm.pinned == 0)  # the thread that did it releases it a moment later
    done = pool.swap_in(pool.swap_out(2), wait=False).wait(LONG_S)
    assert pool.stats().hbm.pinned == 2
    del done
    gc.collect()
    eventually(lambda: pool.stats().hbm.pinned == 0)


def test_a_result_outlives_its_handle(pool):
    store(pool, prompt(2))
    held = pool.swap_in(pool.swap_out(2), wait=False).wait(LONG_S).result
    gc.collect()
    assert pool.stats().hbm.pinned == 2
    held.close()
    assert pool.stats().hbm.pinned == 0


def test_a_closed_pool_ends_its_swaps():
    pool = small_pool(64, 64)
    store(pool, prompt(60))
    swaps = [pool.swap_out(1, wait=False) for _ in range(60)]
    pool.close()
    assert all(swap.done() for swap in swaps)
    errors = [swap.exception() for swap in swaps]
    closed = [error for error in errors if error is not None]
    assert all(type(error) is kvpool.ClosedError for error in closed)
    assert errors == [None] * (60 - len(closed)) + closed  # those that had begun, and then the others
    for way in (lambda: pool.swap_out(1, wait=False), lambda: pool.swap_in([], wait=False)):
        with pytest.raises(kvpool.ClosedError):
            way()
    assert not swaps[-1].cancel()


def test_threads_swap_both_ways_without_waiting():
    with small_pool(32, 32, audit=False) as pool:
        stamps = Stamps(pool)
        for name in range(8):
            stamps.write(store(pool, prompt(3, name)), [3 * name, 3 * name + 1, 3 * name + 2])
        wrong = []

        def work(number):
            for step in range(60):
                name = (number + step) % 8
                pool.swap_out(3, wait=step % 2 == 0)
                with pool.match(prompt(3, name)) as hit:
                    swap = pool.swap_in(hit.addrs, wait=False)
                if step % 5 == 4:
                    swap.cancel()
                    continue
                with swap.wait(LONG_S).result as held:
                    if stamps.read(held.addrs) != [3 * name, 3 * name + 1, 3 * name + 2]:
                        wrong.append(name)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        pool.audit()


def test_every_method_raises_in_a_forked_child(pool):
    store(pool, prompt(2))
    out = pool.swap_out(2, wait=False).wait(LONG_S)
    swap = pool.swap_in(out.result, wait=False)
    child = os.fork()
    if child == 0:
        status = 0
        calls = (swap.wait, swap.done, swap.cancel, swap.exception, swap.fileno, lambda: swap.result)
        for call in (*calls, lambda: pool.swap_out(1, wait=False), lambda: pool.swap_in([], wait=False)):
            try:
                call()
                status = 1
            except kvpool.ForkError:
                pass
        pool.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    swap.wait(LONG_S).result.close()


def test_an_interpreter_may_end_with_a_swap_under_way():
    run_script(
        "import kvpool, numpy as np\n"
        "layout = kvpool.RawLayout(block_bytes=1 << 16, block_tokens=4)\n"
        "pool = kvpool.Pool(layout, 256, 256, device='cpu', huge_pages='never')\n"
        "pool.insert(np.arange(1024, dtype=np.int32), pool.alloc(256)).close()\n"
        "swaps = [pool.swap_out(16, wait=False) for _ in range(16)]\n"
    )


@pytest.mark.parametrize("order", ["aggregated", "discrete"])
def test_swaps_of_both_directions_are_under_way_together(order):
    """Both are asked for before either is waited for; the caller may go on at once."""
    with small_pool(16, 16, layout=small_layout(order=order)) as pool:
        stamps = Stamps(pool)
        stamps.write(store(pool, prompt(4, 1)), [1, 2, 3, 4])
        cold = pool.swap_out(4)
        stamps.write(store(pool, prompt(4, 2)), [5, 6, 7, 8])
        out, into = pool.swap_out(4, wait=False), pool.swap_in(cold, wait=False)
        assert kvpool.media(out.wait(LONG_S).result).tolist() == [DRAM] * 4
        with into.wait(LONG_S).result as held:
            assert stamps.read(held.addrs) == [1, 2, 3, 4]
        with pool.match(prompt(4, 2)) as hit:
            assert stamps.read(hit.addrs) == [5, 6, 7, 8]
