"""One etcd for all tests of membership that need only a prefix in it."""

from __future__ import annotations

import pytest
from cluster.etcd_server import EtcdServer
from cluster.kit import EtcdPlace, LocalPlace
from cluster.own_etcd import own, own_etcd

__all__ = ["own", "own_etcd"]


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture(params=["local", "etcd"])
def place(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def etcd(etcd_server):
    one = EtcdPlace(etcd_server)
    yield one
    one.close()


@pytest.fixture
def local():
    one = LocalPlace()
    yield one
    one.close()
