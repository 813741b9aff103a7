"""The shape of a model, and its distribution over devices, for the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.policy.cost.link import Link
from kvpool.types import DTYPES

__all__ = ["ModelShape", "Parallel"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family: RMSNorm, rotary positions, (grouped-query) attention, SwiGLU.

    Attributes:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Heads of K and V; divides `heads`.
        ffn: Width of the feed-forward network.
        vocab: The number of different tokens.
        head_dim: Numbers in a head; 0 means hidden / heads.
        dtype: Of weights, activations and KV.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dtype":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentTypeError(f"{field.name} is {type(value).__name__}, not an int")
            if value < (0 if field.name == "head_dim" else 1):
                raise ArgumentError(f"{field.name} is {value}; a model has at least one")
        if not isinstance(self.dtype, str):
            raise ArgumentTypeError(f"dtype is {type(self.dtype).__name__}, not a str")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"dtype is {self.dtype!r}; known are {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ArgumentError(f"{self.heads} heads do not divide into {self.kv_heads} KV heads")
        if self.head_dim == 0:
            if self.hidden % self.heads:
                raise ArgumentError(f"hidden {self.hidden} does not divide into {self.heads} heads: say head_dim")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return DTYPES[self.dtype].itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def as_json(self) -> dict[str, Any]:
        """The attributes, for a profile."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelShape:
        """The opposite of as_json. Raises ArgumentError for fields that are missing, unknown or wrong."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise ArgumentError(f"model: unknown {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        if missing := sorted(known - set(value) - {"head_dim", "dtype"}):
            raise ArgumentError(f"model: {', '.join(missing)} missing")
        try:
            return cls(**value)
        except ArgumentTypeError as error:
            raise ArgumentError(f"model: {error}") from error


@dataclass(frozen=True)
class Parallel:
    """How one instance divides the model.

    Attributes:
        tp: Tensor-parallel ranks: each has 1/tp of the heads and of the feed-forward network. After attention and
            after the feed-forward network they add up their results (all-reduce).
        pp: Pipeline stages: each has 1/pp of the layers and hands its activations to the next.
        tp_link: Between the ranks; None counts their communication as free.
        pp_link: Between the stages; None counts it as free.
    """

    tp: int = 1
    pp: int = 1
    tp_link: Link | None = None
    pp_link: Link | None = None

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ArgumentError(f"tp {self.tp}, pp {self.pp}: an instance has at least one rank and one stage")

    def checked(self, model: ModelShape) -> Parallel:
        """Itself. Raises ArgumentError if the model cannot be split in this way."""
        if model.heads % self.tp or model.ffn % self.tp or max(model.kv_heads, self.tp) % min(model.kv_heads, self.tp):
            raise ArgumentError(
                f"tp {self.tp} does not divide {model.heads} heads, {model.kv_heads} KV heads and ffn {model.ffn}"
            )
        if self.pp > model.layers:
            raise ArgumentError(f"{self.pp} stages are more than {model.layers} layers")
        return self
