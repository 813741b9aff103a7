"""Where the pages of SGLang's tensors lie: as pieces, each a view of bytes of shape [pages, bytes of the piece].

kvpool copies pages and does not look into them. So a page is a row of bytes of each piece, in the order in which
SGLang's own flat pages have them: all layers' K, then all layers' V; or one piece where a page lies in one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.errors import LayoutMismatch, Unsupported
from kvpool.types import KVLayout

__all__ = ["device_pieces", "host_pieces", "layout_of"]

_SCALES = (
    "k_scale_buffer", "v_scale_buffer", "kv_scale_buffer", "native_k_scale_buffer", "native_v_scale_buffer",
)  # fmt: skip
_PAGED = ("page_first_direct", "page_head")  # SGLang's host layouts whose first dimension counts pages


def device_pieces(kvcache: Any, page_tokens: int) -> list[Any]:
    """The pieces of SGLang's device memory.

    Args:
        kvcache: SGLang's ``MHATokenToKVPool`` or ``MLATokenToKVPool``: for each layer's K and V, or for its latent, a
            tensor with a row for each token.
        page_tokens: Tokens in a page of SGLang's tree.

    Raises:
        Unsupported: It is another kind of memory: with scales, of a sliding window, with states, split in layers, or
            with some tokens of each page (decode context parallelism).
    """
    name = type(kvcache).__name__
    if getattr(kvcache, "is_quantized_kv_cache", False) or any(
        getattr(kvcache, it, None) is not None for it in _SCALES
    ):
        raise Unsupported("SGLang's cache has scales beside its keys and values, which kvpool does not support")
    if getattr(kvcache, "layer_shard_enabled", False):
        raise Unsupported("each rank has a part of the layers (layer_shard), which kvpool does not support")
    if name == "MHATokenToKVPool":
        if getattr(kvcache, "kv_cache_layout", "nhd") != "nhd":
            raise Unsupported(
                f"kvpool supports the layout nhd of SGLang's device memory, not {kvcache.kv_cache_layout}"
            )
        buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
    elif name == "MLATokenToKVPool":
        buffers = list(kvcache.kv_buffer)
    else:
        raise Unsupported(
            f"SGLang keeps this model's cache in {name}; kvpool supports MHATokenToKVPool and MLATokenToKVPool: models "
            "whose layers all attend to all tokens, with keys and values without scales",
            kind=name,
        )
    if kvcache.page_size != page_tokens:
        raise Unsupported(
            f"a page has {page_tokens} tokens, and the memory of a rank holds pages of {kvcache.page_size}: kvpool "
            "does not support decode context parallelism (--dcp-size)"
        )
    return [_token_rows(buffer, page_tokens) for buffer in buffers]


def host_pieces(host_pool: Any) -> list[Any] | None:
    """The pieces of a host pool of SGLang's; None if only SGLang can tell where its pages lie.

    Args:
        host_pool: A ``HostKVCache``.

    Raises:
        Unsupported: Its layout is one that kvpool does not know and SGLang does not copy page by page.
    """
    if getattr(host_pool, "layout", None) == "page_unified":
        raise Unsupported("kvpool does not support the layout page_unified of SGLang's host memory")
    name = type(host_pool).__name__
    buffer: Any = getattr(host_pool, "kv_buffer", None)
    if name not in ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost") or not hasattr(buffer, "data_ptr"):
        return None
    planes = [buffer[0], buffer[1]] if name == "MHATokenToKVPoolHost" else [buffer]
    if host_pool.layout == "layer_first":
        return [_token_rows(plane[layer], host_pool.page_size) for plane in planes for layer in range(len(plane))]
    if host_pool.layout == "page_first":
        return [_token_rows(plane, host_pool.page_size) for plane in planes]
    if host_pool.layout in _PAGED:
        return [_bytes_of(plane, len(plane)) for plane in planes]
    return None


def layout_of(pieces: Sequence[Any]) -> KVLayout:
    """A layout of kvpool whose pieces are these.

    Raises:
        Unsupported: They differ in size, or have an odd number of bytes.
    """
    sizes = {piece.shape[1] for piece in pieces}
    if len(sizes) != 1 or min(sizes) % 2:
        raise Unsupported(f"the pieces of a page have {sorted(sizes)} bytes; kvpool supports those of one even size")
    return KVLayout(len(pieces), 1, sizes.pop() // 2, "uint8", 1, pages="fused")


def _token_rows(tensor: Any, page_tokens: int) -> Any:
    """Of a tensor whose first dimension counts tokens: whole pages of it; SGLang has a rest for padding."""
    pages = tensor.shape[0] // page_tokens
    return _bytes_of(tensor[: pages * page_tokens], pages)


def _bytes_of(tensor: Any, pages: int) -> Any:
    import torch

    if not tensor.is_contiguous() or not pages:
        raise LayoutMismatch(
            f"a tensor of SGLang's cache has the shape {tuple(tensor.shape)} and the strides {tensor.stride()}: not "
            "whole pages in a row",
            shape=list(tensor.shape),
        )
    return tensor.reshape(pages, -1).view(torch.uint8)
