"""Long batches of KV events are read in pieces, and mean the same as short ones."""

from __future__ import annotations

import os
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.observe.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode, encode, unpacking

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)


@pytest.fixture
def in_pieces(monkeypatch):
    """However short a message is."""
    monkeypatch.setattr(unpacking, "WHOLE_BYTES", -1)


def in_pieces_and_whole(payload, read=lambda event: event):
    whole = unpacking.unpack_batch(payload, read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "WHOLE_BYTES", -1)
        return unpacking.unpack_batch(payload, read), whole


@given(VALUES, st.sampled_from(["alone", "event", "array", "map"]))
def test_a_value_is_the_same_in_pieces(value, place):
    batch = {"alone": value, "event": [1.0, [value], 0], "array": [1.0, [["A", value]], 0]}.get(
        place, {"ts": value, "events": [{"type": "A", "x": value}]}
    )
    pieces, whole = in_pieces_and_whole(msgpack.packb(batch))
    assert pieces == whole
    if place != "alone" and value is not None:
        assert whole == batch


STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5], "block_size": 1}
MANY = list(range(2 * unpacking.NESTED_MAX))


@pytest.mark.parametrize(
    "event",
    [
        ["New", [MANY]],
        ["New", MANY, {str(number): number for number in MANY}],
        {"type": "New", "nested": [[[MANY]]]},
        {"nested": [{"a": MANY}], "type": "New"},
        STORED | {"unknown": [MANY]},
        STORED | {b"bytes": 1},
        STORED | {"extra_keys": [[b"a", ["b", {b"c": 1}]]]},
        [],
        7,
        {b"type": "New"},
        {7: "New", "type": "New"},
    ],
)
def test_an_event_means_the_same_in_pieces(event):
    """One of an unknown kind is ignored alone, whatever it holds."""

    def decoded():
        try:
            return repr(decode(msgpack.packb([1.0, [event, {"type": "AllBlocksCleared"}], 0])))
        except ProtocolError:
            return ProtocolError

    whole = decoded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "WHOLE_BYTES", -1)
        assert decoded() == whole


def test_a_list_inside_a_fields_list_is_bounded_in_pieces_only():
    def packed(values):
        return msgpack.packb([1.0, [STORED | {"extra_keys": [list(range(values))]}], 0])

    for values in (unpacking.NESTED_MAX, unpacking.NESTED_MAX + 1):
        assert len(decode(packed(values)).events[0].extra_keys[0]) == values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "WHOLE_BYTES", -1)
        assert len(decode(packed(unpacking.NESTED_MAX)).events[0].extra_keys[0]) == unpacking.NESTED_MAX
        with pytest.raises(ProtocolError):
            decode(packed(unpacking.NESTED_MAX + 1))


@pytest.mark.parametrize("pieces", [False, True])
def test_the_events_of_a_batch_are_counted(pieces, monkeypatch):
    monkeypatch.setattr(unpacking, "WHOLE_BYTES", -1 if pieces else 1 << 30)
    most = [["AllBlocksCleared"]] * unpacking.EVENTS_MAX
    assert len(decode(msgpack.packb([1.0, most, 0])).events) == unpacking.EVENTS_MAX
    for batch in ([1.0, [*most, ["New"]], 0], {"ts": 1.0, "events": [*most, ["New"]]}):
        with pytest.raises(ProtocolError, match="65537 events"):
            decode(msgpack.packb(batch))


def test_an_event_is_decoded_before_the_next_one_is_read(in_pieces, monkeypatch):
    """Full garbage collections look at all lists that are alive, and keep all other threads waiting."""
    done = []

    def read_raw(self, plain=unpacking._Pieces._event):
        done.append("read")
        return plain(self)

    def decode_one(event):
        done.append("decoded")
        return len(event)

    monkeypatch.setattr(unpacking._Pieces, "_event", read_raw)
    packed = msgpack.packb([1.0, [["Marked", number] for number in range(5)], 0])
    assert unpacking.unpack_batch(packed, decode_one) == [1.0, [2] * 5, 0]
    assert done == ["read", "decoded"] * 5


def test_the_unpacker_in_python_reads_long_batches_too():
    """msgpack falls back to it where its extension was not built, and it checks more limits."""
    code = """
import msgpack, numpy as np
from kvpool.observe.events import BlockStored, EventBatch, decode, encode, unpacking
assert msgpack.Unpacker.__module__ == "msgpack.fallback"
stored = BlockStored(list(range(5000)), None, np.arange(80_000, dtype=np.int32), 16)
packed = encode(EventBatch(1.0, [stored] * 2, 0))
assert len(packed) > unpacking.WHOLE_BYTES
assert [len(event.token_ids) for event in decode(packed).events] == [80_000] * 2
"""
    environment = os.environ | {"MSGPACK_PUREPYTHON": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@given(st.binary(max_size=60) | VALUES.map(msgpack.packb).flatmap(lambda packed: st.just(packed + b"\x01")))
def test_bytes_in_pieces_raise_nothing_but_a_protocol_error(payload):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "WHOLE_BYTES", -1)
        try:
            decode(payload)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93\x01",  # cut short
        b"\xdd\xff\xff\xff\xff",  # four thousand million items
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb([1.0, [], 0]) + b"\x00",
        msgpack.packb([1.0, [{3: 4}], 0]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [[list(range(5000))]], 1]], 0]),
        b"\x91" * 5000,
    ],
)
def test_odd_bytes_are_no_batch(payload, in_pieces):
    with pytest.raises(ProtocolError):
        decode(payload)


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_no_call_reads_much_of_a_long_batch(encoding, monkeypatch):
    """msgpack keeps all other threads waiting during a call, NumPy while it converts a list."""
    sizes, converted, empty = [], [], np.empty
    whole = msgpack.unpackb

    class Reader:
        def __init__(self, **settings):
            self._reader = msgpack_unpacker(**settings)

        def __getattr__(self, name):
            return getattr(self._reader, name)

        def unpack(self):
            before = self._reader.tell()
            value = self._reader.unpack()
            sizes.append(self._reader.tell() - before)
            return value

    msgpack_unpacker = msgpack.Unpacker
    monkeypatch.setattr(unpacking.msgpack, "Unpacker", Reader)
    monkeypatch.setattr(unpacking.msgpack, "unpackb", lambda payload, **more: sizes.append(len(payload)))

    def emptied(n, **more):
        class Noting(np.ndarray):
            def __setitem__(self, where, piece):
                converted.append(len(piece))
                super().__setitem__(where, piece)

        return empty(n, **more).view(Noting)

    monkeypatch.setattr(np, "empty", emptied)
    blocks, size = 5000, 16
    tokens = np.arange(blocks * size, dtype=np.int32) + 100_000
    events = [BlockStored(list(range(blocks)), None, tokens, size), BlockRemoved([7]), AllBlocksCleared()]
    packed = encode(EventBatch(2.5, events, 1), encoding)
    assert len(packed) > 2 * unpacking.WHOLE_BYTES
    stored, removed, _ = decode(packed).events
    assert np.array_equal(stored.token_ids, tokens)
    assert (stored.block_hashes, removed.block_hashes) == (list(range(blocks)), [7])
    assert max(sizes) < 100
    assert sum(converted) == len(tokens)
    assert max(converted) <= 1 << 14
    monkeypatch.undo()
    assert whole(packed)[0] == 2.5
