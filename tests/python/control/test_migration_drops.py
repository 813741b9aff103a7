"""A destination that its source has taken a request back from, by proof, tells its engine to drop it: once.

Bugs these tests are there to find: an engine that is told twice, while it still drops the request for the first time;
a request that is not dropped because this process had no thread for it just then.
"""

from __future__ import annotations

import threading

import pytest
from control.migration_kit import Place, Reader, eventually, prompt_of, reference

import kvpool
from kvpool.control.migration import Timing

LENGTH = 60


@pytest.fixture
def taken_back():
    """Places a and b: b decodes a request, has heard nothing for long, and a has taken it back, as b was fenced."""
    reader, proofs, hears = Reader(), [], threading.Event()
    a = Place("a", reader, gone=lambda *_: proofs[0] if proofs else None)
    b = Place("b", reader, timing=Timing(repeat_s=0.05, silence_s=0.5, stop_s=5.0))
    a.pool.peers.connect(b.address)
    heard, hear = a.migrations._hear_destination, b.migrations._incoming.hear
    a.migrations._hear_destination = lambda peer, said: (
        heard(peer, said) if hears.is_set() or said.phase != "decoding" else None
    )
    b.engine.before["adopted"] = lambda _: setattr(
        b.migrations._incoming, "hear", lambda *said: hear(*said) if hears.is_set() else None
    )
    a.engine.begin("r", prompt_of(1), LENGTH)
    moving = a.migrations.migrate("r", "b", timeout=20)
    eventually(lambda: b.migrations._incoming._arrivals.kept)
    proofs.append("fenced")
    with pytest.raises(kvpool.PeerLost):
        moving.wait(20)
    yield a, b, hears
    assert reader.tokens.get("r", []) == reference(prompt_of(1), LENGTH)[10 : 10 + len(reader.tokens.get("r", []))]
    for each in (a, b):
        each.close()


def test_a_request_that_is_being_dropped_is_not_dropped_again(taken_back):
    a, b, hears = taken_back
    incoming, drops, go = b.migrations._incoming, [], threading.Event()
    b.engine.before["drop"] = lambda _: (drops.append(1), go.wait(20))
    hears.set()
    eventually(lambda: drops)
    eventually(lambda: not incoming._chores._chores)  # it has looked once more whether there is something to ask
    for _ in range(3):
        incoming.hear("a", _revoked(incoming))
    go.set()
    eventually(lambda: not b.migrations._threads._running)
    assert drops == [1]
    assert not incoming._dropping
    a.engine.finish("r")
    for each in (a, b):
        each.check_empty()


def test_a_request_is_dropped_later_where_there_is_no_thread_for_it_now(taken_back, monkeypatch):
    a, b, hears = taken_back
    start, refused = threading.Thread.start, []

    def fails(thread):
        if thread.name == "kvpool-migration" and len(refused) < 2:
            refused.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    hears.set()
    eventually(lambda: "r" not in b.engine.requests)
    assert refused == [1, 1]
    eventually(lambda: not b.migrations.arriving())
    a.engine.finish("r")
    for each in (a, b):
        each.check_empty()


def _revoked(incoming):
    """What the source of the only request that is kept says once more."""
    from kvpool.policy.migration import SourceSays

    (kept,) = incoming._arrivals.kept or incoming._arrivals
    return SourceSays(kept.id, 1 << 63, "revoked")
