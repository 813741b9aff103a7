"""Attention over a pool on a (fake) GPU, in a build without kernels for it: what Python says. How it computes is
tested in tests/cpp/gpu_attend_pool_test.cpp."""

from __future__ import annotations


def test_without_kernels_blocks_on_a_gpu_are_refused_and_those_in_dram_are_read(on_fake):
    on_fake("""
layout = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=64, dtype="float16", block_tokens=4)
q = np.zeros((1, 2, 64), np.float16)
with kvpool.Pool(layout, hbm_blocks=8, dram_blocks=8, device="cuda:0") as pool:
    raises(kvpool.Unsupported, lambda: pool.sequence(pool.alloc(2)), "no kernels of attention")
    with pool.sequence(pool.alloc(2, DRAM)) as seq:
        handle = pool.attend(0, q, [seq], stream=new_stream())
        assert handle.wait().finish("float16").shape == (1, 2, 64)
        plan = handle.explain()
        assert plan.gpu_kernel is None and plan.sequences[0].on_gpu == 0
        raises(kvpool.ArgumentTypeError, lambda: pool.attend(0, q, [seq], stream="mine"), "stream")
""")
