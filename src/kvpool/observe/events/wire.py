"""The events that vLLM publishes about its KV cache (vllm/distributed/kv_events.py), as bytes and back.

    batch      [ts, [event, ...], data_parallel_rank]                 msgpack
    event      {"type": "BlockStored", "block_hashes": [...], ...}    "map": vLLM since #42892
               ["BlockStored", [...], ...]                            "array": vLLM before, SGLang

A batch that is a map is read, too. Input is not trusted: everything is checked, and decoding yields only numbers, texts
and lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.errors import ProtocolError
from kvpool.observe.events.unpacking import unpack_batch

try:
    import msgpack
except ImportError as error:
    raise ImportError("kvpool.observe.events needs msgpack: pip install 'kvpool[events]'") from error

__all__ = ["AllBlocksCleared", "BlockHash", "BlockRemoved", "BlockStored", "Encoding", "EventBatch", "WireEvent"]
__all__ += ["decode", "encode"]

BlockHash: TypeAlias = int | bytes
Encoding: TypeAlias = Literal["map", "array"]

# The fields in the order that the array form has. What came later stands at the end, and may be missing.
_STORED: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx",
)  # fmt: skip
_REMOVED: Final = ("block_hashes", "medium", "group_idx")
_HASH_BYTES_MAX: Final = 64
_MEDIUM_MAX: Final = 64  # characters
_PIECE: Final = 1 << 14  # tokens that are converted at a time
_BATCH: Final = ("ts", "events", "data_parallel_rank")


@dataclass(frozen=True, eq=False)
class BlockStored:
    """Blocks that follow each other in a prompt were stored.

    Attributes:
        block_hashes: One for each block.
        parent_block_hash: Of the block before the first of them; None at the start of a prompt.
        token_ids: int32, the tokens of these blocks alone.
        block_size: Tokens a block.
        medium: "GPU" or "CPU"; None where the publisher does not say.
        lora_id: Number of an adapter, from publishers that know no name.
        lora_name: Of the adapter that the blocks were computed with.
        extra_keys: For each block, what beside its tokens tells it from others; kvpool: its namespace.
        group_idx: Of a model with several kinds of layers, which.
        cache_salt: Of the request that stored the blocks, from SGLang; vLLM and kvpool name it in `extra_keys`.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: npt.NDArray[np.int32]
    block_size: int
    medium: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Blocks are no longer in this medium. Fields as in `BlockStored`."""

    block_hashes: Sequence[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """Subscribers forget all blocks of the publisher; later events report what it holds."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class EventBatch:
    """What happened, in order.

    Attributes:
        ts: Seconds since 1970, by the publisher's wall clock: for people, not for measuring.
        events: What happened.
        data_parallel_rank: Of the publisher.
    """

    ts: float
    events: Sequence[WireEvent]
    data_parallel_rank: int | None = None


def encode(batch: EventBatch, encoding: Encoding = "map") -> bytes:
    """The bytes of a batch.

    Args:
        batch: What happened.
        encoding: "map" or "array": how an event is written. The batch itself is an array in both.
    """
    events = [_packed(event, encoding) for event in batch.events]
    return bytes(msgpack.packb([batch.ts, events, batch.data_parallel_rank]))


def decode(payload: bytes) -> EventBatch:
    """Decodes the bytes of a batch, in either encoding. Ignores events of unknown kinds.

    A batch of more than 128 KiB is read value by value, and other threads run in between. In such a batch a list or map
    that stands in a field's list, or a map that is a field, has at most 4,096 values: a known event with a longer one
    in a field that it needs is refused.

    Raises:
        ProtocolError: They are no batch of events, or have more than 65,536 events.
    """
    try:
        fields = _named(unpack_batch(payload, _read), _BATCH, tagged=False)
        ts, events, rank = (fields.get(name) for name in _BATCH)
        if not isinstance(ts, int | float) or not isinstance(events, list) or not _maybe(rank, int):
            raise ValueError("a batch is a time, a list of events, and a rank")
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"no batch of KV events: {type(error).__name__}: {error}") from None
    return EventBatch(float(ts), events, rank)


