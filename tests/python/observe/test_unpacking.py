"""Long batches of KV events are read in pieces, and mean the same as short ones."""

from __future__ import annotations

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


@given(VALUES)
def test_a_value_is_the_same_in_pieces(value):
    packed = msgpack.packb(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpacking, "WHOLE_BYTES", -1)
        assert unpacking.unpack(packed) == msgpack.unpackb(packed) == value


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
