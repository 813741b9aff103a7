"""Every wrong argument of a verb: a typed error with the numbers in it, nothing changed, no crash."""

from __future__ import annotations

import gc
import pickle
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import LONG, prompt, refused, repeats, run_script, small_pool, state_of, store
from wrong_addresses import changed, pool_with_wrong_addresses

import kvpool
from kvpool import DISK, DRAM, HBM, MIXED

pytestmark = pytest.mark.timeout(0 if LONG else 120)


@pytest.fixture
def setting():
    with pool_with_wrong_addresses() as made:
        yield made


INT64_MAX = 2**63 - 1


COUNTS = [
    (-1, kvpool.ArgumentError, {"value": -1}),
    (-(10**30), kvpool.ArgumentError, {}),
    (1.0, kvpool.ArgumentTypeError, {}),
    ("1", kvpool.ArgumentTypeError, {}),
    (None, kvpool.ArgumentTypeError, {}),
    ([1], kvpool.ArgumentTypeError, {}),
    (np.float64(1), kvpool.ArgumentTypeError, {}),
]


@pytest.mark.parametrize(("count", "error", "fields"), COUNTS, ids=[repr(count) for count, *_ in COUNTS])
@pytest.mark.parametrize("verb", ["alloc", "evict", "swap_out", "subscribe"])
def test_a_count_is_a_non_negative_int(setting, verb, count, error, fields):
    text = count if error is kvpool.ArgumentError else type(count).__name__
    with refused(setting.pool, error, text, **fields):
        getattr(setting.pool, verb)(count)


@pytest.mark.parametrize("medium", [HBM, DRAM, MIXED])
@pytest.mark.parametrize("count", [17, 2**24 + 1, 2**32 + 1, 2**63 - 1, 2**63, 10**30])
def test_a_huge_count_is_out_of_blocks(setting, count, medium):
    capacity = 16 if medium == MIXED else 8
    active, cached = (0, 0) if medium == DRAM else (3, 2)
    for evict in (True, False):
        with refused(
            setting.pool,
            kvpool.OutOfBlocks,
            min(count, INT64_MAX),
            requested=min(count, INT64_MAX),
            capacity=capacity,
            free=capacity - active - cached,
            active=active,
            evictable=cached,
            pinned=0,
        ):
            setting.pool.alloc(count, medium=medium, evict=evict)


def test_a_huge_count_evicts_and_moves_what_there_is(setting):
    assert len(setting.pool.swap_out(10**30)) == 2
    assert setting.pool.evict(10**30) == 2


@pytest.mark.parametrize(
    ("medium", "error"),
    [
        (0, kvpool.ArgumentError),
        (4, kvpool.ArgumentError),
        (-1, kvpool.ArgumentError),
        (10**30, kvpool.ArgumentError),
        ("hbm", kvpool.ArgumentTypeError),
        (None, kvpool.ArgumentTypeError),
        (1.0, kvpool.ArgumentTypeError),
        (True, kvpool.ArgumentTypeError),
    ],
)
def test_a_medium_must_be_known_to_the_verb(setting, medium, error):
    pool = setting.pool
    for call in (
        lambda: pool.alloc(1, medium=medium),
        lambda: pool.evict(1, medium=medium),
        lambda: pool.tensor(medium),
        lambda: pool.arena(medium),
    ):
        with refused(pool, error, "medium"):
            call()


def test_two_media_have_separate_memory(setting):
    for call in (setting.pool.tensor, setting.pool.arena):
        with refused(setting.pool, kvpool.ArgumentError, "8", value=8):
            call(MIXED)
        with refused(setting.pool, kvpool.ArgumentError, "3", value=3):
            call(DISK)


def test_the_core_reads_no_memory_of_an_invalid_medium(setting):
    pool = setting.pool
    for medium, error in ((0, kvpool.ArgumentError), (DISK, kvpool.Unsupported), (4, kvpool.ArgumentError),
                          (MIXED, kvpool.ArgumentError), (255, kvpool.ArgumentError),
                          (True, kvpool.ArgumentTypeError)):  # fmt: skip
        with refused(pool, error):
            pool._arena(medium)
        with refused(pool, error):
            pool._view(medium, [1], [1], "uint8")


