"""Content keys: equal content gives equal keys on any host, and any difference gives others."""

from __future__ import annotations

import array
import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool
from kvpool.storage import ContentKeys
from kvpool.storage import keys as keys_module

LAYOUT = kvpool.KVLayout(layers=2, kv_heads=4, head_dim=8, dtype="float16", block_tokens=4)
TOKENS = list(range(100, 112))


def keys_of(tokens=TOKENS, namespace="", **changes):
    return ContentKeys(**{"model": "m", "layout": LAYOUT, "secret": b"s"} | changes).of_tokens(tokens, namespace)


def test_a_key_has_32_bytes_and_each_whole_block_has_one():
    assert [len(one) for one in keys_of([*TOKENS, 1, 2, 3])] == [32, 32, 32]
    assert keys_of([1, 2, 3]) == keys_of([]) == []


def test_keys_never_change():
    """Of these very fields: other hosts and later releases look for them. A change needs another FORMAT_VERSION."""
    assert keys_of()[0].hex() == "477c93ba796cbbee40f73b12588d279986d3dd6ea31837644c658b31da919a36"
    assert (
        ContentKeys(model="m", layout=LAYOUT).of_engine_keys([b"e"])[0].hex()
        == "6fb6fa05d7c9ae8cd7767b1154b43090ebea88d7c5ef6ee39667dfb4bf833633"
    )


def test_another_process_gives_the_same_keys():
    code = (
        "import kvpool; from kvpool.storage import ContentKeys; "
        "layout = kvpool.KVLayout(layers=2, kv_heads=4, head_dim=8, dtype='float16', block_tokens=4); "
        "print(ContentKeys(model='m', layout=layout, secret=b's').of_tokens(list(range(100, 112)))[-1].hex())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == keys_of()[-1].hex()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "m2"},
        {"rank_slice": "tp 0 of 2"},
        {"rank_slice": "tp 1 of 2"},
        {"compression": "fp8"},
        {"secret": b"t"},
        {"secret": b""},
        {"secret": b"s" * 65},
        {"secret": b"s" * 64},
        {"namespace": "tenant"},
        *(
            {"layout": dataclasses.replace(LAYOUT, **change)}
            for change in (
                {"layers": 3}, {"kv_heads": 8}, {"head_dim": 16}, {"dtype": "bfloat16"}, {"block_tokens": 2},
                {"dims": "NHD"}, {"pages": "fused"},
            )
        ),
        {"layout": kvpool.RawLayout(LAYOUT.block_bytes, 4)},
        {"layout": kvpool.RawLayout(LAYOUT.block_bytes + 1, 4)},
    ],
    ids=str,
)  # fmt: skip
def test_each_field_gives_other_keys(changes):
    assert set(keys_of(**changes)).isdisjoint(keys_of())


def test_another_version_of_the_format_gives_other_keys(monkeypatch):
    before = keys_of()
    monkeypatch.setattr(keys_module, "FORMAT_VERSION", 2)
    assert set(keys_of()).isdisjoint(before)


def test_the_order_of_a_layout_changes_nothing():
    """The bytes of a block are the same, whether its pieces lie together or apart."""
    assert keys_of(layout=dataclasses.replace(LAYOUT, order="discrete")) == keys_of()


def test_fields_cannot_run_into_each_other():
    """Where one field ends and the next begins is a part of the key."""
    texts = ["", "a", "ab", "b", "a\0b", "\0"]
    found = {
        keys_of(model=f"m{model}", rank_slice=rank, compression=packed or "none", namespace=namespace)[0]
        for model in texts for rank in texts for packed in texts for namespace in texts
    }  # fmt: skip
    assert len(found) == len(texts) ** 4


def test_an_engines_keys_are_not_tokens():
    names = ContentKeys(model="m", layout=LAYOUT, secret=b"s")
    token_bytes = np.array(TOKENS[:4], "<i8").tobytes()
    assert names.of_engine_keys([token_bytes])[0] not in keys_of()
    assert names.of_engine_keys([b"a", b"b"]) == [names.of_engine_keys([one])[0] for one in (b"a", b"b")]
    assert names.of_engine_keys([b"a"], "x") != names.of_engine_keys([b"a"])
    assert len({names.of_engine_keys([one])[0] for one in (b"a", b"a\0", b"\0a")}) == 3


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">i8"])
def test_tokens_of_any_integer_type_give_the_same_keys(dtype):
    assert keys_of(np.array(TOKENS, dtype)) == keys_of()


def test_tokens_of_any_container_give_the_same_keys():
    expected = keys_of()
    assert keys_of(tuple(TOKENS)) == expected
    assert keys_of(array.array("i", TOKENS)) == expected
    assert keys_of(array.array("q", TOKENS)) == expected
    assert keys_of(np.array(TOKENS, np.int32).tobytes()) == expected
    assert keys_of(memoryview(np.array(TOKENS, np.int32).tobytes())) == expected
    assert keys_of(memoryview(np.array(TOKENS, np.int64))) == expected
    assert keys_of(np.repeat(np.array(TOKENS, np.int32), 2)[::2]) == expected


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), st.integers(0, 40))
def test_the_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens, end):
    assert keys_of(tokens[:end]) == keys_of(tokens)[: min(end, len(tokens)) // 4]


@given(st.lists(st.integers(0, 3), min_size=4, max_size=24), st.lists(st.integers(0, 3), min_size=4, max_size=24))
def test_keys_are_equal_exactly_as_far_as_the_tokens_are(one, other):
    for position, (mine, its) in enumerate(zip(keys_of(one), keys_of(other), strict=False)):
        end = 4 * (position + 1)
        assert (mine == its) == (one[:end] == other[:end])


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ("abcd", kvpool.ArgumentTypeError),
        ([1.0, 2.0], kvpool.ArgumentTypeError),
        ([True, False], kvpool.ArgumentTypeError),
        ([None], kvpool.ArgumentTypeError),
        (7, kvpool.ArgumentTypeError),
        ({1, 2}, kvpool.ArgumentTypeError),
        ([[1, 2], [3, 4]], kvpool.ArgumentError),
        ([[1, 2], [3]], kvpool.ArgumentTypeError),
        ([1 << 63], kvpool.ArgumentError),
        ([1 << 70], kvpool.ArgumentError),
        (b"abc", kvpool.ArgumentError),
        (np.zeros(2, np.float32), kvpool.ArgumentTypeError),
    ],
)
def test_what_is_no_tokens_is_refused(tokens, error):
    with pytest.raises(error):
        keys_of(tokens)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": ""}, kvpool.ArgumentError),
        ({"model": 1}, kvpool.ArgumentTypeError),
        ({"rank_slice": 0}, kvpool.ArgumentTypeError),
        ({"secret": "text"}, kvpool.ArgumentTypeError),
        ({"layout": None}, kvpool.ArgumentTypeError),
        ({"namespace": None}, kvpool.ArgumentTypeError),
    ],
)
def test_wrong_fields_are_refused(arguments, error):
    with pytest.raises(error):
        keys_of(**arguments)


@pytest.mark.parametrize(
    ("keys", "error"),
    [(["text"], kvpool.ArgumentTypeError), ([b""], kvpool.ArgumentError), ([b"x" * 4097], kvpool.ArgumentError)],
)
def test_wrong_keys_of_an_engine_are_refused(keys, error):
    with pytest.raises(error):
        ContentKeys(model="m", layout=LAYOUT).of_engine_keys(keys)
