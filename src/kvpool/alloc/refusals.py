"""Refusals of memory in the terms of a user: blocks, layers and heads, and bytes in GiB."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool.errors import LayoutMismatch, OutOfMemory
from kvpool.types import KVLayout, RawLayout

__all__ = ["amount", "explained", "words_of"]


@contextlib.contextmanager
def explained(layout: KVLayout | RawLayout, hbm: Sequence[Any] | None) -> Iterator[None]:
    """Adds to errors of a new pool what they mean for its layout.

    Args:
        layout: The pool's.
        hbm: Tensors that it is to adopt.
    """
    try:
        yield
    except OutOfMemory as error:
        raise _with(error, _room(layout, error.fields)) from error
    except LayoutMismatch as error:
        raise _with(error, _offered(layout, hbm)) from error


def words_of(layout: KVLayout | RawLayout) -> str:
    """A layout in words: "32 layers of 8 KV heads x 128, bfloat16, 16 tokens a block"."""
    if isinstance(layout, RawLayout):
        return f"raw blocks of {amount(layout.block_bytes)}"
    heads = f"{layout.kv_heads} KV head{'s' if layout.kv_heads > 1 else ''} x {layout.head_dim}"
    layers = f"{layout.layers} layer{'s' if layout.layers > 1 else ''}"
    return f"{layers} of {heads}, {layout.dtype}, {layout.block_tokens} tokens a block"


def amount(count: int) -> str:
    """Bytes as one reads them: "1.5 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"


def _with(error: Any, more: str) -> Any:
    """The same error with more text."""
    return type(error)(f"{error}{more}", **error.fields) if more else error


def _room(layout: KVLayout | RawLayout, fields: dict[str, Any]) -> str:
    needed, available = fields.get("needed_bytes"), fields.get("available_bytes")
    if not isinstance(needed, int) or not isinstance(available, int):
        return ""
    fit = available // layout.block_bytes
    return (
        f". That is {amount(needed)} of {amount(available)}: a block takes {amount(layout.block_bytes)} "
        f"({words_of(layout)}), so about {fit:,} blocks fit, {fit * layout.block_tokens:,} tokens"
    )


def _offered(layout: KVLayout | RawLayout, hbm: Sequence[Any] | None) -> str:
    """The tensors that were given, beside what the layout wants."""
    if hbm is None:
        return ""
    try:
        shapes = [f"{tuple(one.shape)} of {one.dtype}" for one in hbm]
    except (AttributeError, TypeError):  # they came by another protocol, and have no shape
        return ""
    given = f"{len(shapes)} tensor{'s' if len(shapes) > 1 else ''}, the first {shapes[0]}" if shapes else "no tensor"
    if isinstance(layout, RawLayout):
        return f". The layout is {words_of(layout)}; given {given}"
    pieces = "K and V" if layout.pages == "split" else "K beside V"
    inner = layout.shape[1:]
    return (
        f". The layout is {words_of(layout)}: {layout.layers} tensors of [block, {', '.join(map(str, inner))}] or the "
        f"like ({pieces}; {layout.dims}); given {given}"
    )