def test_no_pool_has_blocks_on_disk(setting):
    with refused(setting.pool, kvpool.Unsupported, "DISK"):
        setting.pool.alloc(1, medium=DISK)
    with refused(setting.pool, kvpool.Unsupported, "DISK"):
        setting.pool.evict(1, medium=DISK)


@pytest.mark.parametrize(
    ("namespace", "error"),
    [(None, kvpool.ArgumentTypeError), (5, kvpool.ArgumentTypeError), (b"n", kvpool.ArgumentTypeError),
     ("\ud800", kvpool.ArgumentError)],
    ids=repr,
)  # fmt: skip
def test_a_namespace_is_a_str(setting, namespace, error):
    pool = setting.pool
    for call in (
        lambda: pool.match(prompt(2), namespace=namespace),
        lambda: pool.batch.match([prompt(2)], namespace=namespace),
        lambda: pool.insert(prompt(3, 4), setting.mine, namespace=namespace),
        lambda: pool.batch.insert([(prompt(3, 4), setting.mine)], namespace=namespace),
        lambda: pool.delete(prompt(2), namespace=namespace),
        lambda: pool.explain_match(prompt(2), namespace=namespace),
    ):
        with refused(pool, error, "namespace"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.match(),
        lambda pool: pool.match([1], "", 3),
        lambda pool: pool.match([1], tenant="x"),
        lambda pool: pool.insert([1, 2, 3, 4]),
        lambda pool: pool.alloc(),
    ],
)
def test_a_call_of_the_wrong_form_is_a_type_error(setting, call):
    with refused(setting.pool, TypeError):
        call(setting.pool)


def test_an_int_that_raises_is_refused(setting):
    class Broken:
        def __index__(self):
            raise RuntimeError

    for call in (setting.pool.alloc, setting.pool.evict):
        with refused(setting.pool, kvpool.ArgumentTypeError, "Broken"):
            call(Broken())
    with refused(setting.pool, kvpool.ArgumentTypeError, "Broken"):
        setting.pool.match([Broken()])


def test_after_close_every_call_says_that_the_pool_is_closed():
    pool = small_pool()
    addrs = pool.alloc(2)
    hit = pool.insert(prompt(1), pool.alloc(1))
    stream = pool.subscribe()
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    calls = {
        "alloc": lambda: pool.alloc(1),
        "alloc all": lambda: pool.alloc(8, medium=MIXED),
        "alloc too much": lambda: pool.alloc(100),
        "alloc strictly": lambda: pool.alloc(8, evict=False),
        "free": lambda: pool.free(addrs),
        "match": lambda: pool.match(prompt(1)),
        "match_batch": lambda: pool.batch.match([prompt(1)]),
        "insert": lambda: pool.insert(prompt(2), addrs),
        "insert_batch": lambda: pool.batch.insert([(prompt(2), addrs)]),
        "delete": lambda: pool.delete(prompt(1)),
        "evict": lambda: pool.evict(1),
        "swap_out": lambda: pool.swap_out(1),
        "swap_in": lambda: pool.swap_in(hit.addrs),
        "adopt": lambda: pool.adopt([1]),
        "explain_match": lambda: pool.explain_match(prompt(1)),
        "subscribe": lambda: pool.subscribe(),
        "drain": lambda: stream.drain(),
        "stats": lambda: pool.stats(),
        "audit": lambda: pool.audit(),
        "tensor": lambda: pool.tensor(HBM),
        "arena": lambda: pool.arena(DRAM),
    }
    for name, call in calls.items():
        with pytest.raises(kvpool.ClosedError, match="closed"):
            call()
            pytest.fail(name)
    assert repr(pool) == "<Pool closed>"
    hit.close()
    stream.close()


def test_wrong_arguments_to_a_closed_pool_are_errors_too():
    pool = small_pool()
    pool.close()
    for call in (lambda: pool.alloc(-1), lambda: pool.free([1.5]), lambda: pool.match("x"), lambda: pool.tensor(9)):
        with pytest.raises(kvpool.Error):
            call()


def test_a_pool_ends_with_its_with_block():
    with pytest.raises(KeyError), small_pool() as pool:
        raise KeyError
    assert pool.closed


