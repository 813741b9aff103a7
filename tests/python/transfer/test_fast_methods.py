"""Verbs with many keyword arguments find them faster than pybind11 does, and treat every call as it does."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from kit import prompt, small_pool

import kvpool
from kvpool import DRAM, HBM

FAST = ("transfer", "transfer_with_insert", "fetch", "fetch_with_insert")
_numbers = itertools.count()


def not_interned(name: str) -> str:
    """An equal str that is another object than the name in the source."""
    return "".join(list(name))


@pytest.fixture
def two() -> Iterator[tuple[kvpool.Pool, kvpool.Pool]]:
    with small_pool(name="a") as a, small_pool(name="b") as b:
        a.peers.connect(b.peers.listen(f"unix:@kvpool-fast-{os.getpid()}-{next(_numbers)}"))
        yield a, b


@pytest.mark.parametrize("name", FAST)
def test_it_is_the_method_of_the_pool_with_its_signature_and_its_docstring(name: str, two: Any) -> None:
    method = getattr(kvpool.Pool, name)
    signature = inspect.signature(method)
    assert next(iter(signature.parameters)) == "self"
    assert list(inspect.signature(getattr(two[0], name)).parameters) == list(signature.parameters)[1:]
    assert "Raises:" in method.__doc__
    assert method.__name__ == name


def test_names_that_are_not_interned_are_found(two: Any) -> None:
    a, b = two
    addrs = a.alloc(1)
    to = a.alloc(1, instance="b")
    handle = a.transfer("b", addrs, **{not_interned("to"): to, not_interned("checksum"): True}).wait()
    assert handle.addrs.tolist() == to.tolist()
    assert a.transfer(**{not_interned("peer"): "b", "addrs": addrs, "to": to}).wait().addrs.tolist() == to.tolist()
    a.transfer_with_insert("b", prompt(1), addrs, **{not_interned("namespace"): "n"}).wait()
    with b.match(prompt(1), namespace="n") as hit:
        assert len(hit.addrs) == 1
    with b.match(prompt(1)) as hit:
        assert len(hit.addrs) == 0


def test_defaults_are_those_of_the_signature(two: Any) -> None:
    """The same call with every keyword at its default does the same."""
    a, b = two
    stated = {
        name: {one.name: one.default for one in inspect.signature(getattr(a, name)).parameters.values()
               if one.kind is one.KEYWORD_ONLY}
        for name in FAST
    }  # fmt: skip
    addrs = a.alloc(1)
    theirs = b.alloc(1, medium=HBM)
    b.insert(prompt(1), theirs).close()
    for keywords in ({}, stated["transfer"]):
        there = a.transfer("b", addrs, **keywords).wait()
        assert kvpool.media(there.addrs).tolist() == [HBM]
        assert there.stats.strategy == "by_request_agg"
    for keywords in ({}, stated["transfer_with_insert"]):
        assert len(a.transfer_with_insert("b", prompt(1, 2), addrs, **keywords).wait().addrs) == 1
    source = a.peers.match("b", prompt(1)).addrs
    for keywords in ({}, stated["fetch"]):
        assert kvpool.media(a.fetch("b", source, **keywords).wait().addrs).tolist() == [HBM]
    for keywords in ({}, stated["fetch_with_insert"]):
        assert len(a.fetch_with_insert("b", prompt(1), **keywords).wait().addrs) == 1


@pytest.mark.parametrize("name", FAST)
def test_a_call_with_wrong_arguments_is_refused_as_that_of_any_method(name: str, two: Any) -> None:
    a, _ = two
    method = getattr(a, name)
    addrs = a.alloc(1)
    positional = ["b", prompt(1), addrs][: 3 if name == "transfer_with_insert" else 2]
    for args, keywords in (
        ([], {}),
        (positional[:-1], {}),
        ([*positional, DRAM], {}),
        (positional, {"peer": "b"}),
        (positional, {"no_such_thing": 1}),
        (positional, {not_interned("no_such_thing"): 1}),
    ):
        with pytest.raises(TypeError):
            method(*args, **keywords)
    with pytest.raises(TypeError):
        getattr(kvpool.Pool, name)(object(), *positional)
    with pytest.raises(TypeError):
        getattr(kvpool.Pool, name)()
    never_made = kvpool.Pool.__new__(kvpool.Pool)
    with pytest.raises(RuntimeError) as slow:
        never_made._transfer_batch([])
    with pytest.raises(RuntimeError) as fast:
        getattr(never_made, name)(*positional)
    assert str(fast.value) == str(slow.value)
    with pytest.raises(kvpool.ArgumentTypeError):
        method(7, *positional[1:])
    assert a.stats().hbm.active == 1


def test_errors_of_the_core_are_kvpools(two: Any) -> None:
    a, _ = two
    addrs = a.alloc(2)
    with pytest.raises(kvpool.PeerLost):
        a.transfer("nobody", addrs, timeout=0.2)
    with pytest.raises(kvpool.ArgumentError) as caught:
        a.transfer("b", addrs, to=a.alloc(1, instance="b"))
    assert (caught.value.given, caught.value.needed) == (1, 2)
    with pytest.raises(kvpool.ArgumentTypeError):
        a.transfer("b", addrs, to=object())
