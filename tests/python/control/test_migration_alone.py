"""Requests whose source has died, or is fenced, after the hand-over: nobody but their destination has them.

Bugs these tests are there to find: a request that is given back to a source that is gone, or given up because there is
no room just then; an instance that is kept for one that has ended; a source that is asked again and again.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from control.migration_kit import LENGTH, Place, check, eventually, prompt_of
from control.migration_pair import make, make_deaf, reader

import kvpool
from kvpool.control.migration import Timing

__all__ = ["make", "reader"]


def test_last_blocks_that_cannot_be_fetched_are_computed(make, reader):
    """The source may still write what it was asked for: the tokens go into other blocks."""
    a, b = make()
    prompt = prompt_of(11, 22)
    asked, fetch = [], b.pool.fetch

    def fail(peer, addrs, *, to, priority, **named):
        if priority == "decode":
            asked.extend(to)
            raise kvpool.PeerLost("the link is lost", peer=peer)
        return fetch(peer, addrs, to=to, priority=priority, **named)

    b.pool.fetch = fail
    a.engine.begin("r", prompt, LENGTH)
    result = a.migrations.migrate("r", "b", by="kv").wait(20)
    assert (result.way, result.blocks_sent) == ("tokens", 5)
    assert b.engine.prefilled == [(20, 21)]
    assert not set(asked) & set(b.engine.requests["r"].blocks[:6])
    check(reader, b.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in (a, b):
        each.check_empty()
    del b.pool.fetch


def test_a_request_that_only_its_destination_has_waits_for_room(make, reader):
    """Its source has died before the last fetch, which took the last room with it."""
    a, b = make()
    prompt = prompt_of(12, 22)
    a.engine.begin("r", prompt, LENGTH)
    proofs, tried, filler, evidence, fetch = [], [], [], b.migrations._evidence, b.pool.fetch

    def fail(peer, addrs, *, priority, **named):
        if priority == "decode":
            filler.append(b.pool.alloc(b.pool.stats().hbm.free))
            (arriving,) = b.migrations._incoming._arriving.values()
            room, grow = arriving._room, arriving._room.grow
            filler.append(room.own[6:])  # its room for growth
            room.own = room.own[:6]
            room.grow = lambda blocks: (tried.append(blocks), grow(blocks))
            proofs.append("ended")
            raise kvpool.PeerLost("the link is lost", peer=peer)
        return fetch(peer, addrs, priority=priority, **named)

    b.pool.fetch, evidence.of = fail, lambda peer, incarnation: proofs[0] if proofs else None
    b.pool.free, free = lambda addrs: None if proofs and len(addrs) == 1 else free(addrs), b.pool.free
    a.migrations.migrate("r", "b", by="kv", timeout=20)
    eventually(lambda: len(tried) > 2)
    assert "r" not in b.engine.requests
    del b.pool.free
    for addrs in filler:
        b.pool.free(addrs)
    eventually(lambda: "r" in b.engine.requests)
    check(reader, b.engine, "r", prompt)
    del b.pool.fetch


@pytest.mark.parametrize("error", [kvpool.Busy("the batch is full"), kvpool.OutOfBlocks("no slot")])
def test_a_request_that_only_its_destination_has_waits_for_room_in_the_engine(make, reader, error):
    """Its source has died when the engine is asked to take it, and has no room for it just then."""
    a, b, proofs, asked = *make({"gone": lambda *_: proofs[0] if proofs else None}), [], []

    def adopt(_):
        proofs[:] = ["ended"]
        asked.append(1)
        if len(asked) < 4:
            raise error

    b.engine.before["adopt"] = adopt
    hears = make_deaf(a, "failed")
    a.engine.begin("r", prompt_of(12), LENGTH)
    a.migrations.migrate("r", "b", timeout=20)
    eventually(lambda: "r" in b.engine.requests)
    assert len(asked) == 4
    check(reader, b.engine, "r", prompt_of(12))
    hears.set()


def test_a_request_that_its_source_asks_back_and_dies_is_not_given_back(make, reader):
    """Its word and the proof of its end are there before the destination has looked at either."""
    proofs = []
    a, b = make({"gone": lambda *_: proofs[0] if proofs else None})
    reached, go, fetch = threading.Event(), threading.Event(), b.pool.fetch

    def slowly(*args, priority, **named):
        if priority == "decode":
            reached.set()
            go.wait(20)
        return fetch(*args, priority=priority, **named)

    b.pool.fetch = slowly
    make_deaf(a, "failed")
    a.engine.begin("r", prompt_of(12), LENGTH)
    moving = a.migrations.migrate("r", "b", by="kv", timeout=20)
    assert reached.wait(20)
    (arriving,) = b.migrations._incoming._arriving.values()
    moving.cancel()
    eventually(lambda: any(said.phase == "withdrawn" for said in list(arriving.dialogue._heard)))
    proofs.append("ended")
    go.set()
    eventually(lambda: "r" in b.engine.requests)
    check(reader, b.engine, "r", prompt_of(12))
    del b.pool.fetch


def test_a_request_that_waits_for_room_ends_when_its_destination_takes_in_no_more(make, caplog):
    a, b, proofs = *make({"gone": lambda *_: proofs[0] if proofs else None}), []

    def adopt(_):
        proofs.append("ended")
        raise kvpool.Busy("the batch is full")

    b.engine.before["adopt"] = adopt
    make_deaf(a, "failed")
    a.engine.begin("r", prompt_of(12), LENGTH)
    a.migrations.migrate("r", "b", timeout=20)
    eventually(lambda: len(proofs) > 3)
    assert [each for each in caplog.messages if "waits for room" in each] == [
        "request 'r' has no source any more, and waits for room: Busy: the batch is full"
    ]
    end = threading.Thread(target=b.migrations.close, args=(600,))
    end.start()
    eventually(lambda: not b.migrations.arriving())
    end.join(60)
    assert not end.is_alive()
    b.check_empty()


def test_an_engine_that_has_no_room_gives_a_request_back_as_full(make, reader):
    a, b = make()

    def adopt(_):
        raise kvpool.OutOfBlocks("no slot")

    b.engine.before["adopt"] = adopt
    a.engine.begin("r", prompt_of(12), LENGTH)
    with pytest.raises(kvpool.OutOfBlocks, match="no slot"):
        a.migrations.migrate("r", "b", timeout=20).wait()
    check(reader, a.engine, "r", prompt_of(12))
    for each in (a, b):
        each.check_empty()


def test_a_request_of_a_fenced_source_that_has_ended_keeps_no_instance(make, reader):
    """Its host is gone, and nothing but the cluster's word proves that: until somebody says that it has ended."""
    proofs, go = [], threading.Event()
    a, b = make({"gone": lambda name, incarnation: proofs[-1] if proofs else None})
    a.engine.before["release"] = lambda _: (proofs.append("fenced"), go.wait(60))
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.migrations.migrate("r", "b")
    arrivals = b.migrations._incoming._arrivals
    eventually(lambda: arrivals.kept)
    assert b.migrations.arriving() == ("r",)
    b.engine.finish("r")
    eventually(lambda: b.migrations.arriving() == ())
    assert [each.by_proof for each in arrivals.kept] == [True]  # it may wake and ask
    proofs.append("ended")
    eventually(lambda: not arrivals.kept)
    go.set()


