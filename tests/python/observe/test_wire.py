"""The bytes of KV events: the same as vLLM's, and no input does harm."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from kvpool.observe.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode, encode

TOKENS = np.arange(8, dtype=np.int32)
STORED = BlockStored([2**63 + 1, 2], 7, TOKENS, 4, medium="GPU", extra_keys=[["tenant"], ["tenant"]])


def test_events_are_maps_in_a_batch_that_is_an_array():
    """As vLLM 0.24 and later; the sample is from a subscriber's log of vLLM 0.26."""
    batch = EventBatch(1.5, [STORED, BlockRemoved([b"x" * 32], "CPU"), AllBlocksCleared()], 3)
    assert msgpack.unpackb(encode(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [2**63 + 1, 2],
                "parent_block_hash": 7,
                "token_ids": list(range(8)),
                "block_size": 4,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["tenant"], ["tenant"]],
            },
            {"type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_events_can_be_arrays_for_older_subscribers():
    batch = EventBatch(1.5, [BlockStored([2], None, TOKENS, 8), BlockRemoved([5]), AllBlocksCleared()], 0)
    assert msgpack.unpackb(encode(batch, "array")) == [
        1.5,
        [["BlockStored", [2], None, list(range(8)), 8, None, None, None], ["BlockRemoved", [5], None],
         ["AllBlocksCleared"]],
        0,
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_written_batches_are_read_back(encoding):
    batch = decode(encode(EventBatch(2.5, [STORED, BlockRemoved([1, b"a"], "GPU"), AllBlocksCleared()], 1), encoding))
    stored, removed, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 1)
    assert isinstance(stored, BlockStored)
    assert stored.token_ids.dtype == np.int32
    assert stored.token_ids.tolist() == TOKENS.tolist()
    assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == ([2**63 + 1, 2], 7, "GPU")
    assert stored.extra_keys == [["tenant"], ["tenant"]]
    assert removed == BlockRemoved([1, b"a"], "GPU")
    assert cleared == AllBlocksCleared()


@pytest.mark.parametrize(
    "raw",
    [
        [1.0, [["BlockStored", [5], None, [1, 2], 2, None]]],  # the first that vLLM published, without a medium
        [1.0, [["BlockStored", [5], None, [1, 2], 2, None, "GPU", None, [None], 0, "full_attention", None, "new"]], 0],
        {"ts": 1.0, "events": [{"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None,
                                "token_ids": [1, 2], "block_size": 2, "later": {"x": 1}}]},
    ],
)  # fmt: skip
def test_older_and_newer_forms_are_read(raw):
    (event,) = decode(msgpack.packb(raw)).events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids.tolist(), event.block_size) == ([5], [1, 2], 2)


def test_sglang_names_a_salt_in_a_field():
    stored = BlockStored([5], None, TOKENS, 8, cache_salt="s")
    (event,) = decode(encode(EventBatch(0.0, [stored]))).events
    assert event.cache_salt == "s"
    with pytest.raises(kvpool.ProtocolError):
        decode(msgpack.packb([0.0, [{"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None,
                                     "token_ids": [1, 2], "block_size": 2, "cache_salt": 7}]]))  # fmt: skip


def test_events_of_unknown_kinds_are_left_out():
    raw = [1.0, [{"type": "BlockPinned", "x": 1}, ["AllBlocksCleared"]], None]
    assert decode(msgpack.packb(raw)).events == [AllBlocksCleared()]


def stored(**changes):
    fields = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return msgpack.packb([1.0, [fields | changes], 0])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgpack.packb(7),
        msgpack.packb([1.0]),
        msgpack.packb(["now", [], 0]),
        msgpack.packb([1.0, [3], 0]),
        msgpack.packb([1.0, [[]], 0]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}], 0]),
        msgpack.packb([1.0, [["BlockRemoved", 5]], 0]),
        msgpack.packb([1.0, [], "rank"]),
        msgpack.packb({1.0: 1}),
        stored(block_size=0),
        stored(block_size=True),
        stored(token_ids=[1, 2]),
        stored(token_ids=[1.5]),
        stored(token_ids=[1 << 31]),
        stored(token_ids=b"abcd"),
        stored(block_hashes=["5"]),
        stored(parent_block_hash="5"),
        stored(extra_keys=[]),
        stored(extra_keys=["x"]),
        stored(medium=3),
        msgpack.packb(EventBatch.__name__) + b"more",
    ],
)
def test_bytes_that_are_no_batch_are_a_typed_error(payload):
    with pytest.raises(kvpool.ProtocolError, match="no batch of KV events"):
        decode(payload)


@given(
    st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
            | st.sampled_from(["BlockStored", "BlockRemoved", "type", "events", "ts"]),
            lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
        ).map(msgpack.packb),
    )
)  # fmt: skip
def test_any_bytes_are_a_batch_or_that_error(payload):
    try:
        batch = decode(payload)
    except kvpool.ProtocolError:
        return
    assert all(isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared) for event in batch.events)
