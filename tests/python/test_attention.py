"""Pool.sequence, Pool.attend and PartialAttention: attention where the blocks are equals attention by hand."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time

import numpy as np
import pytest
from attention_kit import BLOCK, attention, bits, floats, layout_of, lse_of, pool_of, query, write_kv

import kvpool
from kvpool import DRAM, HBM, PartialAttention

BOTH = ["HND", "NHD"]


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


def test_a_prefix_in_the_pool_joins_an_engines_chunk_of_several_tokens(rng):
    with pool_of() as pool:
        addrs = pool.alloc(6)
        k, v = write_kv(pool, addrs, rng)
        q = query(rng, 16)  # at positions 80 to 95
        with pool.sequence(addrs) as seq:
            whole = pool.attend(0, q, [seq], query_tokens=[16]).wait().finish()
        chunk = attention(q, k[0, 80:], v[0, 80:]).astype(np.float32)  # causal within the chunk
        lse = np.stack([lse_of(q[t : t + 1], k[0, 80 : 81 + t], 2)[:, 0] for t in range(16)], axis=1)
        engine = PartialAttention.from_lse(
            chunk, lse, base="e", order="heads_first", covers=[[(80, 96)]], query_tokens=[16]
        )
        with pool.sequence(addrs[:5]) as prefix:
            seen_by_all = pool.attend(0, q, [prefix], query_tokens=[16], causal=False).wait()
            at_its_end = pool.attend(0, q, [prefix], query_tokens=[16]).wait()
        np.testing.assert_allclose(seen_by_all.merge(engine).finish(tokens=[96]), whole, atol=2e-6)
        for merge in (lambda: at_its_end.merge(engine), lambda: engine.merge(at_its_end)):
            with pytest.raises(kvpool.ArgumentError, match="causal=False"):
                merge()


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


def test_a_closed_pool_keeps_what_was_computed_and_refuses_more(rng):
    pool = pool_of()
    addrs = pool.alloc(4)
    k, v = write_kv(pool, addrs, rng)
    q = query(rng)
    seq = pool.sequence(addrs)
    handle = pool.attend(0, q, [seq])
    assert handle.exception() is None
    pool.close()
    np.testing.assert_allclose(handle.wait().finish(), attention(q, k[0], v[0]), atol=2e-6)
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


def test_an_engine_may_reuse_its_tensors_when_the_pool_is_closed():
    """Also while threads wait, each of which may compute what it waits for."""
    blocks = 1024
    tensors = [np.ones((2, blocks, 2, BLOCK, 16), np.float32)]
    outcomes = []

    def waits(handle):
        try:
            outcomes.append(np.unique(handle.wait().finish()).tolist())
        except kvpool.ClosedError:
            outcomes.append([1.0])

    for _ in range(5):
        tensors[0][:] = 1.0
        pool = kvpool.Pool(layout_of(layers=1), hbm=tensors, block_dim=1)
        seq = pool.sequence(pool.alloc(blocks))
        handles = [pool.attend(0, np.zeros((1, 2, 16), np.float32), [seq]) for _ in range(12)]
        threads = [threading.Thread(target=waits, args=(handle,)) for handle in reversed(handles)]
        for thread in threads:
            thread.start()
        pool.close()
        tensors[0][:] = 5.0
        for thread in threads:
            thread.join()
    assert outcomes == [[1.0]] * 60


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