def test_an_error_crosses_to_another_process_whole(setting):
    with pytest.raises(kvpool.OutOfBlocks) as caught:
        setting.pool.alloc(100)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is kvpool.OutOfBlocks
    assert str(again) == str(caught.value)
    assert again.fields == caught.value.fields
    assert again.requested == 100


def test_an_address_in_an_error_has_no_sign(setting):
    wrong = changed(setting.mine[0], instance=2**14 - 1)
    with refused(setting.pool, kvpool.NotOwner, wrong, address=wrong):
        setting.pool.free([wrong])


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=9),
    st.integers(0, 2**64 - 1),
)  # fmt: skip


vectors = st.one_of(
    anything,
    st.lists(anything, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
    st.lists(st.integers(0, 2**64 - 1), max_size=4).map(lambda values: np.array(values, np.uint64)),
    st.lists(st.integers(0, 15), max_size=4).map(lambda blocks: [1 << 47 | 1 << 24 | block for block in blocks]),
    st.sampled_from([np.zeros((2, 2), np.uint64), np.zeros(3), np.array([], np.int64), array("l", [3] * 8)]),
)


@settings(max_examples=repeats(300, long=50_000))
@given(data=st.data(), count=anything, medium=anything, first=vectors, second=vectors, namespace=anything)
def test_no_argument_crashes_or_breaks_the_pool(data, count, medium, first, second, namespace):
    with small_pool(4, 4, audit=False) as pool:
        store(pool, prompt(2))
        mine = pool.alloc(1)
        calls = {
            "alloc": lambda: pool.alloc(count, medium=medium),
            "free": lambda: pool.free(first),
            "match": lambda: pool.match(first, namespace=namespace),
            "match_batch": lambda: pool.batch.match([first, second]),
            "insert": lambda: pool.insert(first, second, namespace=namespace),
            "insert_batch": lambda: pool.batch.insert([(prompt(1, 9), mine), (first, second)]),
            "delete": lambda: pool.delete(first, namespace=namespace),
            "evict": lambda: pool.evict(count, medium=medium),
            "swap_out": lambda: pool.swap_out(count),
            "swap_in": lambda: pool.swap_in(first, into=second),
            "explain_match": lambda: pool.explain_match(first),
            "tensor": lambda: pool.tensor(medium),
            "adopt": lambda: pool.adopt(first),
            "subscribe": lambda: pool.subscribe(count),
        }
        name = data.draw(st.sampled_from(sorted(calls)))
        before = state_of(pool)
        try:
            calls[name]()
        except (kvpool.Error, TypeError):
            before["match_calls"] = before["requested_tokens"] = before["matched_tokens"] = None
            after = state_of(pool)
            after["match_calls"] = after["requested_tokens"] = after["matched_tokens"] = None
            assert after == before
        gc.collect(0)
        pool.audit()


def test_a_python_allocation_that_fails_changes_nothing():
    """Calls that return no handle: pybind11 does not survive when there is no memory for the object that it returns."""
    pytest.importorskip("_testcapi")
    run_script("""
import _testcapi
pool = kit.small_pool(audit=False)
kit.store(pool, kit.prompt(3))
pool.swap_out(1)
tokens = kit.prompt(3)
calls = {
    "alloc": lambda: pool.alloc(2),
    "explain": lambda: pool.explain_match(tokens.tolist()),
    "stats": lambda: pool.stats(),
    "evict": lambda: pool.evict(1, kvpool.HBM),
    "swap_out": lambda: pool.swap_out(1),
    "delete": lambda: pool.delete(tokens),
}
for name, call in calls.items():
    for nth in range(1, 1000):
        kit.store(pool, tokens, evict=True)
        before = kit.state_of(pool)
        result = None
        _testcapi.set_nomemory(nth, nth + 1)
        try:
            result = call()
            outcome = "done"
        except MemoryError:
            outcome = "no memory"
        finally:
            _testcapi.remove_mem_hooks()
        if name == "alloc" and result is not None:
            pool.free(result)
        elif outcome == "no memory" and name != "swap_out":  # its answer is made when all is done
            assert kit.state_of(pool) == before, (name, nth)
        pool.audit()
        if outcome == "done" and nth > 3:
            break
    else:
        raise AssertionError(name)
""")
