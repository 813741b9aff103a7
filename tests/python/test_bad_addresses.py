"""Wrong addresses, tokens and vectors of them: a typed error with the place in the list, nothing changed."""

from __future__ import annotations

import gc
from array import array

import numpy as np
import pytest
from kit import BLOCK, LONG, prompt, refused, small_pool
from wrong_addresses import pool_with_wrong_addresses

import kvpool

pytestmark = pytest.mark.timeout(0 if LONG else 120)


@pytest.fixture
def setting():
    with pool_with_wrong_addresses() as made:
        yield made


ADDRESSES = [
    ("freed", kvpool.StaleAddress, "freed or moved"),
    ("future", kvpool.StaleAddress, "generation"),
    ("never", kvpool.StaleAddress, ""),
    ("beyond", kvpool.ArgumentError, "block 1000"),
    ("foreign", kvpool.NotOwner, "instance 5"),
    ("no_medium", kvpool.ArgumentError, "no medium"),
    ("disk", kvpool.ArgumentError, "DISK has 0 blocks"),
    ("spare", kvpool.ArgumentError, "no medium"),
]


@pytest.mark.parametrize(("kind", "error", "text"), ADDRESSES, ids=[kind for kind, *_ in ADDRESSES])
@pytest.mark.parametrize("form", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
def test_free_accepts_only_valid_addresses(setting, kind, error, text, form):
    wrong = getattr(setting, kind)
    given = [*setting.mine[:2], wrong] if form is not np.array else np.array([*setting.mine[:2], wrong], np.uint64)
    with refused(setting.pool, error, text, wrong, "position 2", address=wrong, position=2):
        setting.pool.free(given if form is np.array else form(given))
    setting.pool.free(setting.mine)


@pytest.mark.parametrize(("kind", "error", "text"), ADDRESSES, ids=[kind for kind, *_ in ADDRESSES])
def test_swap_in_accepts_only_valid_addresses(setting, kind, error, text):
    wrong = getattr(setting, kind)
    with refused(setting.pool, error, text, address=wrong, position=1):
        setting.pool.swap_in([setting.cached[0], wrong])


@pytest.mark.parametrize(
    ("kind", "error", "text"), [row for row in ADDRESSES if row[0] != "foreign"], ids=lambda value: str(value)[:10]
)
def test_insert_accepts_only_valid_addresses(setting, kind, error, text):
    wrong = getattr(setting, kind)
    for position in range(3):
        addrs = setting.mine[:2]
        addrs.insert(position, wrong)
        with refused(setting.pool, error, text, address=wrong, position=position):
            setting.pool.insert(prompt(3, 4), addrs)
        with refused(setting.pool, error, text, address=wrong, position=position):
            setting.pool.batch.insert([(prompt(1, 5), setting.mine[2:]), (prompt(3, 4), addrs)])


def test_the_caller_cannot_free_cached_blocks(setting):
    with refused(setting.pool, kvpool.StateError, "delete", address=setting.cached[0], position=1):
        setting.pool.free([setting.mine[0], setting.cached[0]])


def test_a_list_names_an_address_once(setting):
    first, second, third = setting.mine
    for addrs, position in (([first, first], 1), ([first, second, third, second], 3), ([third, first, third], 2)):
        with refused(setting.pool, kvpool.ArgumentError, "twice", address=addrs[position], position=position):
            setting.pool.free(addrs)
        with refused(setting.pool, kvpool.ArgumentError, "twice", address=addrs[position], position=position):
            setting.pool.insert(prompt(len(addrs), 4), addrs)
    with refused(setting.pool, kvpool.ArgumentError, "twice", address=first):
        setting.pool.batch.insert([(prompt(1, 4), [first]), (prompt(1, 5), [first])])
    setting.pool.free(setting.mine)


def test_a_block_is_freed_once(setting):
    setting.pool.free(setting.mine)
    with refused(setting.pool, kvpool.StaleAddress, address=setting.mine[0], position=0):
        setting.pool.free(setting.mine)


VECTORS = [
    (5, kvpool.ArgumentTypeError, "int"),
    (None, kvpool.ArgumentTypeError, "NoneType"),
    ("text", kvpool.ArgumentTypeError, "str"),
    ({1: 2}, kvpool.ArgumentTypeError, "dict"),
    (range(3), kvpool.ArgumentTypeError, "range"),
    (object(), kvpool.ArgumentTypeError, "object"),
    ([1.5], kvpool.ArgumentTypeError, "float"),
    (["1"], kvpool.ArgumentTypeError, "str"),
    ([None], kvpool.ArgumentTypeError, "NoneType"),
    ([[1]], kvpool.ArgumentTypeError, "list"),
    (np.zeros(3), kvpool.ArgumentTypeError, "float64"),
    (np.zeros(3, bool), kvpool.ArgumentTypeError, "bool"),
    (np.zeros(3, np.int16), kvpool.ArgumentTypeError, "int16"),
    (np.zeros(3, object), kvpool.ArgumentTypeError, "object"),
    (np.zeros(3, "S8"), kvpool.ArgumentTypeError, "S8"),
    (np.zeros(3, ">i8"), kvpool.ArgumentTypeError, ">i8"),
    (np.zeros(3, "M8[s]"), kvpool.ArgumentTypeError, "datetime64"),
    (np.zeros((3, 1), np.int64), kvpool.ArgumentError, "one dimension, and have 2"),
    (np.array(3), kvpool.ArgumentError, "one dimension, and have 0"),
    (array("d", [1.0]), kvpool.ArgumentTypeError, "'d'"),
    (array("h", [1]), kvpool.ArgumentTypeError, "'h'"),
    (memoryview(b"12345678").cast("B", (2, 4)), kvpool.ArgumentError, "one dimension"),
]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [*VECTORS, (b"12345678", kvpool.ArgumentTypeError, "'B'")],
    ids=lambda v: repr(v).partition(" at 0x")[0][:24],
)
def test_addresses_are_a_vector_of_uint64(setting, given, error, text):
    pool = setting.pool
    for call in (
        lambda: pool.free(given),
        lambda: pool.swap_in(given),
        lambda: pool.insert(prompt(3), given),
        lambda: pool.batch.insert([(prompt(3), given)]),
    ):
        with refused(pool, error, text):
            call()
    if given is not None:
        with refused(pool, error, text):
            pool.swap_in(setting.cached, into=given)


