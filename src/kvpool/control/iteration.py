"""One iteration of an instance: requests that decode, and a piece of a prompt that is prefilled at the same time.

Composed of a rank's operators, for NumPy and PyTorch alike. All rows go through each matrix together, as in engines
that batch continuously; attention is over the KV cache of each request alone.
"""

from __future__ import annotations

from typing import Any

from kvpool.control.timing import Rank

__all__ = ["iterate"]

Array = Any


def iterate(rank: Rank, ids: Array, batch: int, context: int) -> Array:
    """Decodes a token of each of `batch` requests; what `ids` has beyond them is the end of one more prompt.

    The KV caches of the requests lie one after the other in the blocks of the rank; the prompt's are those of the
    first. Positions count from 0 for all rows, which changes no time.

    Args:
        rank: REQUIRES: it has KV cache for batch * context tokens, and as many positions as there are ids.
        ids: Of one token for each request, and of the piece of the prompt, at most `context`.
        batch: Requests that decode; 1 or more.
        context: Tokens of each request, the one that is decoded included; whole blocks.

    Returns:
        Logits of the requests that decode, [batch, vocab / tp].
    """
    stream = rank.embedding(ids)
    for layer in range(rank.model.layers):
        q, k, v = rank.rope(rank.qkv(layer, rank.norm(layer, stream, 0)), 0)
        rank.kv_store(layer, k, v, 0)
        mixed = attend(rank, layer, q, batch, context)
        rank.residual(stream, rank.attn_out(layer, mixed))
        rank.residual(stream, rank.down(layer, rank.activation(rank.gate_up(layer, rank.norm(layer, stream, 1)))))
    return rank.lm_head(stream[:batch])


def attend(rank: Rank, layer: int, q: Array, batch: int, context: int) -> Array:
    """Attention of all rows: q [kv head, group, rows, dim] -> [rows, heads dim]."""
    kv_heads, group, rows, dim = q.shape
    keys, values = rank.gather(layer, batch * context)
    each = (kv_heads * batch, context, dim)  # a request is to attention what a head is: it sees itself alone
    queries = q[:, :, :batch].swapaxes(1, 2).reshape(kv_heads * batch, group, 1, dim)
    decoded = rank.attention(queries, keys.reshape(each), values.reshape(each), context - 1)
    decoded = decoded.reshape(kv_heads, batch, group * dim).swapaxes(0, 1).reshape(batch, -1)
    if rows == batch:
        return decoded
    keys, values = rank.gather(layer, context)
    piece = rank.attention(rank.contiguous(q[:, :, batch:]), keys, values, context - (rows - batch))
    return rank.join(decoded, piece)
