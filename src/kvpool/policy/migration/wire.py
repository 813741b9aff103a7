"""The messages of a migration as bytes: a JSON object of limited length, then token ids, addresses and state.

    "KVMIG" | version, 1 byte | length of the object, 4 bytes | object | tokens, int32 | blocks, uint64 | state

All numbers are little-endian. The object's `sizes` says how many tokens, blocks and bytes of state follow. A peer is
authenticated, and its messages are read field by field all the same.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final, get_args

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.fields import count_of, list_of, object_of, text_of
from kvpool.policy.migration.messages import (
    DestinationPhase,
    DestinationSays,
    MigrationId,
    SourcePhase,
    SourceSays,
    Way,
)
from kvpool.policy.migration.terms import Term

__all__ = ["MESSAGE_BYTES_MAX", "check_names", "decode", "encode"]

MESSAGE_BYTES_MAX: Final = 1 << 20  # `private` of a transfer
_HEAD: Final = struct.Struct("<5sBI")
_MAGIC: Final = b"KVMIG"
_VERSION: Final = 1
_TEXT_MAX: Final = 1024
_LIMIT: Final = 1 << 64  # of every number
_COUNTS: Final = ("tokens", "blocks", "whole", "cached", "sent")


def check_names(request: str, namespace: str) -> None:
    """Raises ArgumentError if a request's name or its namespace has more than 1,024 characters."""
    for what, text in (("the name of a request", request), ("the namespace of a request", namespace)):
        if len(text) > _TEXT_MAX:
            raise ArgumentError(
                f"{what} has {len(text)} characters; {_TEXT_MAX} are allowed", given=len(text), maximum=_TEXT_MAX
            )


def encode(said: SourceSays | DestinationSays) -> bytes:
    """A message as bytes.

    Raises:
        ArgumentError: It is longer than a message may be, or a name in it than a name may be.
    """
    fields: dict[str, Any] = {"id": list(said.id), "number": said.number, "phase": said.phase, "way": said.way}
    tail = b""
    if isinstance(said, SourceSays):
        check_names(said.request, said.namespace)
        tokens, blocks = np.asarray(said.tokens, "<i4"), np.asarray(said.blocks, "<u8")
        fields |= {
            "side": "source",
            "request": said.request,
            "namespace": said.namespace,
            "term": list(said.term),
            "room": said.room,
            "at": said.at,
            "first": said.first,
            "whole": said.whole,
            "sizes": [len(tokens), len(blocks), len(said.state)],
        }
        tail = tokens.tobytes() + blocks.tobytes() + said.state
    else:
        fields |= {"side": "destination", "full": said.full, "why": said.why[:_TEXT_MAX]}
        fields |= {name: getattr(said, name) for name in _COUNTS}
    head = json.dumps(fields, separators=(",", ":")).encode()
    length = _HEAD.size + len(head) + len(tail)
    if length > MESSAGE_BYTES_MAX:
        raise ArgumentError(
            f"tokens and state of a request make a message of {length} bytes; {MESSAGE_BYTES_MAX} are allowed",
            given=length,
            maximum=MESSAGE_BYTES_MAX,
        )
    return _HEAD.pack(_MAGIC, _VERSION, len(head)) + head + tail


def decode(message: bytes) -> SourceSays | DestinationSays:
    """The opposite of encode.

    Raises:
        ArgumentError: No such message, of another version, or a field is missing or out of range.
    """
    if len(message) < _HEAD.size:
        raise ArgumentError(f"a message of a migration has {len(message)} bytes")
    magic, version, length = _HEAD.unpack_from(message)
    if magic != _MAGIC or version != _VERSION:
        raise ArgumentError(f"no message of a migration that this version reads: {magic!r}, version {version}")
    body = memoryview(message)[_HEAD.size :]
    try:
        fields = object_of(json.loads(bytes(body[:length])), "message", ("id", "number", "phase", "way", "side"))
    except (ValueError, RecursionError) as error:  # ArgumentError is one, too
        raise ArgumentError(f"a message of a migration cannot be read: {error}") from None
    try:
        if fields["side"] == "source":
            return _source(fields, body[length:])
        return _destination(fields)
    except KeyError as error:
        raise ArgumentError(f"a message of a migration has no {error}") from None


def _source(fields: Any, tail: memoryview) -> SourceSays:
    sizes = _counts(fields["sizes"], "sizes", 3)
    ends = (4 * sizes[0], 4 * sizes[0] + 8 * sizes[1], 4 * sizes[0] + 8 * sizes[1] + sizes[2])
    if len(tail) != ends[2]:
        raise ArgumentError(f"{len(tail)} bytes follow a message that says {ends[2]}")
    said = SourceSays(
        _id(fields),
        _count(fields, "number"),
        _choice(fields, "phase", SourcePhase),
        _text(fields, "request"),
        _text(fields, "namespace"),
        _choice(fields, "way", Way),
        Term(*_counts(fields["term"], "term", 2)),
        _count(fields, "room"),
        _count(fields, "at"),
        np.frombuffer(tail[: ends[0]], "<i4").astype(np.int32),
        _count(fields, "first"),
        np.frombuffer(tail[ends[0] : ends[1]], "<u8").astype(np.uint64),
        _count(fields, "whole"),
        bytes(tail[ends[1] :]),
    )
    if said.whole > said.at + len(said.tokens):
        raise ArgumentError(f"{said.whole} tokens are whole of {said.at + len(said.tokens)}")
    return said


def _destination(fields: Any) -> DestinationSays:
    tokens, blocks, whole, cached, sent = (_count(fields, name) for name in _COUNTS)
    if not isinstance(fields["full"], bool):
        raise ArgumentError(f"full is {fields['full']!r}")
    way: Way = _choice(fields, "way", Way)
    return DestinationSays(
        _id(fields),
        _count(fields, "number"),
        _choice(fields, "phase", DestinationPhase),
        way,
        tokens,
        blocks,
        whole,
        cached,
        sent,
        full=fields["full"],
        why=_text(fields, "why"),
    )


def _id(fields: Any) -> MigrationId:
    return MigrationId(*_counts(fields["id"], "id", 3))


def _counts(value: Any, where: str, length: int) -> list[int]:
    found = [_limited(count_of(each, where, 0), where) for each in list_of(value, where)]
    if len(found) != length:
        raise ArgumentError(f"{where} has {len(found)} numbers, not {length}")
    return found


def _count(fields: Any, name: str) -> int:
    return _limited(count_of(fields[name], name, 0), name)


def _limited(value: int, where: str) -> int:
    if value >= _LIMIT:
        raise ArgumentError(f"{where} is beyond 64 bits")
    return value


def _text(fields: Any, name: str) -> str:
    text = text_of(fields[name], name)
    if len(text) > _TEXT_MAX:
        raise ArgumentError(f"{name} has {len(text)} characters; {_TEXT_MAX} are allowed")
    return text


def _choice(fields: Any, name: str, kind: Any) -> Any:
    if fields[name] not in get_args(kind):
        raise ArgumentError(f"{name} is {fields[name]!r}; it must be one of {', '.join(get_args(kind))}")
    return fields[name]
