"""What a page of vLLM's KV tensors holds, as a KVLayout.

vLLM has a tensor for each layer, whose dimensions and their order in memory depend on the attention backend. The pool
takes tensors whose dimensions stand in the order of memory, so they are permuted, and then compared with what is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvpool.errors import LayoutMismatch, Unsupported
from kvpool.transfer import ParallelConfig
from kvpool.types import KVLayout

__all__ = ["Adoption", "Pages", "adoptable", "adoption_of", "divided", "pages_of"]

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")


@dataclass(frozen=True)
class Pages:
    """What vLLM says of its pages.

    Attributes:
        layers: Names of the layers, in their order.
        kv_heads: Heads of K and of V.
        head_dim: Elements of a head; of latent attention, elements of the latent.
        dtype: A name of `kvpool.types.DTYPES`.
        block_tokens: Tokens in a block.
        blocks: Blocks of a tensor.
        latent: Latent attention (MLA): a token has one latent, and no K and V.
        windows: For each group of layers the tokens of its sliding window, before which vLLM drops blocks; None: it has
            no window.
        states: For each group of layers, whether it keeps one state for all tokens before a boundary; empty: none does.
        page_bytes: Of pages that are moved as they are, because groups differ in what theirs hold: of one layer.
            `kv_heads`, `head_dim` and `dtype` then describe bytes. 0: all pages hold what these say.
        groups: Names of the layers of each group, where there are several. They have the same memory, and a block
            belongs to one of them: at the places of another group's layers are `layers`, those of the longest group.
    """

    layers: tuple[str, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    blocks: int
    latent: bool = False
    windows: tuple[int | None, ...] = (None,)
    groups: tuple[tuple[str, ...], ...] = ()
    states: tuple[bool, ...] = ()
    page_bytes: int = 0

    @property
    def begins_anew(self) -> bool:
        """Whether a request whose load has failed is computed from its first token on.

        Otherwise vLLM computes from the first block on that was not filled. It cannot where it has dropped blocks
        before that, and knows no blocks of several groups.
        """
        return len(self.windows) > 1 or self.windows[0] is not None or any(self.states)


class Adoption(NamedTuple):
    """How the pool takes the tensors.

    Attributes:
        layout: Of a block.
        block_dim: The dimension that counts blocks, after the permutation.
        order: The permutation that brings a tensor's dimensions into the order of memory.
    """

    layout: KVLayout
    block_dim: int
    order: tuple[int, ...]


def pages_of(kv_cache_config: Any) -> Pages:
    """Reads vLLM's ``KVCacheConfig``.

    Raises:
        Unsupported: Its layers keep anything but K and V of tokens, or states at the boundaries of blocks; groups of
            layers have blocks of different numbers of tokens; or all pages are alike, and are quantized with scales,
            padded, or otherwise not plain K and V.
    """
    groups = kv_cache_config.kv_cache_groups
    filled = [group for group in groups if group.layer_names]  # of a pipeline's stage some may be empty
    if not filled:
        raise Unsupported("the model has no KV layers", groups=0)
    for group in filled:
        _check_layers(group.kv_cache_spec)
    longest = max(filled, key=lambda group: len(group.layer_names))
    spec, names = longest.kv_cache_spec, tuple(longest.layer_names)
    specs = [group.kv_cache_spec for group in filled]
    stateful = any(_has_states(group.kv_cache_spec) for group in groups)  # or another stage has the states
    if stateful or any(_page(one) != _page(spec) for one in specs):
        return _unequal(kv_cache_config, filled, names)
    kind = _kinds(spec)
    latent = "MLAAttentionSpec" in kind
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise Unsupported(f"KvpoolConnector does not support a KV cache of {dtype}", dtype=dtype)
    pages = Pages(
        names,
        spec.num_kv_heads,
        spec.head_size,
        dtype,
        spec.block_size,
        kv_cache_config.num_blocks,
        latent,
        windows=tuple(_window(group.kv_cache_spec) for group in groups),
        groups=tuple(tuple(group.layer_names) for group in groups) if len(groups) > 1 else (),
    )
    layout = _layout(pages, "NHD", "fused") if not latent or not spec.head_size % 2 else None
    if layout is None or layout.block_bytes != spec.page_size_bytes * len(names):
        expected = "odd" if layout is None else layout.block_bytes // len(names)
        raise Unsupported(
            f"a page of a layer has {spec.page_size_bytes} bytes, and K and V of {pages.kv_heads} heads, "
            f"{pages.block_tokens} tokens and {pages.head_dim} elements of {dtype} have {expected}: KvpoolConnector "
            "supports plain pages, not padded ones or those with scales",
            page_bytes=spec.page_size_bytes,
        )
    return pages


def _unequal(kv_cache_config: Any, filled: Sequence[Any], names: tuple[str, ...]) -> Pages:
    """Of groups whose pages differ inside. VLLM gives all of them the same bytes, and pads what needs fewer."""
    specs = [group.kv_cache_spec for group in filled]
    block_tokens, page_bytes = specs[0].block_size, specs[0].page_size_bytes
    if any((spec.block_size, spec.page_size_bytes) != (block_tokens, page_bytes) for spec in specs):
        sizes = sorted({(spec.block_size, spec.page_size_bytes) for spec in specs})
        raise Unsupported(
            f"the model has groups of KV layers with blocks of (tokens, bytes a layer) {sizes}: KvpoolConnector "
            "supports groups whose blocks have equally many of both, and others with "
            "--disable-hybrid-kv-cache-manager where vLLM allows it",
            groups=len(specs),
        )
    row, rest = divmod(page_bytes, 2 * block_tokens)
    if rest:
        raise Unsupported(
            f"a page of a layer has {page_bytes} bytes for {block_tokens} tokens: KvpoolConnector supports groups of "
            "unequal pages only where the bytes are a multiple of twice the tokens. Another --block-size may help",
            page_bytes=page_bytes,
        )
    groups = kv_cache_config.kv_cache_groups
    return Pages(
        names,
        kv_heads=1,
        head_dim=row,
        dtype="uint8",
        block_tokens=block_tokens,
        blocks=kv_cache_config.num_blocks,
        windows=tuple(_window(group.kv_cache_spec) for group in groups),
        groups=tuple(tuple(group.layer_names) for group in groups) if len(groups) > 1 else (),
        states=tuple(_has_states(group.kv_cache_spec) for group in groups),
        page_bytes=page_bytes,
    )


_ATTENTION = {"FullAttentionSpec", "SlidingWindowSpec"}
_OTHERS = {"RSWASpec", "SlidingWindowMLASpec"}  # which drop blocks between others, or have latents in a window


def _has_states(spec: Any) -> bool:
    return "MambaSpec" in _kinds(spec)


def _check_layers(spec: Any) -> None:
    if _has_states(spec):
        _check_states(spec)
    elif not _kinds(spec) & _ATTENTION or _kinds(spec) & _OTHERS:
        raise Unsupported(
            "KvpoolConnector supports layers that attend to all tokens, or with K and V to a window of them, and some "
            f"layers are of {type(spec).__name__}"
        )


def _check_states(spec: Any) -> None:
    """Where vLLM keeps states at the ends of blocks, a block has it when a step has ended there."""
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            "KvpoolConnector supports Mamba and linear-attention layers where vLLM keeps states at the boundaries of "
            f'blocks: with prefix caching, and --mamba-cache-mode "align", not "{spec.mamba_cache_mode}"'
        )
    if spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks:
        raise Unsupported(
            "KvpoolConnector supports Mamba and linear-attention layers without speculative decoding and without "
            "checkpoints inside of steps: a block would not hold the state at its end"
        )


def _window(spec: Any) -> int | None:
    """The tokens whose blocks vLLM keeps."""
    if "SlidingWindowSpec" not in _kinds(spec):
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _kinds(spec: Any) -> set[str]:
    return {base.__name__ for base in type(spec).__mro__}


def _page(spec: Any) -> tuple[Any, ...]:
    """What two groups must have in common."""
    latent = "MLAAttentionSpec" in _kinds(spec)
    return latent, spec.block_size, spec.page_size_bytes, spec.num_kv_heads, spec.head_size, spec.dtype


def adoptable(pages: Pages, tensor: Any) -> Any:
    """What the pool takes of a layer: its tensor; or, of `page_bytes`, the same memory as uint8 [block, byte].

    Args:
        pages: What vLLM says.
        tensor: What vLLM gives a layer: a tensor whose first dimension counts blocks, or equal parts of blocks, where
            attention kernels take smaller ones; or several that share a page, the first of which begins where the
            page does.

    Raises:
        LayoutMismatch: The pages do not follow each other in memory, or the memory ends before they do.
    """
    return _bytes_of(pages, tensor) if pages.page_bytes else tensor


def _bytes_of(pages: Pages, tensor: Any) -> Any:
    import torch

    first = tensor[0] if isinstance(tensor, list | tuple) else tensor
    stride = first.stride(0) * first.element_size()
    parts, rest = divmod(first.shape[0], pages.blocks)
    if rest or stride * parts != pages.page_bytes:
        raise LayoutMismatch(
            f"vLLM's tensor of a layer has the shape {tuple(first.shape)} and {stride} bytes from one block to the "
            f"next, not {pages.blocks} blocks of {pages.page_bytes} bytes one after another",
            shape=list(first.shape),
        )
    storage = first.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=first.device)
    offset = first.data_ptr() - storage.data_ptr()
    if offset + pages.blocks * pages.page_bytes > storage.nbytes():  # torch would move vLLM's memory
        raise LayoutMismatch(
            f"vLLM's memory of a layer has {storage.nbytes() - offset} bytes, not {pages.blocks} pages of "
            f"{pages.page_bytes} bytes",
            shape=list(first.shape),
        )
    return raw.set_(storage, offset, (pages.blocks, pages.page_bytes), (pages.page_bytes, 1))


def adoption_of(pages: Pages, shape: Sequence[int], strides: Sequence[int]) -> Adoption:
    """Finds how a layer's tensor holds the pages. All layers must be alike, which the pool checks.

    Args:
        pages: What vLLM says.
        shape: Of what is `adoptable` of a layer.
        strides: In elements.

    Raises:
        LayoutMismatch: It holds none of the pages that are known.
    """
    if pages.page_bytes:  # for each layer as many bytes, which say nothing of heads
        return Adoption(_layout(pages, "NHD", "fused"), 0, (0, 1))
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim)))
    extents = [shape[dim] for dim in order]
    for dims, kind, candidate, block_dim in _candidates(pages):
        if extents == candidate:
            return Adoption(_layout(pages, dims, kind), block_dim, order)
    raise LayoutMismatch(
        f"vLLM's tensor of layer {pages.layers[0]} has the shape {tuple(shape)} and the strides {tuple(strides)}: "
        f"not {pages.blocks} pages of {pages.kv_heads} heads, {pages.block_tokens} tokens and {pages.head_dim} "
        f"elements of {pages.dtype} in any order that KvpoolConnector knows{_hint(pages, shape)}",
        shape=list(shape),
    )


def divided(parts: Sequence[KVLayout], tp: int, kv_heads: int) -> tuple[KVLayout, ParallelConfig]:
    """The layout of a whole block, and how it is divided among workers.

    Args:
        parts: What each worker has of a block; the tensor-parallel ranks of a stage stand together.
        tp: How many of these a stage has.
        kv_heads: Of the model. Where workers are more than heads, several have the same head.

    Raises:
        LayoutMismatch: The workers' parts are not those of any such division.
    """
    stages = parts[::tp]
    parallel = ParallelConfig(tp=tp, pp=len(stages), stage_layers=tuple(stage.layers for stage in stages))
    whole = replace(parts[0], layers=sum(stage.layers for stage in stages), kv_heads=kv_heads)
    expected = [part.layout for part in parallel.slices(whole)]
    if expected != list(parts):
        raise LayoutMismatch(f"the workers have {list(parts)}; {tp} for each of {len(stages)} stages have {expected}")
    return whole, parallel


def _hint(pages: Pages, shape: Sequence[int]) -> str:
    """What may help: attention kernels that take smaller blocks than vLLM's cut each into several."""
    parts, rest = divmod(shape[0], pages.blocks)
    if rest or parts < 2 or pages.block_tokens % parts or pages.block_tokens // parts not in shape:
        return ". Another VLLM_KV_CACHE_LAYOUT may help: LBNHC or LBHNC"
    return f": each of its blocks is cut into {parts}. Set --block-size {pages.block_tokens // parts}"