def _packed(event: WireEvent, encoding: Encoding) -> Any:
    kind = type(event).__name__
    names = _STORED if isinstance(event, BlockStored) else _REMOVED if isinstance(event, BlockRemoved) else ()
    fields: dict[str, Any] = {}
    for name in names:
        value = getattr(event, name)
        fields[name] = value.tolist() if isinstance(value, np.ndarray) else value
    while fields and names[len(fields) - 1] in ("group_idx", "extra_keys") and fields[names[len(fields) - 1]] is None:
        fields.popitem()  # as vLLM: a field with its default value is left out
    if isinstance(event, BlockStored) and event.cache_salt is not None and encoding == "map":
        fields["cache_salt"] = event.cache_salt
    return {"type": kind, **fields} if encoding == "map" else [kind, *fields.values()]


def _named(raw: Any, names: Sequence[str], *, tagged: bool) -> Mapping[str, Any]:
    if isinstance(raw, dict):
        return raw
    if isinstance(raw, list):
        return dict(zip(names, raw[1:] if tagged else raw, strict=False))
    raise ValueError(f"a {type(raw).__name__} where a list or map must be")


def _read(raw: Any) -> WireEvent | None:
    kind = raw.get("type") if isinstance(raw, dict) else raw[0] if isinstance(raw, list) and raw else None
    if not isinstance(kind, str):
        raise ValueError("an event without its kind")
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind == "BlockRemoved":
        return _read_removed(_named(raw, _REMOVED, tagged=True))
    if kind == "BlockStored":
        return _read_stored(_named(raw, _STORED, tagged=True))
    return None


def _read_removed(fields: Mapping[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=_hashes(fields["block_hashes"]),
        medium=_optional(fields, "medium", str),
        group_idx=_optional(fields, "group_idx", int),
    )


def _read_stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes = _hashes(fields["block_hashes"])
    parent, size, extra = fields["parent_block_hash"], fields["block_size"], fields.get("extra_keys")
    if parent is not None:
        (parent,) = _hashes([parent])
    if type(size) is not int or size < 1:
        raise ValueError(f"a block of {size!r} tokens")
    tokens = _tokens(fields["token_ids"])
    if len(tokens) != len(hashes) * size:
        raise ValueError(f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
    if extra is not None and not (
        isinstance(extra, list) and len(extra) == len(hashes) and all(_maybe(row, list) for row in extra)
    ):
        raise ValueError("extra_keys are not one list or nothing for each block")
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=size,
        medium=_optional(fields, "medium", str),
        lora_id=_optional(fields, "lora_id", int),
        lora_name=_optional(fields, "lora_name", str),
        extra_keys=extra,
        group_idx=_optional(fields, "group_idx", int),
        cache_salt=_optional(fields, "cache_salt", str),
    )


def _hashes(value: Any) -> list[BlockHash]:
    if not isinstance(value, list) or not all(type(item) in (int, bytes) for item in value):
        raise ValueError("hashes of blocks are a list of numbers or bytes")
    if any(type(item) is bytes and len(item) > _HASH_BYTES_MAX for item in value):
        raise ValueError(f"a hash of a block has more than {_HASH_BYTES_MAX} bytes")
    return value


def _tokens(value: Any) -> npt.NDArray[np.int32]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("tokens are a list of numbers")
    tokens = np.empty(len(value), dtype=np.int32)
    for first in range(0, len(value), _PIECE):  # other threads run between pieces
        piece = value[first : first + _PIECE]
        if not -(1 << 31) <= min(piece) <= max(piece) < 1 << 31:
            raise ValueError("a token does not fit 32 bits")
        tokens[first : first + len(piece)] = piece
    return tokens


def _optional(fields: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = fields.get(name)
    if not _maybe(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}")
    if name == "medium" and value is not None and len(value) > _MEDIUM_MAX:
        raise ValueError(f"the name of a medium has {len(value)} characters")
    return value


def _maybe(value: Any, kind: type[Any]) -> bool:
    return value is None or type(value) is kind
