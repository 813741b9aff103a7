"""What the tests of folders share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.storage import DirectoryStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    with DirectoryStore(tmp_path / "store") as opened:
        yield opened
