"""kvpool.KeyedIndex: keys in place of tokens, with opaque values."""

from __future__ import annotations

import gc
import hashlib
import threading

import numpy as np
import pytest

import kvpool

KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(300)]
FORMS = {
    "bytes": list,
    "tuple": tuple,
    "hex": lambda keys: [key.hex() for key in keys],
    "upper-case hex": lambda keys: [key.hex().upper() for key in keys],
    "both": lambda keys: [key.hex() if i % 2 else key for i, key in enumerate(keys)],
    "rows": lambda keys: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
    "in a row": b"".join,
    "bytearray": lambda keys: bytearray(b"".join(keys)),
    "memoryview": lambda keys: memoryview(b"".join(keys)),
}


@pytest.fixture
def index():
    return kvpool.KeyedIndex()


@pytest.mark.parametrize("form", FORMS)
def test_keys_come_in_several_forms(index, form):
    keys = FORMS[form](KEYS[:3])
    new, duplicates = index.put(keys, [1, 2, 3])
    assert (new, len(duplicates)) == (3, 0)
    assert index.exists(FORMS[form](KEYS[1:5])).tolist() == [True, True, False, False]
    assert index.count(FORMS[form](KEYS[1:5])) == 2
    with index.match(KEYS[:3]) as hit:
        assert hit.addrs.tolist() == [1, 2, 3]
    assert index.forget(keys).tolist() == [1, 2, 3]


@pytest.mark.parametrize("empty", [[], (), b"", np.zeros((0, 32), np.uint8)])
def test_no_keys_are_no_keys(index, empty):
    assert index.count(empty) == len(index.exists(empty)) == 0
    assert index.put(empty, [])[0] == 0
    with index.match(empty) as hit:
        assert (hit.first, hit.addrs.tolist(), hit.found.tolist()) == (0, [], [])


def test_what_is_stored_stays_and_duplicates_are_told(index):
    index.put(KEYS[:2], [1, 2])
    new, duplicates = index.put(KEYS[:3], [1, 20, 30])
    assert (new, duplicates.tolist()) == (1, [20])
    new, duplicates = index.put([KEYS[7], KEYS[7]], [70, 71])
    assert (new, duplicates.tolist()) == (1, [71])
    assert len(index) == 4


def test_a_match_pins_from_the_first_on_or_every_key(index):
    index.put([KEYS[0], KEYS[1], KEYS[3]], [10, 11, 13])
    first = index.match(KEYS[:4])
    assert (first.first, first.addrs.tolist(), first.found.tolist()) == (2, [10, 11], [True, True, False, False])
    every = index.match(KEYS[:4], every=True)
    assert (every.first, every.addrs.tolist(), every.found.tolist()) == (2, [10, 11, 13], [True, True, False, True])
    assert index.stats()["evictable"] == 0
    with pytest.raises(kvpool.StateError) as caught:
        index.forget(KEYS[3:5])
    assert caught.value.pinned == 1
    every.close()
    assert index.evict(5).tolist() == [13]
    first.close()
    first.close()
    assert first.closed
    with pytest.raises(kvpool.ClosedError), first:
        pass
    assert index.evict(5).tolist() == [11, 10]  # the end of the chain first


def test_a_match_that_is_dropped_releases_its_pins(index):
    index.put(KEYS[:2], [1, 2])
    hit = index.match(KEYS[:2])
    assert index.evict(2).tolist() == []
    del hit
    gc.collect()
    assert index.evict(2).tolist() == [2, 1]


def test_a_match_outlives_the_index(index):
    other = kvpool.KeyedIndex(8)
    other.put([b"12345678"], [1])
    hit = other.match([b"12345678"])
    del other
    gc.collect()
    assert hit.addrs.tolist() == [1]
    hit.close()


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ([KEYS[0], b"short"], kvpool.ArgumentError, r"keys\[1\] has 5 bytes, and a key has 32"),
        ([KEYS[0].hex()[:-1]], kvpool.ArgumentError, r"keys\[0\] has 63 hex digits, and a key has 64"),
        (["g" + KEYS[0].hex()[1:]], kvpool.ArgumentError, "no hex number"),
        (["é" + KEYS[0].hex()[1:]], kvpool.ArgumentError, "no hex number"),
        ([KEYS[0], 5], kvpool.ArgumentTypeError, r"keys\[1\] must be bytes"),
        ([bytearray(32)], kvpool.ArgumentTypeError, "bytearray"),
        (KEYS[0].hex(), kvpool.ArgumentTypeError, "is str"),
        (None, kvpool.ArgumentTypeError, "NoneType"),
        (iter(KEYS), kvpool.ArgumentTypeError, "iterator"),
        (b"x" * 33, kvpool.ArgumentError, "33 bytes"),
        (np.zeros((2, 16), np.uint8), kvpool.ArgumentError, "in rows of 16"),
        (np.zeros((2, 2, 32), np.uint8), kvpool.ArgumentError, "one after another"),
        (np.zeros((2, 64), np.uint8)[:, ::2], kvpool.ArgumentTypeError, "contiguous"),
        (np.zeros((4, 8), np.uint32), kvpool.ArgumentTypeError, "format I"),
    ],
)
def test_what_is_no_key_is_a_typed_error(index, keys, error, text):
    index.put(KEYS[:1], [1])
    for verb in (index.exists, index.count, index.match, index.forget, lambda keys: index.put(keys, [1, 2])):
        with pytest.raises(error, match=text) as caught:
            verb(keys)
        assert type(caught.value) is error
    assert len(index) == index.stats()["evictable"] == 1


def test_other_arguments_that_are_wrong(index):
    for wrong in (7, 65, 0):
        with pytest.raises(kvpool.ArgumentError, match="key_bytes must be 8 to 64"):
            kvpool.KeyedIndex(wrong)
    with pytest.raises(kvpool.ArgumentError, match="2 keys, and 1 values"):
        index.put(KEYS[:2], [1])
    with pytest.raises(kvpool.ArgumentTypeError):
        index.match(KEYS[:1], every=1)
    assert len(index) == 0


def test_threads_may_use_it_at_once(index):
    def work(own: int) -> None:
        for round_ in range(100):
            keys = KEYS[(round_ * 7 + own) % 250 :][:40]
            index.put(keys, list(range(40)))
            with index.match(keys, every=True) as hit:
                assert hit.addrs.max() < 40
            if own == 0:
                index.evict(20)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    index.audit()
    assert index.stats()["evictable"] == len(index)