_Dims = Literal["HND", "NHD"]
_Kind = Literal["split", "fused"]


def _candidates(pages: Pages) -> Iterator[tuple[_Dims, _Kind, list[int], int]]:
    """Dimensions in the order of memory. Where heads and tokens are equally many the first one counts."""
    blocks, heads, tokens, dim = pages.blocks, pages.kv_heads, pages.block_tokens, pages.head_dim
    if pages.latent:
        yield "NHD", "fused", [blocks, tokens, dim], 0
        yield "NHD", "fused", [blocks, tokens, 1, dim], 0
        return
    yield "HND", "fused", [blocks, heads, tokens, 2 * dim], 0
    yield "NHD", "fused", [blocks, tokens, heads, 2 * dim], 0
    for dims, inner in (("NHD", [tokens, heads]), ("HND", [heads, tokens])):
        yield dims, "split", [2, blocks, *inner, dim], 1  # type: ignore[misc]
        yield dims, "split", [blocks, 2, *inner, dim], 0  # type: ignore[misc]


def _layout(pages: Pages, dims: _Dims, kind: _Kind) -> KVLayout:
    heads, dim = (1, pages.head_dim // 2) if pages.latent else (pages.kv_heads, pages.head_dim)
    return KVLayout(len(pages.layers), heads, dim, pages.dtype, pages.block_tokens, dims=dims, pages=kind)
