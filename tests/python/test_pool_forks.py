"""Pools and forks: a child cannot use its parent's pool, and its end takes nothing from it."""

from __future__ import annotations

import pytest
from kit import LONG, run_script

pytestmark = pytest.mark.timeout(0 if LONG else 120)

FORK = """
import gc, os, sys, threading, time

def in_child(work):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    waited, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
"""


def test_in_a_forked_child_every_call_raises_fork_error():
    run_script(
        FORK
        + """
pool = kit.small_pool()
kit.store(pool, kit.prompt(3))
pool.swap_out(1)
mine = pool.alloc(2)
hit = pool.match(kit.prompt(3))
stream = pool.subscribe()
calls = {
    "alloc": lambda: pool.alloc(1),
    "alloc all": lambda: pool.alloc(8, medium=kvpool.MIXED),
    "alloc too much": lambda: pool.alloc(100),
    "free": lambda: pool.free(mine),
    "match": lambda: pool.match(kit.prompt(1)),
    "match_batch": lambda: pool.batch.match([kit.prompt(1)]),
    "insert": lambda: pool.insert(kit.prompt(2, 1), mine),
    "insert_batch": lambda: pool.batch.insert([(kit.prompt(2, 1), mine)]),
    "delete": lambda: pool.delete(kit.prompt(3)),
    "evict": lambda: pool.evict(1),
    "swap_out": lambda: pool.swap_out(1),
    "swap_in": lambda: pool.swap_in(hit.addrs),
    "adopt": lambda: pool.adopt([1]),
    "explain_match": lambda: pool.explain_match(kit.prompt(1)),
    "subscribe": lambda: pool.subscribe(),
    "drain": lambda: stream.drain(),
    "stats": lambda: pool.stats(),
    "audit": lambda: pool.audit(),
    "tensor": lambda: pool.tensor(kvpool.HBM),
    "arena": lambda: pool.arena(kvpool.DRAM),
}
def child():
    for name, call in calls.items():
        try:
            call()
        except kvpool.ForkError as error:
            assert "parent" in str(error)
        else:
            raise AssertionError(name)
    hit.close()
    stream.close()
    pool.close()
    assert "audit" in calls
before = kit.state_of(pool)
in_child(child)
assert kit.state_of(pool) == before
"""
    )


def test_the_teardown_of_a_child_frees_nothing_of_its_parent():
    run_script(
        FORK
        + """
layout = kvpool.RawLayout(1 << 18, kit.BLOCK)
tensors = [np.zeros((16, 1 << 18), np.uint8)]
pools = [kvpool.Pool(layout, 16, 16, copy_threads=3),
         kvpool.Pool(layout, hbm=tensors, dram_blocks=16, copy_threads=3)]
for pool in pools:
    kit.store(pool, kit.prompt(16))
    pool.swap_out(16)  # starts the copy threads
hits = [pool.match(kit.prompt(16)) for pool in pools]
held = [pool.swap_in(hit.addrs) for pool, hit in zip(pools, hits)]
view = pools[0].tensor(kvpool.HBM).numpy()
view[:] = 9
tensors[0][:] = 9
before = [kit.state_of(pool) for pool in pools]

def child():
    global hits, held, pools, view, pool
    names = [hits, held, pools]
    hits = held = pools = view = pool = None
    for handles in names:
        handles.clear()
    gc.collect()

for _ in range(5):
    in_child(child)
    assert (view == 9).all()
    assert [kit.state_of(pool) for pool in pools] == before
for hit, pin in zip(hits, held):
    hit.close()
    pin.close()
for pool in pools:
    assert len(pool.swap_out(16)) == 16
    assert pool.stats().hbm.free == 16
    assert (pool.tensor(kvpool.DRAM).numpy() == 9).all()
"""
    )


def test_a_child_may_exit_with_all_destructors():
    run_script(
        FORK
        + """
pool = kit.small_pool()
kit.store(pool, kit.prompt(3))
hit = pool.match(kit.prompt(3))
child = os.fork()
if child == 0:
    sys.exit(0)  # runs every destructor
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.audit().hbm.pinned == 3
"""
    )


def test_a_forked_child_can_make_another_pool():
    run_script(
        FORK
        + """
pool = kit.small_pool()
kit.store(pool, kit.prompt(3))
def child():
    with kit.small_pool() as mine:
        kit.store(mine, kit.prompt(2))
        mine.swap_out(2)
        assert mine.match(kit.prompt(2)).tokens == 2 * kit.BLOCK
        in_child(lambda: None)
        mine.audit()
in_child(child)
assert pool.audit().hbm.historical == 3
"""
    )


def test_a_fork_while_other_threads_work_leaves_a_child_that_can_end():
    run_script(
        FORK
        + f"""
pool = kit.small_pool(64, 64, kvpool.RawLayout(1 << 16, kit.BLOCK), audit=False, copy_threads=2)
stop = threading.Event()
def work(name):
    while not stop.is_set():
        kit.store(pool, kit.prompt(16, name), evict=True)
        pool.match(kit.prompt(16, name)).close()
        pool.swap_out(8)
workers = [threading.Thread(target=work, args=(name,)) for name in range(3)]
for worker in workers:
    worker.start()
def child():
    global pool
    try:
        pool.stats()
    except kvpool.ForkError:
        pool = None
        gc.collect()
    else:
        raise AssertionError
for _ in range({500 if LONG else 10}):
    in_child(child)
stop.set()
for worker in workers:
    worker.join()
stats = pool.audit()
assert stats.hbm.active + stats.dram.active == 0
""",
    )
