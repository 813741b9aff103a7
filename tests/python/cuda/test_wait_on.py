"""Streams that wait for a fetch, while the owner's GPU still has to write the content.

The owner is on another GPU than the stream that waits: what it sends follows all work of that GPU. `tests/gpu` has the
same on one GPU, between processes.
"""

from __future__ import annotations


def test_a_stream_finds_what_a_fetch_brought_and_no_thread_waits(on_fake):
    on_fake("""
class Stream:
    def __init__(self, number):
        self.cuda_stream = number

class Other:
    def __init__(self, number):
        self.number = number
    def __cuda_stream__(self):
        return (0, self.number)

for route, as_object in zip(ROUTES, (int, Stream, Other)):
    here, there = pair_on_gpu(route, device="cuda:1", layout=byte_layout())
    with here, there:
        owners = new_stream(1)
        theirs = there.alloc(2)
        Stamps(there).write(theirs, [1, 2])
        held = HeldWork(owners).write(there, theirs, [7, 8])
        stream = new_stream(0)
        reader = HeldWork(stream)
        reader.let_go()
        fetch = here.fetch("there", theirs)
        addrs = fetch.wait_on(as_object(stream))
        assert addrs.dtype == np.uint64 and len(addrs) == 2
        seen = reader.read(here, addrs)
        assert not fetch.done()
        held.let_go()
        assert seen() == [7, 8]
        assert fetch.done() and fetch.exception() is None
        assert fetch.addrs.tolist() == addrs.tolist()
        assert fetch.wait_on(stream).tolist() == addrs.tolist()
        assert fake_counts("cuStreamWaitValue32") == ROUTES.index(route) + 1
""")


def test_without_the_wait_the_stream_does_not_find_it(on_fake):
    """The test above without the call that it is about."""
    on_fake("""
here, there = pair_on_gpu("sock", device="cuda:1", layout=byte_layout())
with here, there:
    owners = new_stream(1)
    theirs = there.alloc(2)
    held = HeldWork(owners).write(there, theirs, [7, 8])
    stream = new_stream(0)
    mine = here.alloc(2)
    Stamps(here).write(mine, [1, 2])
    reader = HeldWork(stream)
    reader.let_go()
    fetch = here.fetch("there", theirs, to=mine)
    assert reader.read(here, mine)() == [1, 2]
    held.let_go()
    fetch.wait()
""")


def test_a_stream_continues_however_the_fetch_fails(on_fake):
    on_fake("""
for how in ("late", "cancelled", "disconnected", "closed"):
    here, there = pair_on_gpu("cuda_ipc", device="cuda:1", layout=byte_layout())
    with here, there:
        owners = new_stream(1)
        theirs = there.alloc(2)
        held = HeldWork(owners)
        stream = new_stream(0)
        fetch = here.fetch("there", theirs, timeout=5 if how == "late" else 60)
        fetch.wait_on(stream)
        if how == "cancelled":
            assert fetch.cancel()
        elif how == "disconnected":
            here.peers.disconnect("there")
        elif how == "closed":
            here.close()
        call("cuStreamSynchronize", ctypes.c_void_p(stream))
        assert fetch.done()
        error = {"late": kvpool.DeadlineExceeded, "cancelled": kvpool.Cancelled, "disconnected": kvpool.PeerLost,
                 "closed": kvpool.ClosedError}[how]
        assert type(fetch.exception()) is error, fetch.exception()
        raises(error, lambda: fetch.wait_on(stream))
        held.let_go()
        if how != "closed":
            assert here.audit().hbm.quarantined == 2  # as long as there is the handle
            del fetch
            gc.collect()
            wait_for(lambda: here.audit().hbm.free == 8)
""")


