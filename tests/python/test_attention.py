"""Pool.sequence, Pool.attend and PartialAttention: attention where the blocks are equals attention by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

import numpy as np
import pytest
from kit import small_layout

import kvpool
from kvpool import DRAM, HBM, PartialAttention

BLOCK = 16
BOTH = ["HND", "NHD"]


def layout_of(**changes):
    return small_layout(**({"layers": 2, "kv_heads": 2, "head_dim": 16, "block_tokens": BLOCK} | changes))


def pool_of(layout=None, hbm=12, dram=12, **settings):
    """On the CPU always: attention of the CPU cannot read a GPU's memory."""
    return kvpool.Pool(layout or layout_of(), hbm, dram, **({"huge_pages": "never", "attend_threads": 2} | settings))


def bits(values, dtype):
    """float32 values as an array of a layout's dtype; bfloat16 as uint16, truncated."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def floats(array, dtype):
    if dtype == "bfloat16":
        return (np.asarray(array, np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)


def write_kv(pool, addrs, rng, tokens=None):
    """Fills the blocks with random numbers, and gives K and V of all layers: [layer, token, head, dim].

    Tokens from `tokens` on become NaN: they were never written.
    """
    layout = pool.kv_layout
    shape = (2, layout.layers, len(addrs) * layout.block_tokens, layout.kv_heads, layout.head_dim)
    kv = floats(bits(rng.standard_normal(shape).astype(np.float32), layout.dtype), layout.dtype)
    written = kv.copy()
    if tokens is not None:
        written[:, :, tokens:] = np.nan
    views = {medium: pool.tensor(medium).numpy() for medium in {kvpool.decode_address(a).medium for a in addrs}}
    for i, addr in enumerate(addrs):
        place = kvpool.decode_address(addr)
        block = written[:, :, i * layout.block_tokens : (i + 1) * layout.block_tokens]  # [k/v, layer, token, head, dim]
        if layout.pages == "fused":
            block = np.concatenate([block[0], block[1]], axis=-1)  # [layer, token, head, 2 * dim]
            block = block if layout.dims == "NHD" else block.swapaxes(1, 2)
        else:
            block = block.swapaxes(0, 1)  # [layer, k/v, token, head, dim]
            block = block if layout.dims == "NHD" else block.swapaxes(2, 3)
        views[place.medium][place.block] = bits(block, layout.dtype)
    return kv[0], kv[1]


def attention(q, k, v, *, scale=None, causal=True, begin=0, end=None):
    """In float64: q [query token, query head, dim], k and v [token, head, dim]; the queries are the last tokens."""
    n, group = len(k), q.shape[1] // k.shape[1]
    end = n if end is None else end
    q64, k64, v64 = q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    out = np.zeros(q.shape)
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        last = min(end, n - len(q) + t + 1) if causal else end
        scores = k64[begin:last, h // group] @ q64[t, h] * (q.shape[2] ** -0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v64[begin:last, h // group] / weights.sum()
    return out


def query(rng, tokens=1, heads=4, dim=16):
    return rng.standard_normal((tokens, heads, dim)).astype(np.float32)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("dims", "pages", "order"), list(itertools.product(BOTH, ["split", "fused"], ["aggregated", "discrete"]))
)
def test_attention_equals_attention_by_hand_in_every_layout(rng, dims, pages, order, dtype):
    with pool_of(layout_of(dims=dims, pages=pages, order=order, dtype=dtype)) as pool:
        addrs = pool.alloc(4, kvpool.MIXED)
        k, v = write_kv(pool, addrs, rng, tokens=53)
        q = query(rng)
        for layer in range(2):
            with pool.sequence(addrs, tokens=53) as seq:
                part = pool.attend(layer, q, [seq]).wait()
            assert part.covers == [[(0, 53)]]
            np.testing.assert_allclose(part.finish(), attention(q, k[layer, :53], v[layer, :53]), atol=2e-6)


def test_blocks_of_a_sequence_may_lie_in_both_tiers(rng):
    with pool_of() as pool:
        addrs = np.concatenate([pool.alloc(2, HBM), pool.alloc(2, DRAM), pool.alloc(1, HBM)])
        k, v = write_kv(pool, addrs, rng)
        q = query(rng)
        with pool.sequence(addrs) as seq:
            assert seq.tokens == 5 * BLOCK
            out = pool.attend(1, q, [seq]).wait().finish()
        np.testing.assert_allclose(out, attention(q, k[1], v[1]), atol=2e-6)


def test_a_batch_has_sequences_of_all_lengths_and_several_query_tokens_each(rng):
    with pool_of(hbm=64) as pool:
        lengths, queries = [5, 16, 100, 333], [1, 3, 16, 2]
        cases, sequences = [], []
        for n in lengths:
            addrs = pool.alloc(-(-n // BLOCK))
            cases.append(write_kv(pool, addrs, rng, tokens=n))
            sequences.append(pool.sequence(addrs, n))
        q = query(rng, sum(queries))
        out = pool.attend(0, q, sequences, query_tokens=queries).wait().finish()
        begins = np.cumsum([0, *queries])
        for (k, v), n, begin, end in zip(cases, lengths, begins[:-1], begins[1:], strict=True):
            np.testing.assert_allclose(out[begin:end], attention(q[begin:end], k[0, :n], v[0, :n]), atol=2e-6)


def test_without_causality_a_query_sees_all_tokens(rng):
    with pool_of() as pool:
        addrs = pool.alloc(2)
        k, v = write_kv(pool, addrs, rng)
        q = query(rng, 4)
        with pool.sequence(addrs) as seq:
            out = pool.attend(0, q, [seq], query_tokens=[4], causal=False, scale=0.5).wait().finish()
        np.testing.assert_allclose(out, attention(q, k[0], v[0], causal=False, scale=0.5), atol=2e-6)


def test_a_sequence_grows_while_it_is_decoded(rng):
    with pool_of() as pool:
        addrs = pool.alloc(3)
        k, v = write_kv(pool, addrs, rng)
        with pool.sequence(addrs[:1], tokens=15) as seq:
            for n in range(15, 40):
                if n == BLOCK:
                    seq.append(addrs[1:], tokens=n)
                seq.tokens = n
                q = query(rng)
                out = pool.attend(0, q, [seq]).wait().finish()
                np.testing.assert_allclose(out, attention(q, k[0, :n], v[0, :n]), atol=2e-6)
            assert seq.addrs.tolist() == addrs.tolist()


def test_the_bits_do_not_depend_on_the_number_of_threads_or_the_block_size(rng):
    n = 3000
    values = rng.standard_normal((2, 2, n, 2, 16)).astype(np.float32)
    q = query(rng)
    results = set()
    for threads, block in ((1, 16), (2, 16), (4, 64), (3, 8)):
        layout = layout_of(block_tokens=block)
        with pool_of(layout, hbm=-(-n // block), attend_threads=threads) as pool:
            addrs = pool.alloc(-(-n // block))
            view = pool.tensor(HBM).numpy()  # [block, layer, k/v, head, token, dim]
            padded = np.zeros((2, 2, len(addrs) * block, 2, 16), np.float32)
            padded[:, :, :n] = values
            cut = padded.reshape(2, 2, len(addrs), block, 2, 16).transpose(2, 1, 0, 4, 3, 5)
            view[kvpool.block_ids(addrs)] = cut
            with pool.sequence(addrs, n) as seq:
                part = pool.attend(1, q, [seq]).wait()
            assert part.exact
            assert part.kernel == pool.attend(0, q[:0], []).explain().kernel
            results.add(part.finish().tobytes())
    assert len(results) == 1


def test_an_engines_own_chunk_joins_by_its_lse(rng):
    """K and V of the first 64 tokens are attended to by another kernel, of the others by the pool."""
    with pool_of() as pool:
        addrs = pool.alloc(6)
        k, v = write_kv(pool, addrs, rng)
        q = query(rng)
        with pool.sequence(addrs) as seq:
            whole = pool.attend(0, q, [seq]).wait()
        scores = np.einsum("hd,thd->ht", q[0], np.repeat(k[0, :64], 2, axis=1)) * 16**-0.5
        lse = np.log(np.exp(scores).sum(axis=1)).astype(np.float32)[:, None]  # [head, token]
        out = attention(q, k[0, :64], v[0, :64]).astype(np.float32)
        engine = PartialAttention.from_lse(out, lse, base="e", order="heads_first", covers=[[(0, 64)]])
        scores = np.einsum("hd,thd->ht", q[0], np.repeat(k[0, 64:], 2, axis=1)) * 16**-0.5
        rest = PartialAttention.from_lse(
            attention(q, k[0, 64:], v[0, 64:]).astype(np.float32),
            np.log2(np.exp(scores).sum(axis=1)).astype(np.float32)[None],
            base=2,
            order="tokens_first",
            covers=[[(64, 96)]],
        )
        for merged in (engine.merge(rest), rest.merge(engine)):
            assert merged.covers == [[(0, 96)]]
            assert not merged.exact
            assert merged.kernel is None
            np.testing.assert_allclose(merged.finish(tokens=[96]), whole.finish(), atol=2e-6)
        np.testing.assert_allclose(engine.lse(base="e", order="heads_first"), lse, atol=1e-5)
        np.testing.assert_allclose(
            engine.merge(rest).lse(base=2, order="tokens_first"), whole.lse(base=2, order="tokens_first"), atol=1e-5
        )


def test_a_part_that_is_missing_or_merged_twice_is_no_result(rng):
    out, lse = query(rng), np.zeros((4, 1), np.float32)

    def part(begin, end):
        return PartialAttention.from_lse(out, lse, base="e", order="heads_first", covers=[[(begin, end)]])

    both = part(0, 10).merge(part(20, 30))
    with pytest.raises(kvpool.StateError) as missing:
        both.finish(tokens=[30])
    assert (missing.value.begin, missing.value.end) == (10, 20)
    with pytest.raises(kvpool.ArgumentError):
        both.merge(part(25, 26))
    with pytest.raises(kvpool.StateError):
        part(0, 10).finish(tokens=[9])
    with pytest.raises(kvpool.ArgumentError, match="pass tokens"):
        part(0, 10).finish()
    target = np.full(out.shape, 7, np.float32)
    with pytest.raises(kvpool.StateError):
        both.finish(tokens=[30], out=target)
    assert (target == 7).all()
    assert both.merge(part(10, 20)).finish(tokens=[30], out=target) is target
    np.testing.assert_allclose(target, out, atol=2e-6)


def test_blocks_freed_while_a_sequence_holds_them_are_reused_when_it_is_closed():
    with pool_of(hbm=4, dram=0) as pool:
        addrs = pool.alloc(4)
        seq = pool.sequence(addrs)
        pool.free(addrs)
        with pytest.raises(kvpool.OutOfBlocks):
            pool.alloc(1)
        seq.close()
        seq.close()
        assert len(pool.alloc(4)) == 4
        assert seq.closed
        pool.audit()


def test_cached_blocks_that_a_sequence_holds_are_not_evicted(rng):
    with pool_of(hbm=4, dram=0) as pool:
        tokens = np.arange(2 * BLOCK, dtype=np.int32)
        addrs = pool.alloc(2)
        k, v = write_kv(pool, addrs, rng)
        pool.insert(tokens, addrs).close()
        q = query(rng)
        with pool.match(tokens) as hit:
            seq = pool.sequence(hit.addrs)
        with seq:
            with pytest.raises(kvpool.OutOfBlocks):
                pool.alloc(4)
            out = pool.attend(0, q, [seq]).wait().finish()
            np.testing.assert_allclose(out, attention(q, k[0], v[0]), atol=2e-6)


def test_a_dropped_sequence_lets_its_blocks_go():
    with pool_of(hbm=4, dram=0) as pool:
        addrs = pool.alloc(4)
        seq = pool.sequence(addrs)
        pool.free(addrs)
        del seq
        assert len(pool.alloc(4)) == 4


def test_a_coroutine_awaits_attention(rng):
    async def main(pool, seq, q):
        return [await attend for attend in [pool.attend(layer, q, [seq]) for layer in (0, 1)]]

    with pool_of() as pool:
        addrs = pool.alloc(4)
        k, v = write_kv(pool, addrs, rng)
        q = query(rng)
        with pool.sequence(addrs) as seq:
            parts = asyncio.run(main(pool, seq, q))
        for layer, part in enumerate(parts):
            np.testing.assert_allclose(part.finish(), attention(q, k[layer], v[layer]), atol=2e-6)


def test_many_calls_at_once_give_what_each_gives_alone(rng):
    with pool_of(hbm=64, attend_threads=4) as pool:
        addrs = pool.alloc(64)
        write_kv(pool, addrs, rng)
        queries = [query(rng) for _ in range(24)]
        with pool.sequence(addrs) as seq:
            alone = [pool.attend(1, q, [seq]).wait().finish().tobytes() for q in queries]
            handles = [pool.attend(1, q, [seq]) for q in queries]
            assert [handle.wait().finish().tobytes() for handle in handles] == alone
            assert all(handle.done() and handle.exception() is None and not handle.cancel() for handle in handles)


def test_a_closed_pool_ends_attention_and_keeps_what_was_computed(rng):
    pool = pool_of()
    addrs = pool.alloc(4)
    k, v = write_kv(pool, addrs, rng)
    q = query(rng)
    seq = pool.sequence(addrs)
    handle = pool.attend(0, q, [seq])
    part = handle.wait()
    pool.close()
    np.testing.assert_allclose(handle.wait().finish(), part.finish())
    np.testing.assert_allclose(part.finish(), attention(q, k[0], v[0]), atol=2e-6)
    for call in (lambda: pool.attend(0, q, [seq]), lambda: pool.sequence(addrs), lambda: seq.append(addrs)):
        with pytest.raises(kvpool.ClosedError):
            call()
    seq.close()


def test_a_pool_that_is_dropped_while_attention_is_computed_ends_well(rng):
    before = len(os.listdir("/proc/self/task"))
    for _ in range(30):
        pool = pool_of(layout_of(kv_heads=4, head_dim=64), hbm=256)
        addrs = pool.alloc(256)
        seq = pool.sequence(addrs)
        pool.attend(0, query(rng, heads=16, dim=64), [seq])  # a thread of the pool computes it
        del pool, seq
    deadline = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > before:  # a thread that waits for itself would stay
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_an_engine_allocates_stays_until_its_sequence_is_closed():
    tensors = [np.zeros((2, 8, 2, BLOCK, 16), np.float32) for _ in range(2)]
    with kvpool.Pool(layout_of(), hbm=tensors, block_dim=1, engine_allocates=True) as pool:
        tensors[1][0, 3] = 1.0  # K
        tensors[1][1, 3] = np.arange(BLOCK)[:, None]  # V: all weights are equal, so the mean is the result
        addrs = pool.adopt([3])
        with pool.sequence(addrs) as seq:
            out = pool.attend(1, np.ones((1, 2, 16), np.float32), [seq]).wait().finish()
            np.testing.assert_allclose(out, np.full((1, 2, 16), (BLOCK - 1) / 2), rtol=1e-6)
            with pytest.raises(kvpool.StateError, match="sequence"):
                pool.free(addrs)
        pool.free(addrs)


def test_results_come_in_the_type_that_is_asked_for(rng):
    with pool_of() as pool:
        addrs = pool.alloc(1)
        write_kv(pool, addrs, rng)
        with pool.sequence(addrs) as seq:
            for dtype in ("float32", "float16", "bfloat16"):
                q = bits(query(rng), dtype)
                part = pool.attend(0, q, [seq]).wait()
                exact = part.finish()
                as_given = part.finish(dtype)
                assert as_given.dtype == ("uint16" if dtype == "bfloat16" else dtype)
                np.testing.assert_allclose(floats(as_given, dtype), exact, rtol=2**-8)


def test_torch_tensors_go_in_and_out(rng):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    with pool_of(layout_of(dtype="bfloat16")) as pool:
        addrs = pool.alloc(2)
        k, v = write_kv(pool, addrs, rng)
        q = torch.randn(1, 4, 16).to(torch.bfloat16)
        out = torch.empty_like(q)
        with pool.sequence(addrs) as seq:
            assert pool.attend(0, q, [seq]).wait().finish(out=out) is out
            with pytest.raises(kvpool.ArgumentError, match="contiguous"):
                pool.attend(0, q.transpose(1, 2), [seq])
        wanted = attention(q.float().numpy(), k[0], v[0])
        np.testing.assert_allclose(out.float().numpy(), wanted, rtol=2**-7, atol=2**-8)


def test_wrong_arguments_are_told_and_change_nothing(rng):
    with pool_of(hbm=4) as pool, pool_of(hbm=4) as other:
        addrs = pool.alloc(2)
        q = query(rng)
        seq, foreign = pool.sequence(addrs, tokens=20), other.sequence(other.alloc(1))
        closed = pool.sequence(addrs)
        closed.close()
        wrong = kvpool.ArgumentError
        for error, match, call in (
            (wrong, "2 layers", lambda: pool.attend(2, q, [seq])),
            (wrong, "layer", lambda: pool.attend(-1, q, [seq])),
            (wrong, "shape", lambda: pool.attend(0, q, [seq, seq])),
            (wrong, "shape", lambda: pool.attend(0, query(rng, dim=8), [seq])),
            (wrong, "heads", lambda: pool.attend(0, query(rng, heads=3), [seq])),
            (wrong, "format 'd'", lambda: pool.attend(0, q.astype(np.float64), [seq])),
            (wrong, "last 30", lambda: pool.attend(0, query(rng, 30), [seq], query_tokens=[30])),
            (wrong, "query_tokens has 2", lambda: pool.attend(0, q, [seq], query_tokens=[1, 1])),
            (wrong, "scale", lambda: pool.attend(0, q, [seq], scale=float("nan"))),
            (kvpool.ArgumentTypeError, "seqs", lambda: pool.attend(0, q, [addrs])),
            (kvpool.ArgumentTypeError, "q must be", lambda: pool.attend(0, "q", [seq])),
            (kvpool.NotOwner, "another pool", lambda: pool.attend(0, q, [foreign])),
            (kvpool.StateError, "closed", lambda: pool.attend(0, q, [closed])),
            (wrong, "hold", lambda: pool.sequence(addrs, tokens=33)),
            (wrong, "hold", lambda: setattr(seq, "tokens", 33)),
            (kvpool.NotOwner, "instance 5", lambda: pool.sequence([int(addrs[0]) | 5 << 50])),
            (kvpool.StaleAddress, "freed or moved", lambda: seq.append([int(addrs[0]) + (1 << 24)])),
        ):
            with pytest.raises(error, match=match):
                call()
        assert (seq.tokens, len(seq.addrs)) == (20, 2)
        seq.close()
        pool.free(addrs)
        assert pool.stats().hbm.free == 4
        pool.audit()


@pytest.mark.parametrize(
    ("layout", "match"),
    [(kvpool.RawLayout(64), "KVLayout"), (layout_of(dtype="int8"), "int8"), (layout_of(dtype="float8_e5m2"), "e5m2")],
)
def test_blocks_that_attention_cannot_read_are_refused(layout, match):
    with pool_of(layout) as pool:
        addrs = pool.alloc(1)
        with pytest.raises(kvpool.Unsupported, match=match):
            pool.sequence(addrs)
        pool.free(addrs)
