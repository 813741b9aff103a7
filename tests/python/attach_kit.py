"""Pools that are members of a cluster of one machine, made for a test."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.kit import LocalPlace
from kit import small_pool
from transfer.kit import eventually as eventually_within

import kvpool

__all__ = ["eventually", "join", "member", "names", "two", "url"]

eventually = functools.partial(eventually_within, seconds=30)


@pytest.fixture
def url() -> Iterator[str]:
    place = LocalPlace()
    yield place.url
    place.close()


def join(url: str, heartbeat: float = 0.5) -> kvpool.Cluster:
    """No member is to be lost here because the machine is busy."""
    return kvpool.Cluster.join(url, lease=60.0, heartbeat=heartbeat)


@contextlib.contextmanager
def member(url: str, name: str, pool: kvpool.Pool | None = None, **options: Any) -> Iterator[Any]:
    """(pool, cluster, attachment)"""
    with join(url) as cluster, pool or small_pool() as made:
        yield made, cluster, made.attach(cluster, name=name, **options)


@contextlib.contextmanager
def two(url: str, **options: Any) -> Iterator[tuple[kvpool.Pool, kvpool.Pool]]:
    with member(url, "a", **options) as (a, *_), member(url, "b", **options) as (b, *_):
        eventually(lambda: len(a._attachment._members.names()) == len(b._attachment._members.names()) == 1)
        yield a, b


def names(cluster: kvpool.Cluster) -> list[str]:
    return [one.name for one in cluster.members()]
