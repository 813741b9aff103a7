"""The layouts of blocks: how the keys and values of some tokens lie in memory, or bytes of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["DTYPES", "KVLayout", "Layout", "RawLayout"]


class DType(NamedTuple):
    """An element type: its size, and the NumPy type of a view, which differs if NumPy has no such type."""

    itemsize: int
    numpy: str


DTYPES: Final[dict[str, DType]] = {
    "float32": DType(4, "float32"),
    "float16": DType(2, "float16"),
    "bfloat16": DType(2, "uint16"),
    "float8_e4m3fn": DType(1, "uint8"),
    "float8_e5m2": DType(1, "uint8"),
    "int8": DType(1, "int8"),
    "uint8": DType(1, "uint8"),
}

_DIMENSION_MAX: Final = 1 << 20  # of one number of a layout; far above any model, far below an overflow
_BLOCK_BYTES_MAX: Final = 1 << 40


def _count(owner: str, name: str, value: object, maximum: int = _DIMENSION_MAX) -> int:
    """The value as an int in [1, maximum]; accepts what Python accepts as an index, except bool."""
    number = int_from(value, f"{owner}: {name}")
    if not 1 <= number <= maximum:
        raise ArgumentError(
            f"{owner}: {name} is {shown(number)}; it must be from 1 to {maximum}", value=number, maximum=maximum
        )
    return number


def _choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise ArgumentTypeError(f"{owner}: {name} must be a str, not {type(value).__name__} ({shown(value)})")
    if value not in choices:
        raise ArgumentError(f"{owner}: {name} is {shown(value)}; it must be one of {', '.join(choices)}")


def _block_bytes_checked(owner: str, block_bytes: int) -> None:
    if block_bytes > _BLOCK_BYTES_MAX:
        raise ArgumentError(
            f"{owner}: a block would have {block_bytes} bytes ({block_bytes >> 30:,} GiB); at most {_BLOCK_BYTES_MAX} "
            "(1024 GiB) are possible",
            block_bytes=block_bytes,
            maximum=_BLOCK_BYTES_MAX,
        )


@dataclass(frozen=True)
class KVLayout:
    """The shape of a block of keys and values: `block_tokens` tokens, all layers, K and V.

    Within a block the order is [layer, k/v, head, token, dim], or [layer, k/v, token, head, dim]: a layer's K (or V) is
    one piece. If an engine keeps K and V of a token side by side, declare ``pages="fused"``: then a layer is one piece,
    [head, token, 2 * dim] or [token, head, 2 * dim]. Peers whose layouts differ in anything but `order` are refused,
    because blocks of the same size may differ in content.

    Attributes:
        layers: Number of layers.
        kv_heads: Heads of K and of V in each layer.
        head_dim: Elements of a head.
        dtype: One of `kvpool.types.DTYPES`.
        block_tokens: Tokens in a block.
        order: "aggregated": a block is one run of bytes. "discrete": a block is as many runs as it has pieces, in
            separate tensors, as engines keep them.
        dims: "HND": heads before tokens, so a range of heads of a piece is contiguous, and one strip for ranks that
            divide heads differently. "NHD": tokens before heads, the default of vLLM and FlashInfer; then such a strip
            has one token.
        pages: "split": K and V of a layer are two pieces. "fused": they are one piece, each row of which holds K and
            then V of a token of a head, as in vLLM with FlashAttention. Latent attention (MLA) is one head of
            ``head_dim = latent / 2``, fused.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    block_tokens: int = 16
    order: Literal["aggregated", "discrete"] = "aggregated"
    dims: Literal["HND", "NHD"] = "HND"
    pages: Literal["split", "fused"] = "split"

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            ArgumentError: A number or name is out of range.
            ArgumentTypeError: A value has the wrong type.
        """
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            object.__setattr__(self, name, _count("KVLayout", name, getattr(self, name)))
        _choice("KVLayout", "dtype", self.dtype, tuple(DTYPES))
        _choice("KVLayout", "order", self.order, ("aggregated", "discrete"))
        _choice("KVLayout", "dims", self.dims, ("HND", "NHD"))
        _choice("KVLayout", "pages", self.pages, ("split", "fused"))
        _block_bytes_checked("KVLayout", self.block_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: K and V of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """Bytes of each piece of a block: layer 0 K, layer 0 V, layer 1 K, ...; when fused, layer 0, layer 1, ..."""
        pieces = self.layers if self.pages == "fused" else 2 * self.layers
        return (self.block_bytes // pieces,) * pieces

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Bytes of each separate run of a block: one when aggregated, the pieces when discrete."""
        return (self.block_bytes,) if self.order == "aggregated" else self.piece_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one block: (layers, 2, kv_heads, block_tokens, head_dim); of NHD, tokens before heads.

        When fused it is (layers, kv_heads, block_tokens, 2 * head_dim), likewise.
        """
        inner = (self.kv_heads, self.block_tokens) if self.dims == "HND" else (self.block_tokens, self.kv_heads)
        if self.pages == "fused":
            return (self.layers, *inner, 2 * self.head_dim)
        return (self.layers, 2, *inner, self.head_dim)

    @property
    def _numbers(self) -> tuple[int, int, int, str, int, bool, bool]:
        """As the core takes them."""
        return (
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.block_tokens,
            self.dims == "NHD",
            self.pages == "fused",
        )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of a NumPy view: uint16 for bfloat16 and uint8 for float8, which NumPy does not have."""
        return np.dtype(DTYPES[self.dtype].numpy)


@dataclass(frozen=True)
class RawLayout:
    """The shape of a block with other content than keys and values: a number of bytes for a number of tokens.

    It has the attributes of `KVLayout` as far as they make sense, so code that moves blocks can treat both alike.

    Attributes:
        block_bytes: Bytes of one block.
        block_tokens: Tokens that a block stands for.
    """

    block_bytes: int
    block_tokens: int = 16

    def __post_init__(self) -> None:
        """Checks both numbers.

        Raises:
            ArgumentError: A number is out of range.
            ArgumentTypeError: A value is not an int.
        """
        object.__setattr__(self, "block_bytes", _count("RawLayout", "block_bytes", self.block_bytes, _BLOCK_BYTES_MAX))
        object.__setattr__(self, "block_tokens", _count("RawLayout", "block_tokens", self.block_tokens))

    @property
    def dtype(self) -> str:
        """Always "uint8"."""
        return "uint8"

    @property
    def itemsize(self) -> int:
        """Always 1."""
        return 1

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """One piece: the block."""
        return (self.block_bytes,)

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """One run: the block."""
        return (self.block_bytes,)

    @property
    def shape(self) -> tuple[int]:
        """Shape of one block: (block_bytes,)."""
        return (self.block_bytes,)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of a NumPy view."""
        return np.dtype(np.uint8)


Layout: TypeAlias = KVLayout | RawLayout
