"""The end of things: handles, pools, processes, interpreters."""

from __future__ import annotations

import gc
import importlib.util
import threading
import weakref

import pytest
from kit import LONG, prompt, run_script, small_pool, store

import kvpool

pytestmark = pytest.mark.timeout(0 if LONG else 120)

# ---- handles and pools


def test_a_handle_keeps_its_pool():
    pool = small_pool()
    store(pool, prompt(2))
    alive = weakref.ref(pool)
    hit = pool.match(prompt(2))
    del pool
    gc.collect()
    assert alive() is None  # the Python object; the object beneath it lives on
    assert not hit.closed
    hit.close()


def test_a_pool_that_could_not_be_made_can_be_shown():
    made = []

    class Kept(kvpool.Pool):
        def __new__(cls, *given, **settings):
            made.append(super().__new__(cls, *given, **settings))
            return made[0]

    with pytest.raises(kvpool.ArgumentError):
        Kept(kvpool.RawLayout(block_bytes=64), hbm_blocks=1, dram_blocks=-1)
    assert repr(made[0]) == "<Pool that was not made>"


@pytest.mark.parametrize("close_pool", [True, False])
def test_handles_may_be_closed_after_their_pool_in_any_order(close_pool):
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        pool = small_pool()
        store(pool, prompt(4))
        pool.swap_out(2)
        early = pool.match(prompt(4))
        handles = [early, pool.swap_in(early.addrs), pool.insert(prompt(5, 1), pool.alloc(5, medium=kvpool.MIXED))]
        if close_pool:
            pool.close()
        del pool, early
        gc.collect()
        for at in order:
            handles[at].close()
            assert handles[at].closed
            handles[at].close()


def test_handles_may_be_closed_by_another_thread():
    with small_pool() as pool:
        store(pool, prompt(2))
        hits = [pool.match(prompt(2)) for _ in range(64)]
        threads = [threading.Thread(target=lambda mine=hits[at::8]: [hit.close() for hit in mine]) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats().hbm.pinned == 0


def test_addresses_stay_readable_after_their_handle():
    with small_pool() as pool:
        addrs = store(pool, prompt(2)).tolist()
        with pool.match(prompt(2)) as hit:
            found = hit.addrs
        del hit
        pool.close()
        gc.collect()
        assert found.tolist() == addrs


def test_a_cycle_of_a_pool_and_its_handle_is_collected():
    class Engine:
        pass

    engine = Engine()
    engine.pool = small_pool()
    store(engine.pool, prompt(2))
    engine.hit = engine.pool.match(prompt(2))
    engine.self = engine
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None


def test_many_pools_leave_nothing_behind():
    run_script(f"""
import gc, os
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
def life():
    pool = kit.small_pool(64, 64, audit=False)
    stream = pool.subscribe()
    for name in range(20):
        kit.store(pool, kit.prompt(8, name), evict=True)
    with pool.match(kit.prompt(8, 19)) as hit, pool.swap_in(hit.addrs) as held:
        pass
    stream.drain()
    np.asarray(pool.tensor(kvpool.HBM))[0] = 1
    return pool.match(kit.prompt(8, 19))
for _ in range(100):
    life()
gc.collect()
before, files = resident(), len(os.listdir("/proc/self/fd"))
for _ in range({20_000 if LONG else 1_000}):
    life()
gc.collect()
assert len(os.listdir("/proc/self/fd")) == files
assert resident() < before + (4 << 20), (before, resident())
""")


def test_large_pools_end_their_copy_threads():
    run_script("""
import threading, time
from pathlib import Path
def threads():
    return len(list(Path("/proc/self/task").iterdir()))
base = threads()
layout = kvpool.RawLayout(1 << 20, kit.BLOCK)
pool = kvpool.Pool(layout, 8, 8, copy_threads=4)
kit.store(pool, kit.prompt(8))
pool.swap_out(8)
assert threads() == base + 3
pool.close()
del pool
assert threads() == base
""")


# ---- interpreter exit


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "import sys; sys.exit(0)",
        "del pool",
        "pool.close()",
        "del hit, held, late; del pool; del view, array",
        "del array, view; pool.close(); del hit",
        "import builtins; builtins.kept = (pool, hit, held, view, array, stream); del pool, hit, held, view",
        "import threading; threading.Thread(target=lambda: __import__('sys').exit(0)).start()",
        "import threading; t = threading.Thread(target=lambda: pool.match(tokens)); t.start()",
        "import atexit; atexit.register(lambda: pool.match(tokens).close())",
        "import atexit; atexit.register(pool.close)",
        "import weakref; weakref.finalize(pool, print, 'gone')",
        "pool.cycle = pool; hit_list = [hit]; hit_list.append(hit_list)",
        "import gc; gc.disable(); cycle = [pool, hit]; cycle.append(cycle); del pool, hit, cycle",
        "class Late:\n    def __del__(self): hit.close(); pool.stats()\nlate_object = Late()",
    ],
)
def test_an_interpreter_ends_cleanly_with_live_views_and_open_pins(ending):
    run = run_script(f"""
tokens = kit.prompt(4)
pool = kit.small_pool()
kit.store(pool, tokens)
pool.swap_out(2)
hit = pool.match(tokens)
held = pool.swap_in(hit.addrs)
late = pool.insert(kit.prompt(2, 1), pool.alloc(2))
view = pool.tensor(kvpool.HBM)
array = view.numpy()
capsule = view.__dlpack__()
stream = pool.subscribe()
index = kvpool.PromptIndex(4)
pinned = index.insert([1, 2, 3, 4], [5])
{ending}
""")
    assert run.stdout in ("", "gone\n")


def test_an_interpreter_ends_cleanly_over_adopted_memory():
    for ending in ("", "del tensors", "del pool", "import builtins; builtins.kept = (pool, held)"):
        run_script(f"""
tensors = [np.zeros((6, 2, 2, 4, 4), np.float32) for _ in range(2)]
pool = kvpool.Pool(kit.small_layout(), hbm=tensors, dram_blocks=6)
held = pool.insert(kit.prompt(2), pool.alloc(2))
{ending}
""")


def test_an_interpreter_ends_cleanly_while_daemons_work():
    run_script("""
import threading, time
pool = kit.small_pool(64, 64, audit=False)
def work(name):
    while True:
        kit.store(pool, kit.prompt(8, name), evict=True)
        pool.match(kit.prompt(8, name)).close()
        pool.swap_out(4)
for name in range(4):
    threading.Thread(target=work, args=(name,), daemon=True).start()
time.sleep(0.3)
""")


def test_a_process_that_is_left_without_cleaning_up_ends():
    run_script("""
import os
pool = kit.small_pool()
hit = pool.match(kit.prompt(1))
os._exit(0)
""")


def test_torch_may_hold_the_last_view():
    if importlib.util.find_spec("torch") is None:  # to import it here, too, would take seconds
        pytest.skip("torch is not installed")
    run_script("""
import torch
pool = kit.small_pool()
tensor = torch.from_dlpack(pool.tensor(kvpool.HBM))
tensor[:] = 5
pool.close()
del pool
assert float(tensor.mean()) == 5
""")


# ---- fork

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


def test_a_spawned_process_has_no_part_of_its_parents_pool():
    run_script("""
import os, subprocess, sys
pool = kit.small_pool()
names = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
assert "kvpool" not in names, names  # not inherited across exec
""")
