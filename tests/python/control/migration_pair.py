"""Two places of one process, connected, between which requests migrate; and one that does not hear what it is told."""

from __future__ import annotations

import threading

import pytest
from control.migration_kit import Place, Reader

__all__ = ["make", "make_deaf", "reader"]


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def make(reader):
    found = []

    def two(there=None, **here):
        """Places a and b, connected."""
        found.extend([Place("a", reader, **here), Place("b", reader, **(there or {}))])
        found[0].pool.peers.connect(found[1].address)
        return found

    yield two
    for each in found:
        each.close()


def make_deaf(place, phase):
    """The source does not hear this of its destination before the event is set."""
    hears, heard = threading.Event(), place.migrations._hear_destination
    place.migrations._hear_destination = lambda peer, said: (
        heard(peer, said) if hears.is_set() or said.phase != phase else None
    )
    return hears
