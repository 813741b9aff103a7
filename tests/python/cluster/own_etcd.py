"""Fixtures of the tests that kill etcd under its members, in one process or in many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.etcd_server import EtcdServer
from cluster.kit import EtcdPlace

__all__ = ["own", "own_etcd"]


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """One that the test may kill."""
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def own(own_etcd: EtcdServer) -> Iterator[EtcdPlace]:
    """The URL of a cluster in it."""
    one = EtcdPlace(own_etcd)
    yield one
    one.close()
