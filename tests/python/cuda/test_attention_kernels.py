"""The Triton kernels of attention, interpreted: equal to attention in double, and to the CPU's kernels.

No GPU is needed, but Triton and torch. What the machine code does, no test without a GPU can say.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from attention_kit import bits, floats, layout_of, pool_of, write_kv
from cuda.triton_kit import GUARD, LEAF, Item, Run, joined, launch, need_triton, variants
from kit import LONG

import kvpool

need_triton()
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
BOTH = ["HND", "NHD"]
DTYPES = ["float32", "float16", "bfloat16"]
# The interpreter rounds to bfloat16 towards zero, a GPU to the nearest.
TOLERANCE = {"float32": 4e-6, "float16": 4e-6, "bfloat16": 3e-5}
HEADS = [(4, 4), (8, 2), (6, 1)]  # query heads and KV heads: MHA, GQA, MQA


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def gpu_layout(**changes):
    return layout_of(**({"head_dim": 64, "dtype": "float16"} | changes))


def queries(rng, pool, tokens=1, heads=4):
    """Random ones, in the bits of the pool's type."""
    layout = pool.kv_layout
    return bits(rng.standard_normal((tokens, heads, layout.head_dim)).astype(np.float32), layout.dtype)


def reference(q, k, v, *, scale, begin, end, query_begin=None):
    """In double: q [query token, query head, dim], k and v [token, head, dim]. Output, and lse [head, query token]."""
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full((q.shape[1], q.shape[0]), -np.inf)
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        last = end if query_begin is None else min(end, query_begin + t + 1)
        if last <= begin:
            continue
        scores = k[begin:last, h // group].astype(np.float64) @ q[t, h].astype(np.float64) * scale
        most = scores.max()
        if np.isneginf(most):
            continue
        weights = np.exp(scores - most)
        out[t, h] = weights @ v[begin:last, h // group].astype(np.float64) / weights.sum()
        lse[h, t] = (most + np.log(weights.sum())) / np.log(2)
    return out, lse


def check(run, layer, cases, *, scale=None, tolerance=None):
    """Each item's nodes together are attention over its tokens."""
    dtype = run.pool.kv_layout.dtype
    tolerance = tolerance or TOLERANCE[dtype]
    scale = run.dim**-0.5 if scale is None else scale
    for item, nodes, (k, v) in zip(run.items, run.merge_nodes(), cases, strict=True):
        q = floats(item.q, dtype)
        want, want_lse = reference(
            q, k[layer], v[layer], scale=scale, begin=item.begin, end=item.end, query_begin=item.query_begin
        )
        out, lse = joined(nodes)
        np.testing.assert_allclose(out, want, atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, atol=2.5 * tolerance)
    run.check_guards()


def on_cpu(pool, layer, item, q_bits):
    """What the CPU's kernel says: output, and lse in base 2."""
    q = q_bits.view(np.int16) if pool.kv_layout.dtype == "bfloat16" else q_bits
    tensor = torch.from_numpy(q.copy())
    if pool.kv_layout.dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    with pool.sequence(item.addrs, item.end) as seq:
        part = pool.attend(layer, tensor, [seq], query_tokens=[len(q)], causal=item.query_begin is not None).wait()
    return part.finish("float32"), part.lse(base=2, order="heads_first")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_heads", "kv_heads"), HEADS)
def test_leaves_equal_attention_in_double_and_on_the_cpu(rng, query_heads, kv_heads, dtype):
    with pool_of(gpu_layout(kv_heads=kv_heads, dtype=dtype), hbm=32) as pool:
        addrs = pool.alloc(9)[rng.permutation(9)]
        kv = write_kv(pool, addrs, rng, tokens=137)
        item = Item(addrs, queries(rng, pool, heads=query_heads), 0, 137, 136)
        run = Run(pool, 1, [item])
        run.compute_leaves()
        check(run, 1, [kv])
        out, lse = on_cpu(pool, 1, item, item.q)
        (node,) = run.leaf_nodes()[0]
        np.testing.assert_allclose(node.out, out, atol=TOLERANCE[dtype])
        np.testing.assert_allclose(node.lse.reshape(-1), np.asarray(lse).reshape(-1), atol=1e-5)


@pytest.mark.parametrize(("dims", "pages"), list(itertools.product(BOTH, ["split", "fused"])))
@pytest.mark.parametrize("dtype", DTYPES if LONG else ["bfloat16"])
def test_every_layout(rng, dims, pages, dtype):
    with pool_of(gpu_layout(dims=dims, pages=pages, dtype=dtype, head_dim=128), hbm=32) as pool:
        addrs = pool.alloc(5)[rng.permutation(5)]
        kv = write_kv(pool, addrs, rng, tokens=70)
        for layer in range(2):
            run = Run(pool, layer, [Item(addrs, queries(rng, pool), 0, 70, 69)])
            run.compute_leaves()
            check(run, layer, [kv])


def test_a_batch_of_many_lengths_with_several_query_tokens_each(rng):
    with pool_of(gpu_layout(dtype="bfloat16"), hbm=200) as pool:
        items, cases = [], []
        for tokens, asked in [(5, 1), (16, 3), (100, 16), (1100, 2), (64, 5)]:
            addrs = pool.alloc(-(-tokens // 16))
            cases.append(write_kv(pool, addrs, rng, tokens=tokens))
            items.append(Item(addrs, queries(rng, pool, asked, 8), 0, tokens, tokens - asked))
        run = Run(pool, 0, items)
        run.compute_leaves()
        check(run, 0, cases)


def test_a_query_sees_the_tokens_up_to_its_own_and_all_without_causality(rng):
    """A leaf that lies behind some of the queries, and one that lies behind all of them."""
    with pool_of(gpu_layout(block_tokens=64), hbm=40) as pool:
        addrs = pool.alloc(18)
        kv = write_kv(pool, addrs, rng)
        q = queries(rng, pool, 4)
        for query_begin in (1022, 30, None):
            run = Run(pool, 0, [Item(addrs, q, 0, 1100, query_begin)])
            run.compute_leaves()
            nodes = run.leaf_nodes()[0]
            if query_begin == 30:
                assert all(np.isneginf(node.most).all() and not node.total.any() for node in nodes[1:])
                assert not any(node.acc.any() for node in nodes[1:])
            check(run, 0, [kv])


def test_ranges_that_begin_and_end_within_leaves_and_blocks(rng):
    with pool_of(gpu_layout(), hbm=150) as pool:
        addrs = pool.alloc(140)[rng.permutation(140)]
        kv = write_kv(pool, addrs, rng)
        for begin, end in [(3, 4), (17, 1000), (1000, 1100), (1024, 2048), (2047, 2200)]:
            run = Run(pool, 1, [Item(addrs, queries(rng, pool), begin, end)])
            run.compute_leaves()
            check(run, 1, [kv])


def test_scores_of_minus_infinity_have_no_weight(rng):
    """A whole tile of them first, then some, then a leaf of nothing else: none is NaN."""
    with pool_of(gpu_layout(dtype="float32", kv_heads=1), hbm=140) as pool:
        addrs = pool.alloc(130)
        write_kv(pool, addrs, rng)
        memory = pool.tensor(kvpool.HBM).numpy()  # [block, layer, K or V, head, token, dim]
        hidden = np.zeros(130 * 16, bool)
        hidden[:100] = hidden[150:160] = hidden[1024:] = True
        for i, addr in enumerate(addrs):
            place = kvpool.decode_address(addr).block
            memory[place, 0, 0, 0, hidden[i * 16 : i * 16 + 16]] = -np.inf
        k, v = (
            np.concatenate([memory[kvpool.decode_address(a).block, 0, part].swapaxes(0, 1) for a in addrs])
            for part in range(2)
        )
        q = np.abs(queries(rng, pool)) + 1
        run = Run(pool, 0, [Item(addrs, q, 0, 2080)])
        run.compute_leaves()
        first, second, tail = run.leaf_nodes()[0]
        for node in (second, tail):
            assert np.isneginf(node.most).all()
            assert not node.total.any()
            assert not node.acc.any()
        assert np.isfinite(first.acc).all()
        check(run, 0, [((k, k), (v, v))])


def test_scores_far_apart_and_a_scale(rng):
    """The maximum rises from tile to tile, by more than float32 can weigh, and falls again."""
    with pool_of(gpu_layout(dtype="float32", kv_heads=1), hbm=40) as pool:
        addrs = pool.alloc(20)
        write_kv(pool, addrs, rng)
        memory = pool.tensor(kvpool.HBM).numpy()
        for i, addr in enumerate(addrs):
            memory[kvpool.decode_address(addr).block, :, 0] = (i % 10) * 3.0
        k, v = (
            np.concatenate([memory[kvpool.decode_address(a).block, 0, part].swapaxes(0, 1) for a in addrs])
            for part in range(2)
        )
        run = Run(pool, 0, [Item(addrs, np.abs(queries(rng, pool)), 0, 320)], scale=0.25)
        run.compute_leaves()
        check(run, 0, [((k, k), (v, v))], scale=0.25, tolerance=4e-5)  # of scores up to 500


def test_placements_do_not_change_a_bit(rng):
    """Blocks elsewhere, of another size, in another layout, and other sequences in the batch: the same bits."""
    results = []
    for dims, block_tokens, others in [("HND", 16, 0), ("NHD", 64, 1), ("HND", 48, 2)]:
        with pool_of(gpu_layout(dims=dims, block_tokens=block_tokens, dtype="bfloat16"), hbm=200) as pool:
            same = np.random.default_rng(5)
            k, v = (same.standard_normal((1200, 2, 64)).astype(np.float32) for _ in range(2))
            addrs = pool.alloc(-(-1200 // block_tokens))
            addrs = addrs[rng.permutation(len(addrs))]
            memory = pool.tensor(kvpool.HBM).numpy()
            for i, addr in enumerate(addrs):
                for part, values in enumerate((k, v)):
                    block = values[i * block_tokens : (i + 1) * block_tokens]
                    place = memory[kvpool.decode_address(addr).block, 0, part]
                    (place if dims == "NHD" else place.swapaxes(0, 1))[: len(block)] = bits(block, "bfloat16")
            item = Item(addrs, queries(same, pool, 2), 0, 1200, 1198)
            beside = [Item(addrs[:1], queries(rng, pool), 0, 7) for _ in range(others)]
            run = Run(pool, 0, [*beside, item])
            run.compute_leaves()
            results.append(run.leaf_nodes()[-1])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            for one, two in ((a.acc, b.acc), (a.most, b.most), (a.total, b.total)):
                np.testing.assert_array_equal(one.view(np.uint32), two.view(np.uint32))


def test_a_node_of_many_leaves_merges_along_the_tree(rng):
    with pool_of(gpu_layout(kv_heads=1, block_tokens=256, layers=1), hbm=40) as pool:
        addrs = pool.alloc(29)  # 7 leaves and a piece of 256: nodes of 4, 2 and 1 leaves
        kv = write_kv(pool, addrs, rng)
        run = Run(pool, 0, [Item(addrs, queries(rng, pool, heads=2), 0, 7424, 7423)])
        run.compute_leaves()
        check(run, 0, [kv])
        nodes = [(node.begin, node.end) for node in run.merge_nodes()[0]]
        assert nodes == [(0, 4 * LEAF), (4 * LEAF, 6 * LEAF), (6 * LEAF, 7 * LEAF), (7 * LEAF, 7424)]


@pytest.fixture(scope="module")
def merge_rows(tmp_path_factory):
    """merge_rows.cpp, for ctypes: merge(left, right, rows, dim) on nodes in float32."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("merge_rows")
    (folder / "merge.cpp").write_text(
        '#include "kvpool/attention/merge_rows.cpp"\n'
        'extern "C" void merge(float* a, const float* b, std::size_t n, std::size_t dim) {\n'
        "  kvpool::merge_rows({a, a + n * dim, a + n * (dim + 1)}, {b, b + n * dim, b + n * (dim + 1)}, n, dim);\n}\n"
    )
    command = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-I", ROOT / "cpp"]
    subprocess.run([*command, folder / "merge.cpp", "-o", folder / "merge.so"], check=True)
    function = ctypes.CDLL(str(folder / "merge.so")).merge
    array = np.ctypeslib.ndpointer(np.float32)
    function.argtypes = [array, array, ctypes.c_size_t, ctypes.c_size_t]
    function.restype = None
    return function


@pytest.mark.parametrize("dim", [64, 128])
def test_merges_have_the_bits_of_the_cpu(rng, merge_rows, dim):
    """Maxima far apart, equal, -inf on either or both sides, NaN, and of both zeros."""
    rows = 53
    size = rows * (dim + 2)
    stride = size + GUARD + -(size + GUARD) % 4
    values = rng.standard_normal(4 * stride).astype(np.float32)
    special = [0.0, -0.0, -np.inf, 5.0, 130.0, -3.25, np.nan]
    left, right = np.array(list(itertools.product(special, special)), np.float32).T
    for at, most in [(0, left), (stride, right), (2 * stride, right), (3 * stride, left)]:
        values[at + rows * dim : at + rows * dim + len(most)] = most
    want = values.copy()
    with np.errstate(all="ignore"):
        pairs = np.array([[0, stride, rows], [2 * stride, 3 * stride, rows]], np.int64)
        variant = variants.variant_of("merge_pairs", "", dim)
        launch(variant, (2, -(-rows // variant.rows)), values=(values, 0), pairs=(pairs, 0))
    for a, b, _ in pairs:
        merge_rows(want[a : a + size], want[b : b + size], rows, dim)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values.view(np.uint32)[~nan], want.view(np.uint32)[~nan])