def test_streams_that_cannot_wait_are_refused(on_fake):
    on_fake("""
here, there = pair_on_gpu("sock", device="cuda:1", layout=byte_layout())
host = small_pool(layout=byte_layout(), routes=("sock",))
with here, there, host:
    owners, context = new_stream(1), ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1)
    theirs = there.alloc(1)
    host.peers.connect(there.peers.listen(address_of("sock")))
    stream = new_stream(0)
    sent = here.transfer("there", here.alloc(1))
    raises(kvpool.StateError, lambda: sent.wait_on(stream), "fetch")
    sent.wait()
    call("cuCtxPushCurrent_v2", context)
    held = HeldWork(owners)
    fetch = here.fetch("there", theirs)
    raises(kvpool.ArgumentError, lambda: fetch.wait_on(owners), "GPU 0")
    raises(kvpool.ArgumentError, lambda: fetch.wait_on(None))
    raises(kvpool.ArgumentTypeError, lambda: fetch.wait_on("main"))
    by_host = host.fetch("there", theirs)
    raises(kvpool.ArgumentError, lambda: by_host.wait_on(stream), "no streams")
    cuda.fake_cuda_set(b"wait_value", 0)
    raises(kvpool.Unsupported, lambda: fetch.wait_on(stream), "cuStreamWaitValue32")
    cuda.fake_cuda_set(b"wait_value", 1)
    held.let_go()
    fetch.wait()
    by_host.wait()
    assert fake_counts("waits passed") == 0
""")


def test_a_dead_peer_delays_no_stream_that_waits_for_another(on_fake):
    """Its GPU memory is unmapped, which waits for that stream."""
    on_fake("""
from transfer.kit import Child
child = Child()
cuda.fake_cuda_set(b"unmap_waits", 1)
here, there = pair_on_gpu("cuda_ipc", device="cuda:1", layout=byte_layout())
with here, there:
    address = child(
        "pool = small_pool(device='cuda:0', layout=small_layout(dtype='uint8'), routes=('cuda_ipc',), lease_s=2.0, "
        "name='third')\\n"
        "pool.peers.listen(address)", address=address_of("shm"))
    assert here.peers.connect(address) == "third"
    owners = new_stream(1)
    theirs = there.alloc(2)
    held = HeldWork(owners).write(there, theirs, [7, 8])
    stream = new_stream(0)
    reader = HeldWork(stream)
    reader.let_go()
    fetch = here.fetch("there", theirs, timeout=60)
    seen = reader.read(here, fetch.wait_on(stream))
    unmapped = fake_counts("cuMemUnmap")
    child.kill()
    wait_for(lambda: fake_counts("cuMemUnmap") > unmapped and [one.name for one in here.peers.list()] == ["there"])
    assert not fetch.done()
    held.let_go()
    assert seen() == [7, 8]
    assert fetch.exception() is None
    wait_for(lambda: here.audit().hbm.quarantined == 0)
""")


def test_with_one_queue_to_the_gpu_no_stream_waits(on_fake):
    on_fake("""
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
here, there = pair_on_gpu("sock", device="cuda:1", layout=byte_layout())
with here, there:
    fetch = here.fetch("there", there.alloc(1))
    stream = new_stream(0)
    raises(kvpool.Unsupported, lambda: fetch.wait_on(stream), "CUDA_DEVICE_MAX_CONNECTIONS is 1", "wait()")
    fetch.wait()
    assert fake_counts("cuStreamWaitValue32") == 0
""")


def test_no_nccl_communicator_is_made_while_a_stream_waits(on_fake, fake_nccl):
    """NCCL loads its kernels then, which waits for all work of the GPU: for the stream that waits, too."""
    on_fake(f"""
here, there = pair_on_gpu("nccl", device="cuda:1", layout=byte_layout(), nccl={str(fake_nccl)!r}, measure_routes=False)
with here, there:
    theirs = there.alloc(1)
    Stamps(there).write(theirs, [5])
    stream, owners = new_stream(0), new_stream(1)  # the context of cuda:1 is current
    held = HeldWork(owners)
    fetch = here.fetch("there", theirs, timeout=30)
    fetch.wait_on(stream)
    held.let_go()
    error = fetch.exception(timeout=20)  # long before the stream would be released by force
    assert isinstance(error, kvpool.RouteFailed) and "wait_on" in str(error), error
    assert fake_counts("waits behind words") == 0
    # Once there is a communicator, streams may wait.
    here.fetch("there", theirs).wait()
    held = HeldWork(owners)
    fetch = here.fetch("there", theirs)
    addrs = fetch.wait_on(stream)
    held.let_go()
    assert fetch.exception() is None
    assert (content(here, HBM)[kvpool.block_ids(addrs)] == 5).all()
    wait_for(lambda: fake_counts("waits passed") == 2)  # the stream looks at its word every so often
    assert fake_counts("waits behind words") == 0
""")
