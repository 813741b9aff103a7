"""save and load on a GPU: in the order of the engine's stream, and with its blocks kept meanwhile."""

from __future__ import annotations


def test_copies_wait_for_the_streams_work_and_keep_the_blocks_of_the_caller(on_gpu):
    on_gpu("""
with small_pool(8, 8, byte_layout(), device="cuda") as pool:
    stream = new_stream()
    addrs = pool.alloc(3)
    held = HeldWork(stream).write(pool, addrs, [7, 8, 9])
    saved = pool.save(prompt(3), addrs, stream=stream, wait=False)
    time.sleep(0.05)
    assert not saved.done() and pool.explain_match(prompt(3)).matched_tokens == 0
    held.let_go()
    assert saved.wait(30).result == 3
    later = HeldWork(stream).write(pool, addrs, [1, 1, 1])       # as the next request does
    later.let_go()

    into = pool.alloc(3)
    held = HeldWork(stream).write(pool, into, [2, 2, 2])         # late work on the destinations
    with pool.match(prompt(3)) as hit:
        loaded = pool.load(hit.addrs, into, stream=stream, wait=False)
        time.sleep(0.05)
        assert not loaded.done()
        raises(kvpool.StateError, lambda: pool.free(into))        # reserved until it has ended
        held.let_go()
        loaded.wait(30)
    found = HeldWork(stream)
    seen = found.read(pool, into)
    found.let_go()
    assert seen() == [7, 8, 9], seen()
    assert pool.save(prompt(3), into) == 0 and pool.stats().hbm.active == 6
    pool.free(np.r_[addrs, into])
    pool.audit()
""")


def test_a_copy_that_waits_for_a_stream_can_be_cancelled_and_gives_everything_back(on_gpu):
    on_gpu("""
with small_pool(8, 8, byte_layout(), device="cuda") as pool:
    stream = new_stream()
    addrs = pool.alloc(2)
    held = HeldWork(stream)
    saved = pool.save(prompt(2), addrs, stream=stream, wait=False)
    assert saved.cancel()
    assert isinstance(saved.exception(30), kvpool.Cancelled)
    held.let_go()
    assert pool.stats().dram.free == 8 and pool.explain_match(prompt(2)).matched_tokens == 0
    pool.save(prompt(2), addrs)
    held = HeldWork(stream)
    with pool.match(prompt(2)) as hit:
        loaded = pool.load(hit.addrs, addrs, stream=stream, wait=False)
        assert loaded.cancel() and isinstance(loaded.exception(30), kvpool.Cancelled)
    held.let_go()
    pool.free(addrs)
    pool.audit()
""")


def test_nothing_is_loaded_into_a_block_that_a_save_still_reads(on_gpu):
    on_gpu("""
with small_pool(8, 8, byte_layout(), device="cuda") as pool:
    stream, stamps = new_stream(), Stamps(pool)
    addrs = pool.alloc(2)
    stamps.write(addrs, [1, 2])
    pool.save(prompt(2), addrs)
    stamps.write(addrs, [3, 4])
    held = HeldWork(stream)
    saved = pool.save(prompt(2), addrs, "other", stream=stream, wait=False)
    with pool.match(prompt(2)) as hit:
        raises(kvpool.StateError, lambda: pool.load(hit.addrs, addrs), "reads the block")
        held.let_go()
        assert saved.wait(30).result == 2
        pool.load(hit.addrs, addrs)
    assert stamps.read(addrs) == [1, 2]
    with pool.match(prompt(2), "other") as hit:
        pool.load(hit.addrs, addrs)
    assert stamps.read(addrs) == [3, 4]
    pool.free(addrs)
""")
