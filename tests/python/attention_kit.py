"""What the tests of attention share: small pools, random keys and values, and attention by hand."""

from __future__ import annotations

import itertools

import numpy as np
from kit import small_layout

import kvpool

BLOCK = 16


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


def lse_of(q, k, group):
    """The natural LSE of each row over all tokens of k: [head, query token]."""
    scores = np.einsum("thd,nhd->htn", q.astype(np.float64), np.repeat(k, group, axis=1)) * q.shape[2] ** -0.5
    return np.log(np.exp(scores).sum(axis=2)).astype(np.float32)
