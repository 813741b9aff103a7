"""Requests that were handed over, and that their source asks back or must not ask back; and what a closed pool counts.

Bugs these tests are there to find: a request that is given back to an instance that has lost its memory; one that stays
stopped as long as an error lasts, though its source is there and asks for it; one that counts as under way for ever.
"""

from __future__ import annotations

import threading

import pytest
from control.migration_kit import LENGTH, check, eventually, prompt_of
from control.migration_pair import make, make_deaf, reader

import kvpool

__all__ = ["make", "reader"]

LOST = kvpool.PeerLost("ranks [1] of this instance are lost, and the instance with them")


class Held:
    """A request that was handed over from a to b, whose last fetch waits for `go`."""

    def __init__(self, a, b):
        self.a, self.b, self.go, self.reached = a, b, threading.Event(), threading.Event()
        self.heard = []  # the phases that b hears
        self.then = lambda: None  # called before the last fetch goes on
        fetch, hear = b.pool.fetch, b.migrations._incoming.hear

        def held(*args, priority, **named):
            if priority == "decode":
                self.reached.set()
                self.go.wait(30)
                self.then()
            return fetch(*args, priority=priority, **named)

        def hears(peer, said):
            self.heard.append(said.phase)
            hear(peer, said)

        b.pool.fetch, b.migrations._incoming.hear = held, hears
        a.engine.begin("r", prompt_of(12), LENGTH)
        self.moving = a.migrations.migrate("r", "b", by="kv", timeout=20)
        assert self.reached.wait(20)
        (self.arriving,) = b.migrations._incoming._arriving.values()

    def has_come(self, phase):
        return any(said.phase == phase for said in list(self.arriving.dialogue._heard))


@pytest.fixture
def hold(make):
    found = []

    def held(*args, **named):
        found.append(Held(*make(*args, **named)))
        return found[0]

    yield held
    for each in found:
        each.go.set()
        del each.b.pool.fetch


def test_an_instance_that_has_lost_its_memory_does_not_ask_a_request_back(hold, reader):
    """Its links end later: it would be heard, and nobody would have the request."""
    held = hold()
    a, b = held.a, held.b
    make_deaf(a, "moving")
    before = len(held.heard)
    a.migrations._evidence.lost = lambda: LOST
    with pytest.raises(kvpool.PeerLost, match="ranks"):
        held.moving.wait(20)
    eventually(lambda: len(held.heard) > before)  # its last word
    assert "withdrawn" not in held.heard
    assert held.moving.state == "handed over"
    held.go.set()
    eventually(lambda: "r" in b.engine.requests)
    check(reader, b.engine, "r", prompt_of(12))


def test_an_instance_that_loses_its_memory_when_it_asks_says_so_to_nobody(hold, reader):
    held = hold()
    a, b = held.a, held.b
    (leaving,) = a.migrations._leaving.values()
    a.migrations._evidence.lost = lambda: LOST if leaving.source.state == "withdrawn" else None
    held.moving.cancel()
    with pytest.raises(kvpool.Cancelled):
        held.moving.wait(20)
    held.go.set()
    eventually(lambda: "r" in b.engine.requests)
    assert "withdrawn" not in held.heard
    check(reader, b.engine, "r", prompt_of(12))


def test_a_source_that_cannot_find_out_whether_it_has_lost_its_memory_asks_nothing_back(hold, reader):
    held = hold()

    def fails():
        raise OSError("out of descriptors")

    held.a.migrations._evidence.lost, lost = fails, held.a.migrations._evidence.lost
    before = len(held.heard)
    eventually(lambda: len(held.heard) > before + 1)
    assert "withdrawn" not in held.heard
    held.a.migrations._evidence.lost = lost
    held.go.set()
    held.moving.wait(20)
    check(reader, held.b.engine, "r", prompt_of(12))


def test_an_error_that_lasts_at_the_destination_gives_a_request_back_that_its_source_asks_for(hold, reader, caplog):
    held, tried = hold(), []

    def fails(*_):
        tried.append(1)
        raise OSError("out of descriptors")

    held.b.migrations._evidence.of = fails
    held.go.set()
    eventually(lambda: len(tried) > 2)
    held.moving.cancel()
    with pytest.raises(kvpool.Cancelled):
        held.moving.wait(20)
    assert held.moving.state == "here"
    check(reader, held.a.engine, "r", prompt_of(12))
    eventually(lambda: not held.b.migrations.arriving())
    assert caplog.messages.count("request 'r' has met an error") == 1
    for each in held.a, held.b:
        each.check_empty()


def test_an_error_at_the_destination_gives_nothing_back_to_a_source_that_is_not_connected(hold, reader):
    """It has asked, and is gone: nothing can prove that while the error lasts."""
    proofs, tried = [], []
    held = hold({"gone": lambda *_: proofs[0] if proofs else None})
    evidence = held.b.migrations._evidence
    of = evidence.of

    def fails(*args):
        tried.append(1)
        if len(tried) < 4:
            raise OSError("out of descriptors")
        return of(*args)

    make_deaf(held.a, "failed")
    held.moving.cancel()
    eventually(lambda: held.has_come("withdrawn"))
    proofs.append("ended")
    evidence.of, evidence.incarnation = fails, lambda _: None
    held.go.set()
    eventually(lambda: "r" in held.b.engine.requests)
    check(reader, held.b.engine, "r", prompt_of(12))


def test_an_error_that_lasts_does_not_keep_a_destination_from_its_end(hold):
    held = hold()

    def fails(*_):
        raise OSError("out of descriptors")

    held.b.migrations._evidence.of = fails
    held.go.set()
    end = threading.Thread(target=held.b.migrations.close, args=(600,))
    end.start()
    end.join(30)
    assert not end.is_alive()
    assert held.b.migrations.totals().arrived == {("kv", "failed"): 1}


def test_a_request_whose_pool_is_closed_after_the_hand_over_has_failed(hold):
    held = hold()
    held.then = held.b.pool.close
    held.go.set()
    eventually(lambda: not held.b.migrations.arriving())
    assert [*held.b.migrations.totals().arrived.values()] == [1]
    assert {result for _, result in held.b.migrations.totals().arrived} == {"failed"}


def test_a_request_that_is_torn_off_before_it_is_decoded_has_failed(hold):
    held = hold()
    end = threading.Thread(target=held.b.migrations.close, args=(0,))
    end.start()
    eventually(lambda: held.arriving._torn)
    held.go.set()
    end.join(30)
    assert not end.is_alive()
    assert held.b.migrations.totals().arrived == {("kv", "failed"): 1}
