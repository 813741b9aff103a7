"""Reads long batches of KV events in pieces, between which other threads run.

msgpack holds the GIL for as long as a call of it takes: for a batch of 16 MiB that is a third of a second, in which a
router would forward nothing. Full garbage collections hold it, too, and look at every list that is alive. So each event
is decoded when it has been read, and its lists are dropped before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

try:
    import msgpack
except ImportError as error:
    raise ImportError("kvpool.observe.events needs msgpack: pip install 'kvpool[events]'") from error

__all__ = ["EVENTS_MAX", "NESTED_MAX", "TOO_LONG", "WHOLE_BYTES", "unpack_batch"]

_Event = TypeVar("_Event")

WHOLE_BYTES: Final = 128 << 10
"""A message of at most so many bytes is read by one call, in a few milliseconds."""

EVENTS_MAX: Final = 1 << 16
"""Events in a batch: what they become is alive together, and each full garbage collection looks at all of it."""

NESTED_MAX: Final = 1 << 12
"""Values in a list or map inside a field's list, or in a map that is a field, of a message that is read in pieces."""

_LISTS: Final = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_LISTS_AND_MAPS: Final = _LISTS | _MAPS


class _TooLong:
    """Takes the place of a value that has more than `NESTED_MAX` values."""


TOO_LONG: Final = _TooLong()
"""A value of no type that a field may have: an event fails by it only if its kind needs the value."""


def unpack_batch(payload: bytes, read: Callable[[Any], _Event | None]) -> Any:
    """The batch in a message: a list or a map, whose events are what `read` makes of them, without those it drops.

    A message of more than `WHOLE_BYTES` means the same as a short one, but for what is longer than `NESTED_MAX`: that
    is `TOO_LONG`, and not looked at.

    Args:
        payload: The message.
        read: Decodes an event, which is any value that msgpack has; None drops it.

    Raises:
        ValueError, msgpack.UnpackException: The bytes are no value, or more than one; or there are more than
            `EVENTS_MAX` events.
    """
    if len(payload) > WHOLE_BYTES:
        return _Pieces(payload).batch(read)
    batch = _whole(payload)
    where: Any = "events" if isinstance(batch, dict) else 1
    if isinstance(batch, dict | list) and (where in batch if where == "events" else len(batch) > 1):
        events = batch[where]
        if isinstance(events, list):
            _check_count(len(events))
            batch[where] = _kept(map(read, events))
    return batch


def _whole(packed: bytes) -> Any:
    return msgpack.unpackb(packed, raw=False, strict_map_key=True)


def _kept(events: Any) -> list[Any]:
    return [event for event in events if event is not None]


def _check_count(events: int) -> None:
    if events > EVENTS_MAX:
        raise ValueError(f"{events} events in a batch; it may have {EVENTS_MAX}")


class _Pieces:
    """Reads one message by a call for each value that is no list or map."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._reader = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=max(1, len(payload)))
        self._reader.feed(payload)

    def batch(self, read: Callable[[Any], Any]) -> Any:
        value: Any
        if self._next_in(_LISTS):
            value = [self._events(read) if at == 1 else self._nested() for at in range(self._count())]
        elif self._next_in(_MAPS):
            value = {}
            for _ in range(self._count()):
                key = self._key()
                value[key] = self._events(read) if key == "events" else self._nested()
        else:
            value = self._reader.unpack()
        if self._reader.tell() != len(self._payload):
            raise ValueError("something follows the value")
        return value

    def _events(self, read: Callable[[Any], Any]) -> Any:
        if not self._next_in(_LISTS):
            return self._nested()
        count = self._count()
        _check_count(count)
        return _kept(read(self._event()) for _ in range(count))

    def _event(self) -> Any:
        if self._next_in(_LISTS):
            return [self._field() for _ in range(self._count())]
        if self._next_in(_MAPS):
            return {self._key(): self._field() for _ in range(self._count())}
        return self._reader.unpack()

    def _field(self) -> Any:
        if not self._next_in(_LISTS):
            return self._nested()
        payload, tell, unpack, end = self._payload, self._reader.tell, self._reader.unpack, len(self._payload)
        return [
            self._nested() if (at := tell()) < end and payload[at] in _LISTS_AND_MAPS else unpack()
            for _ in range(self._count())
        ]

    def _nested(self) -> Any:
        """A value with all that it has inside; `TOO_LONG` for one with too many values."""
        if not self._next_in(_LISTS_AND_MAPS):
            return self._reader.unpack()
        start, values, due = self._reader.tell(), 0, 1
        while due:
            due -= 1
            values += 1
            if self._next_in(_LISTS):
                due += self._count()
            elif self._next_in(_MAPS):
                due += 2 * self._count()
            else:
                self._reader.skip()
        return _whole(self._payload[start : self._reader.tell()]) if values <= NESTED_MAX + 1 else TOO_LONG

    def _key(self) -> str | bytes:
        key = None if self._next_in(_LISTS_AND_MAPS) else self._reader.unpack()
        if not isinstance(key, str | bytes):
            raise ValueError("the name of a field is no text")
        return key

    def _count(self) -> int:
        """Of the items in the list or map that begins here."""
        at = self._reader.tell()
        read = self._reader.read_array_header if self._next_in(_LISTS) else self._reader.read_map_header
        count: int = read()
        if count > len(self._payload) - at:  # each has a byte at least
            raise ValueError(f"{count} items in {len(self._payload) - at} bytes")
        return count

    def _next_in(self, codes: frozenset[int]) -> bool:
        at = self._reader.tell()
        return at < len(self._payload) and self._payload[at] in codes
