"""The order of verbs and the work in an engine's streams that is still pending when they are called.

Held work writes blocks, or reads them, while a verb that names its stream (or none: then all streams count) has every
chance to overtake it. Each of these tests has been seen to fail with the event or the wait left out that it is about:
CudaStream::follow for swap and alloc, DeviceOrder for transfers and fetches.
"""

from __future__ import annotations


def test_swap_out_copies_data_after_the_stream_has_written_it(on_gpu):
    on_gpu("""
for named in (True, False):
    with small_pool(4, 4, byte_layout(), device="cuda") as pool:
        stream, stamps = new_stream(), Stamps(pool)
        addrs = store(pool, prompt(3))
        stamps.write(addrs, [1, 2, 3])
        held = HeldWork(stream).write(pool, addrs, [7, 8, 9])
        assert len(meanwhile(held, lambda: pool.swap_out(3, stream=stream if named else None))) == 3
        with pool.match(prompt(3)) as hit:
            assert kvpool.media(hit.addrs).tolist() == [DRAM] * 3
            assert stamps.read(hit.addrs) == [7, 8, 9]
""")


def test_suspending_copies_data_after_the_stream_has_written_it(on_gpu):
    """When it returns the copies have arrived: the engine unmaps the memory next."""
    on_gpu("""
for named in (True, False):
    with small_pool(4, 4, byte_layout(), device="cuda") as pool:
        stream, stamps = new_stream(), Stamps(pool)
        addrs = store(pool, prompt(3))
        stamps.write(addrs, [1, 2, 3])
        held = HeldWork(stream).write(pool, addrs, [7, 8, 9])
        assert meanwhile(held, lambda: pool.suspend(stream=stream if named else None)) == 3
        stamps.views[HBM][:] = 0  # the memory as it comes back
        pool.resume()
        with pool.match(prompt(3), into=HBM) as hit:
            assert stamps.read(hit.addrs) == [7, 8, 9]
""")


def test_an_evicting_allocation_copies_data_after_the_stream_has_written_it(on_gpu):
    on_gpu("""
for named in (True, False):
    with small_pool(3, 4, byte_layout(), device="cuda") as pool:
        stream, stamps = new_stream(), Stamps(pool)
        addrs = store(pool, prompt(3))
        stamps.write(addrs, [1, 2, 3])
        held = HeldWork(stream).write(pool, addrs, [7, 8, 9])
        stamps.write(meanwhile(held, lambda: pool.alloc(3, stream=stream if named else None)), [0, 0, 0])
        with pool.match(prompt(3)) as hit:
            assert stamps.read(hit.addrs) == [7, 8, 9]
""")


def test_swap_in_overwrites_data_after_the_stream_has_read_it(on_gpu):
    """An engine may free a block that its kernels are still to read: to the engine's stream it is there until then."""
    on_gpu("""
for named in (True, False):
    with small_pool(2, 4, byte_layout(), device="cuda") as pool:
        stream, stamps = new_stream(), Stamps(pool)
        stamps.write(store(pool, prompt(2)), [1, 2])
        pool.swap_out(2)
        addrs = pool.alloc(2)
        stamps.write(addrs, [8, 9])
        held = HeldWork(stream)
        seen = held.read(pool, addrs)
        pool.free(addrs)
        with pool.match(prompt(2)) as hit:
            with meanwhile(held, lambda: pool.swap_in(hit.addrs, stream=stream if named else None)) as back:
                assert stamps.read(back.addrs) == [1, 2]
        assert seen() == [8, 9]
""")


def test_a_transfer_sends_data_after_the_stream_has_written_it(on_gpu):
    on_gpu("""
for route, named in itertools.product(ROUTES, (True, False)):
    here, there = pair_on_gpu(route, layout=byte_layout())
    with here, there:
        stream, stamps = new_stream(), Stamps(here)
        addrs = here.alloc(3)
        after = {"stream": stream} if named else {}
        for verb in (
            lambda: here.transfer("there", addrs, **after),
            lambda: here.transfer_with_insert("there", prompt(3), addrs, private=b"x", **after),
        ):
            stamps.write(addrs, [1, 2, 3])
            held = HeldWork(stream).write(here, addrs, [7, 8, 9])
            done = meanwhile(held, lambda: verb().wait())
            assert done.stats.route == route
            with there.inbox.receive(60) as item:
                assert Stamps(there).read(item.addrs) == [7, 8, 9]
""")


def test_each_layer_of_a_transfer_follows_its_own_work(on_gpu):
    on_gpu("""
for route in ROUTES:
    here, there = pair_on_gpu(route, layout=byte_layout())
    with here, there:
        stream, stamps = new_stream(), Stamps(here)
        addrs = here.alloc(2)
        stamps.write(addrs, [1, 2])
        transfer = here.transfer("there", addrs, stream=stream, layerwise=True)
        for layer, value in ((1, 40), (0, 50)):
            held = HeldWork(stream).write(here, addrs, [value, value + 1], layer)
            meanwhile(held, lambda: transfer.send_layer(layer))
        transfer.finish().wait()
        with there.inbox.receive(60) as item:
            got = content(there, HBM)[kvpool.block_ids(item.addrs)]
            assert [got[i][layer].ravel().tolist() for i in (0, 1) for layer in (0, 1)] == [
                [value] * got[0][0].size for value in (50, 40, 51, 41)
            ]
""")


def test_a_fetch_brings_content_that_a_stream_of_the_owner_is_still_writing(on_gpu):
    on_gpu("""
for route in ROUTES:
    here, there = pair_on_gpu(route, layout=byte_layout())
    with here, there:
        stream, stamps = new_stream(), Stamps(there)
        theirs = there.alloc(2)
        stamps.write(theirs, [1, 2])
        held = HeldWork(stream).write(there, theirs, [7, 8])
        done = meanwhile(held, lambda: here.fetch("there", theirs).wait())
        assert Stamps(here).read(done.addrs) == [7, 8]
""")


def test_a_transfer_that_waits_for_a_stream_delays_neither_its_caller_nor_others(on_gpu):
    on_gpu("""
here, there = pair_on_gpu("cuda_ipc", layout=byte_layout())
with here, there:
    stream, other, stamps = new_stream(), new_stream(), Stamps(here)
    addrs = here.alloc(2)
    stamps.write(addrs, [1, 2])
    held = HeldWork(stream).write(here, addrs[:1], [7])
    waits = here.transfer("there", addrs[:1], stream=stream)  # it returns
    here.transfer("there", addrs[1:], stream=other).wait()
    assert not waits.done()
    late = here.transfer("there", addrs[:1], stream=stream, timeout=0.1)
    assert type(late.exception(60)) is kvpool.DeadlineExceeded
    given_up = here.transfer("there", addrs[:1], stream=stream)
    assert given_up.cancel()
    assert type(given_up.exception(60)) is kvpool.Cancelled
    assert not waits.done()
    held.let_go()
    waits.wait()
    got = [there.inbox.receive(60), there.inbox.receive(60)]
    assert sorted(Stamps(there).read(np.concatenate([item.addrs for item in got]))) == [2, 7]
    for item in got:
        item.close()
    wait_for(lambda: there.audit().hbm.free == 8)
""")
