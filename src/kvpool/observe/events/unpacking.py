"""Reads long messages of msgpack in pieces, between which other threads run.

msgpack holds the GIL for as long as a call of it takes: for a batch of KV events of 16 MiB that is a third of a second,
in which a router would forward nothing.
"""

from __future__ import annotations

from typing import Any, Final

try:
    import msgpack
except ImportError as error:
    raise ImportError("kvpool.observe.events needs msgpack: pip install 'kvpool[events]'") from error

__all__ = ["WHOLE_BYTES", "unpack"]

WHOLE_BYTES: Final = 128 << 10
"""What is no longer is read by one call, in a few milliseconds."""

_LEVELS: Final = 4  # the batch, its events, the fields of one, and the items of a field are read one by one
_NESTED_MAX: Final = 1 << 12  # items of what lies below


def unpack(payload: bytes) -> Any:
    """The value in a message.

    Raises:
        ValueError, msgpack.UnpackException: It is no value, or not one alone; or it is long, and a list below the items
            of an event's fields has more than 4,096 items.
    """
    if len(payload) <= WHOLE_BYTES:
        return msgpack.unpackb(payload, raw=False, strict_map_key=True)
    reader = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        max_buffer_size=len(payload),
        max_array_len=_NESTED_MAX,
        max_map_len=_NESTED_MAX,
    )
    reader.feed(payload)
    value = _value(reader, payload, _LEVELS)
    if reader.tell() != len(payload):
        raise ValueError("something follows the value")
    return value


def _value(reader: msgpack.Unpacker, payload: bytes, levels: int) -> Any:
    """The next value; that of a list or map of the uppermost levels by one call for each of its items."""
    at = reader.tell()
    code = payload[at] if at < len(payload) else -1
    if not levels or (not _is_list(code) and not _is_map(code)):
        return reader.unpack()
    count = reader.read_array_header() if _is_list(code) else reader.read_map_header()
    if count > len(payload) - at:  # each has a byte at least
        raise ValueError(f"{count} items in {len(payload) - at} bytes")
    if _is_map(code):
        return {_key(reader): _value(reader, payload, levels - 1) for _ in range(count)}
    if levels == 1:
        unpack_next = reader.unpack
        return [unpack_next() for _ in range(count)]
    return [_value(reader, payload, levels - 1) for _ in range(count)]


def _is_list(code: int) -> bool:
    return 0x90 <= code <= 0x9F or code in (0xDC, 0xDD)


def _is_map(code: int) -> bool:
    return 0x80 <= code <= 0x8F or code in (0xDE, 0xDF)


def _key(reader: msgpack.Unpacker) -> str:
    key = reader.unpack()
    if not isinstance(key, str):
        raise ValueError(f"a {type(key).__name__} as the name of a field")
    return key