def test_a_source_that_is_fenced_is_asked_more_and_more_rarely(make, monkeypatch):
    _, b = make({"timing": Timing(repeat_s=1.0, silence_s=8.0)})
    clock, asked = [0], []
    incoming, found = b.migrations._incoming, SimpleNamespace(id=None, by_proof=False)
    monkeypatch.setattr("kvpool.control.migration.incoming.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(incoming, "_ask", lambda *_: asked.append(clock[0]))
    monkeypatch.setattr(incoming, "_arrivals", SimpleNamespace(find=lambda _: found))
    ask = incoming._asking(found, None)
    for clock[0] in range(40):
        found.by_proof = clock[0] >= 3  # before, it was only silent
        assert not ask()
    assert asked == [0, 1, 2, 3, 5, 9, 17, 25, 33]


def test_sources_that_are_fenced_use_up_no_place_of_those_that_come(make, reader):
    fenced = set()
    timing = Timing(repeat_s=0.05, silence_s=3.0, stop_s=5.0)
    gone = {"gone": lambda name, incarnation: "fenced" if incarnation in fenced else None}
    a, b = make({"arrivals_max": 1, "timing": timing, **gone})
    hears = make_deaf(a, "decoding")
    c = Place("c", reader)
    try:
        c.pool.peers.connect(b.address)
        for number, name in enumerate(("r", "s"), 7):
            a.engine.begin(name, prompt_of(number), LENGTH)
            a.migrations.migrate(name, "b", timeout=20)
            eventually(lambda name=name: name in b.engine.requests)
        fenced.add(a.pool._incarnation())
        eventually(lambda: not b.migrations._threads._running)
        assert sorted(b.migrations.arriving()) == ["r", "s"]
        with pytest.raises(kvpool.Busy):
            b.migrations.migrate("r", "c")
        c.engine.begin("u", prompt_of(10), LENGTH)
        c.migrations.migrate("u", "b").wait(20)
        check(reader, b.engine, "u", prompt_of(10))
    finally:
        hears.set()
        c.close()