@pytest.mark.parametrize("value", [-1, -(2**63), 2**64, 10**30])
def test_an_address_fits_64_unsigned_bits(setting, value):
    for call in (setting.pool.free, setting.pool.swap_in):
        with refused(setting.pool, kvpool.ArgumentError, "addresses[1]", value, position=1):
            call([setting.mine[0], value])


def test_an_address_of_another_pool_is_not_taken_for_a_local_one():
    with small_pool(audit=False) as pool, small_pool(audit=False) as other:
        addrs, theirs = pool.alloc(4), other.alloc(4)
        with refused(other, kvpool.StaleAddress, "another pool"):
            other.free(addrs)
        with refused(pool, kvpool.StaleAddress, "another pool"):
            pool.insert(prompt(4), theirs)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        *VECTORS,
        (np.zeros(4, np.uint32), kvpool.ArgumentTypeError, "uint32"),
        (np.zeros(4, np.uint64), kvpool.ArgumentTypeError, "uint64"),
        (array("Q", [1] * 4), kvpool.ArgumentTypeError, "'Q'"),
        (b"123", kvpool.ArgumentError, "3 bytes"),
        (bytearray(5), kvpool.ArgumentError, "5 bytes"),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0][:24],
)
def test_tokens_are_a_vector_of_int32_or_int64(setting, given, error, text):
    pool = setting.pool
    for call in (
        lambda: pool.match(given),
        lambda: pool.batch.match([given]),
        lambda: pool.insert(given, setting.mine),
        lambda: pool.batch.insert([(given, setting.mine)]),
        lambda: pool.delete(given),
        lambda: pool.explain_match(given),
    ):
        with refused(pool, error, text):
            call()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40, -(2**40)])
def test_a_token_fits_32_bits(setting, value):
    for form in ([1, 2, value], (1, 2, value), np.array([1, 2, value]), array("q", [1, 2, value])):
        for call in (setting.pool.match, setting.pool.delete, setting.pool.explain_match):
            with refused(setting.pool, kvpool.ArgumentError, f"tokens[2] = {value}", position=2):
                call(form)


@pytest.mark.parametrize("value", [10**30, -(10**30)])
def test_a_token_of_any_size_is_refused(setting, value):
    with refused(setting.pool, kvpool.ArgumentError, f"tokens[2] = {value}", position=2):
        setting.pool.match([1, 2, value])


def test_insert_takes_whole_blocks(setting):
    for extra in range(1, BLOCK):
        tokens = prompt(3, 4)[: 2 * BLOCK + extra]
        with refused(setting.pool, kvpool.ArgumentError, f"{extra} left over", tokens=len(tokens), block_tokens=BLOCK):
            setting.pool.insert(tokens, setting.mine[:2])


def test_insert_takes_one_address_for_each_block(setting):
    for blocks, count in ((3, 2), (1, 2), (2, 0), (0, 3)):
        with refused(setting.pool, kvpool.ArgumentError, count, needed=blocks, given=count):
            setting.pool.insert(prompt(blocks, 4), setting.mine[:count])


def test_a_vector_that_changes_while_it_is_read_does_no_harm(setting):
    class Shrinking:
        def __init__(self, owner):
            self.owner = owner

        def __index__(self):
            self.owner.clear()
            gc.collect()
            return 1

    tokens: list = []
    tokens += [Shrinking(tokens), *range(10_000, 10_500)]
    try:
        setting.pool.match(tokens).close()
    except kvpool.Error:
        pass
    addrs: list = []
    addrs += [Shrinking(addrs), *range(10_000, 10_500)]
    with pytest.raises(kvpool.Error):
        setting.pool.free(addrs)
    setting.pool.audit()
