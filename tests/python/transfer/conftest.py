"""Fixtures of the tests between pools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer.kit import Child


@pytest.fixture
def child() -> Iterator[Child]:
    """Another process, with other pools."""
    one = Child()
    yield one
    one.close()
