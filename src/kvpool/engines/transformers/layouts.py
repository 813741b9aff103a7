"""What transformers caches for a model, as a KVLayout, and a pool's memory as torch tensors of one shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvpool.engines.packing import CPU_COLUMNS, ROWS, unmarked
from kvpool.errors import LayoutMismatch, Unsupported
from kvpool.pool import Pool
from kvpool.types import KVLayout, Medium

__all__ = ["check_content", "check_pool", "decoder_of", "layout_of", "memory_of"]

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def decoder_of(config: Any) -> Any:
    """The part of a model's configuration that says what its decoder caches.

    Raises:
        Unsupported: It has an encoder, layers that cache anything but the keys and values of all tokens, or keys that
            depend on the length of the prompt.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported("an encoder-decoder model caches cross attention too: kvpool takes decoders only")
    decoder = config.get_text_config(decoder=True)
    for kind in _rotations(getattr(decoder, "rope_parameters", None) or getattr(decoder, "rope_scaling", None)):
        if kind in ("dynamic", "longrope"):
            raise Unsupported(
                f"the model rotates keys by {kind!r}: by how much depends on the length of the prompt, so keys of a "
                "long prompt are not those of a shorter one that it begins with"
            )
    for number, layer in enumerate(DynamicCache(config=decoder).layers):
        if type(layer) is not DynamicLayer:
            raise Unsupported(
                f"layer {number} caches a {type(layer).__name__}: kvpool takes models whose layers all attend to all "
                "tokens, without sliding windows, linear attention and indexers",
                layer=number,
            )
    return decoder


def _rotations(parameters: Any) -> list[str]:
    """The kinds of rotary embedding that a configuration names: for all layers, or for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    nested = [kind for each in parameters.values() for kind in _rotations(each)]
    kind = parameters.get("rope_type", parameters.get("type"))
    return [*nested, kind] if isinstance(kind, str) else nested


def layout_of(config: Any, dtype: torch.dtype, block_tokens: int) -> KVLayout:
    """The layout of a model's blocks.

    Args:
        config: Of the model.
        dtype: That it computes in.
        block_tokens: Tokens in a block.

    Raises:
        Unsupported: As `decoder_of`; or no such type.
    """
    decoder = decoder_of(config)
    if dtype not in _DTYPES:
        raise Unsupported(f"the model computes in {dtype}: kvpool caches {', '.join(_DTYPES.values())}")
    heads = decoder.num_attention_heads
    kv_heads = getattr(decoder, "num_key_value_heads", None) or heads
    head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // heads
    return KVLayout(decoder.num_hidden_layers, kv_heads, head_dim, _DTYPES[dtype], block_tokens)


def check_pool(pool: Pool, wanted: KVLayout) -> KVLayout:
    """The pool's layout, if its blocks hold what the model caches, whatever the order inside them.

    Raises:
        LayoutMismatch: They hold something else; or pages that are packed in an unknown way.
    """
    layout = pool.kv_layout
    if not isinstance(layout, KVLayout):
        raise LayoutMismatch("the pool has blocks of raw bytes: make it with a KVLayout")
    check_content(layout, wanted, "the pool")
    packing = unmarked(pool.settings.model)[1]
    if packing != ROWS and (packing != CPU_COLUMNS or (layout.dims, layout.pages) != ("HND", "fused")):
        raise LayoutMismatch(
            f"the pool's blocks are pages of {packing}, packed inside in a way that kvpool cannot read: it reads rows "
            f"of tokens, and pages of {CPU_COLUMNS}"
        )
    return layout


def check_content(layout: KVLayout, wanted: KVLayout, owner: str) -> None:
    """Compares what blocks hold with what the model caches, whatever the order inside them, or the tokens of a block.

    Args:
        layout: Of the blocks.
        wanted: Of the model.
        owner: Whose blocks they are, for the message.

    Raises:
        LayoutMismatch: They hold something else.
    """
    for field in ("layers", "kv_heads", "head_dim", "dtype"):
        if getattr(layout, field) != getattr(wanted, field):
            raise LayoutMismatch(
                f"the blocks of {owner} have {field} {getattr(layout, field)}, and the model {getattr(wanted, field)}: "
                f"{layout} against {wanted}"
            )


def memory_of(pool: Pool, medium: Medium) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all blocks of a medium: views of shape [block, layer, head, token, dim], whatever the layout.

    Raises:
        StateError: The memory is an engine's or in ranks, so that there are no such views.
    """
    layout = pool.kv_layout
    assert isinstance(layout, KVLayout)
    view: torch.Tensor = from_dlpack(pool.tensor(medium))
    if unmarked(pool.settings.model)[1] == CPU_COLUMNS:  # [..., head, token, 2 * dim], for `check_pool` has seen to it
        tokens, dim, outer = layout.block_tokens, layout.head_dim, view.shape[:3]
        halves = view.view(*outer, 2, tokens * dim)
        return halves[..., 0, :].view(*outer, dim, tokens).transpose(-1, -2), halves[..., 1, :].view(
            *outer, tokens, dim
        )
    if layout.pages == "fused":  # [..., 2 * dim]: a row is K, then V
        keys, values = view[..., : layout.head_dim], view[..., layout.head_dim :]
    else:
        keys, values = view.unbind(2)
    return (keys.transpose(2, 3), values.transpose(2, 3)) if layout.dims == "NHD" else (keys, values)
