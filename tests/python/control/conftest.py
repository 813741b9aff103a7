"""Two connected pools with engines, for the tests of migration."""

from __future__ import annotations

import pytest
from control.migration_kit import Place, Reader


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def places(reader):
    found = [Place(name, reader) for name in ("a", "b")]
    found[0].pool.peers.connect(found[1].address)
    yield found
    for each in found:
        each.close()
