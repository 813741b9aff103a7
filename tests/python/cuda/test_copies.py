"""How often a GPU copies each byte of a swap. What transfers copy, tests/cpp/copies_test.cpp counts."""

from __future__ import annotations


def test_a_swap_copies_each_byte_once_either_way(on_fake):
    on_fake("""
layout = byte_layout()
BLOCKS = 3

def make_pool(adopted):
    if not adopted:
        return small_pool(device="cuda:0", layout=layout, pin_dram="auto")
    new_stream(0)  # its context is current: allocations below are on this GPU
    layers = [EngineTensor((8, *layout.shape[1:]), "|u1") for _ in range(2)]
    return kvpool.Pool(layout, hbm=layers, dram_blocks=8, huge_pages="never", audit=True, pin_dram="auto")

def copies(verb):
    before = fake_counts("bytes copied")
    verb()
    return (fake_counts("bytes copied") - before) / (BLOCKS * layout.block_bytes)

for adopted in (False, True):
    with make_pool(adopted) as pool:
        tokens = prompt(BLOCKS)
        store(pool, tokens)
        assert copies(lambda: pool.swap_out(BLOCKS)) == 1
        with pool.match(tokens) as hit:
            held = []
            assert copies(lambda: held.append(pool.swap_in(hit.addrs))) == 1
            held[0].__exit__(None, None, None)
""")
