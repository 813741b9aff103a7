"""The end of things: handles, pools, interpreters."""

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


def test_a_spawned_process_has_no_part_of_its_parents_pool():
    run_script("""
import os, subprocess, sys
pool = kit.small_pool()
names = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout
assert "kvpool" not in names, names  # not inherited across exec
""")
