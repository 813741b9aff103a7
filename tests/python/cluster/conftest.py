"""One etcd for all tests of membership that need no more of it than a prefix."""

from __future__ import annotations

import pytest
from cluster.etcd_server import EtcdServer
from cluster.kit import EtcdPlace, LocalPlace


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory):
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def own_etcd(tmp_path):
    """One that the test may kill."""
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture(params=["local", "etcd"])
def place(request):
    one = LocalPlace() if request.param == "local" else EtcdPlace(request.getfixturevalue("etcd_server"))
    yield one
    one.close()


@pytest.fixture
def local():
    one = LocalPlace()
    yield one
    one.close()
