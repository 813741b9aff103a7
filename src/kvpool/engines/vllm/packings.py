"""How vLLM's attention packs its pages inside, by the names of the backends: see `kvpool.engines.packing`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

from kvpool.engines.packing import CPU_COLUMNS, ROWS, joined

__all__ = ["packing_of"]

# Backends that keep K and V of a token of a head as a row of the page, or a row each; or, of latent attention, a row of
# each token, which they write by one kernel.
_IN_ROWS: Final = frozenset(
    (
        *("flash_attn", "triton_attn", "flex_attention", "flashinfer"),
        *("flashmla", "flash_attn_mla", "triton_mla", "cutlass_mla", "flashinfer_mla"),
    )
)
# By the name of the backend and its kind, which on a CPU depends on the machine and the model. vec16 computes otherwise
# than vec, and writes the same pages.
_ALIKE: Final = {"cpu_attn-vec": CPU_COLUMNS, "cpu_attn-vec16": CPU_COLUMNS}


def packing_of(layers: Iterable[Any], cache_dtype: str = "auto") -> str:
    """The packing of an engine's pages; of several kinds of layers, all names.

    Args:
        layers: Of vLLM: ``Attention`` whose tensors exist.
        cache_dtype: vLLM's option ``kv_cache_dtype``. Formats of 8 bits have one dtype in the tensors.
    """
    layers = list(layers)
    kinds = [_of_layer(layer) for layer in layers]
    if cache_dtype.startswith("fp8"):
        kinds.append("fp8_e4m3" if cache_dtype == "fp8" else cache_dtype)
        scales = [(getattr(one, "_k_scale_float", 1.0), getattr(one, "_v_scale_float", 1.0)) for one in layers]
        if any(pair != (1.0, 1.0) for pair in scales):
            kinds.append(f"scales {hashlib.blake2b(repr(scales).encode(), digest_size=8).hexdigest()}")
    return joined(kinds)


def _of_layer(layer: Any) -> str:
    name = str(layer.attn_backend.get_name()).lower()
    kind = getattr(layer, "isa", "")
    full = f"{name}-{kind}" if kind else name
    return ROWS if name in _IN_ROWS else _ALIKE.get(full, full)
