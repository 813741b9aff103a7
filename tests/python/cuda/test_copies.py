"""How often each byte is copied on its way between two pools: by the copy engines of the GPUs, and by NCCL.

The table is that of docs/internals/copies.md. What the CPU and the kernel copy is not counted here.
"""

from __future__ import annotations

import pytest

# (from, to): copies by the copy engines of the two GPUs. The fewest there are: one where a GPU reaches both sides, one
# a side where content goes by the host, none for what is on the host anyway.
BY_ROUTE = {
    "loopback": {("HBM", "HBM"): 1, ("HBM", "DRAM"): 1, ("DRAM", "HBM"): 1, ("DRAM", "DRAM"): 0},
    "cuda_ipc": {("HBM", "HBM"): 1, ("HBM", "DRAM"): 1, ("DRAM", "HBM"): 1},
    "sock": {("HBM", "HBM"): 2, ("HBM", "DRAM"): 1, ("DRAM", "HBM"): 1, ("DRAM", "DRAM"): 0},
}
SETUP = """
nbytes = byte_layout().block_bytes
BLOCKS = 3

def engine_pool(device, **settings):
    number = int(device.partition(":")[2])
    new_stream(number)  # its context is current: what is allocated below is on this GPU
    layers = [EngineTensor((8, *byte_layout().shape[1:]), "|u1") for _ in range(2)]
    return kvpool.Pool(byte_layout(), hbm=layers, dram_blocks=8, huge_pages="never", audit=True, **settings)

def pool_on(device, adopted, **settings):
    settings |= {"lease_s": 10.0, "measure_routes": False, "pin_dram": "auto"}
    if adopted:
        return engine_pool(device, **settings)
    return small_pool(device=device, layout=byte_layout(), **settings)

def copies(verb):
    before = fake_counts("bytes copied")
    verb()
    copied = fake_counts("bytes copied") - before
    assert copied % (BLOCKS * nbytes) == 0, copied
    return copied // (BLOCKS * nbytes)

def stamped(pool, medium):
    addrs = pool.alloc(BLOCKS, medium=medium)
    if pool.arena(medium).owned:
        content(pool, medium)[kvpool.block_ids(addrs)] = 7
    return addrs

def arrived(here, source, there, addrs):
    # Looks where both can be seen: what an engine's tensors hold, other tests say.
    target = kvpool.decode_address(int(addrs[0])).medium
    if not (here.arena(source).owned and there.arena(target).owned):
        return True
    return bool((content(there, target)[kvpool.block_ids(addrs)] == 7).all())
"""


@pytest.mark.parametrize("route", BY_ROUTE)
def test_a_transfer_copies_each_byte_as_often_as_its_route_has_to(on_fake, route):
    on_fake(f"""
{SETUP}
for adopts in itertools.product((False, True), repeat=2):
    if {route!r} == "cuda_ipc" and adopts[1]:
        continue  # the handle of an engine's memory is for another process: test_ranks.py has those
    here, there = (
        pool_on(device, adopted, routes=({route!r},)) for device, adopted in zip(("cuda:0", "cuda:0"), adopts))
    with here, there:
        assert here.connect(there.listen(address_of({route!r}), name="there")) == "there"
        for (source, target), expected in {BY_ROUTE[route]!r}.items():
            addrs = stamped(here, getattr(kvpool, source))
            got = []
            medium = getattr(kvpool, target)
            made = copies(lambda: got.extend(here.transfer("there", addrs, medium=medium).wait().addrs))
            assert arrived(here, getattr(kvpool, source), there, got)
            assert made == expected, (adopts, source, target, made)
            here.free(addrs)
            there.free(got)
""")


def test_a_transfer_by_nccl_gathers_and_scatters_only_where_blocks_do_not_lie_in_a_row(on_fake, fake_nccl):
    on_fake(f"""
{SETUP}
nccl = ctypes.CDLL({str(fake_nccl)!r})
nccl.fake_nccl_count.restype = ctypes.c_size_t
# Aggregated blocks are sent from where they lie and received where they belong; an engine's layers are gathered into a
# run first, and scattered from one.
for adopts in itertools.product((False, True), repeat=2):
    here, there = (
        pool_on(device, adopted, routes=("nccl",), nccl={str(fake_nccl)!r})
        for device, adopted in zip(("cuda:0", "cuda:1"), adopts))
    with here, there:
        assert here.connect(there.listen(address_of("sock"), name="there")) == "there"
        addrs = stamped(here, HBM)
        got = []
        sent = nccl.fake_nccl_count(b"bytes sent")
        made = copies(lambda: got.extend(here.transfer("there", addrs, medium=HBM).wait().addrs))
        assert nccl.fake_nccl_count(b"bytes sent") - sent == BLOCKS * nbytes
        assert arrived(here, HBM, there, got)
        assert made == sum(adopts), (adopts, made)
""")


def test_a_swap_copies_each_byte_once_either_way(on_fake):
    on_fake(f"""
{SETUP}
for adopted in (False, True):
    with pool_on("cuda:0", adopted) as pool:
        tokens = prompt(BLOCKS)
        store(pool, tokens)
        assert copies(lambda: pool.swap_out(BLOCKS)) == 1
        with pool.match(tokens) as hit:
            held = []
            assert copies(lambda: held.append(pool.swap_in(hit.addrs))) == 1
            held[0].__exit__(None, None, None)
""")
