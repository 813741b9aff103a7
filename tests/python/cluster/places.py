"""Clusters of both kinds, as fixtures: one etcd for all tests that need only a prefix in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.etcd_server import EtcdServer
from cluster.kit import EtcdPlace, LocalPlace, Place

__all__ = ["etcd", "etcd_server", "local", "place"]


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: Any) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture(params=["local", "etcd"])
def place(request: Any) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> Iterator[EtcdPlace]:
    one = EtcdPlace(etcd_server)
    yield one
    one.close()


@pytest.fixture
def local() -> Iterator[LocalPlace]:
    one = LocalPlace()
    yield one
    one.close()
