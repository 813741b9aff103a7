"""Live migrations at bad moments: a deadline that passes while the engine stops, an error after the hand-over, a close
from within a call of the engine.

Bugs these tests are there to find: a request that is handed over too late, and then in doubt; one that its destination
gives up although its source has died, unnoticed for the same error; a close that waits for the thread that calls it.
"""

from __future__ import annotations

import logging
import threading
import time

import pytest
from control.migration_kit import LENGTH, check, eventually, prompt_of
from control.migration_pair import make, reader
from control.rebalancing_kit import World

import kvpool
from kvpool.policy.rebalancing import PlannedMove

__all__ = ["make", "reader"]


def test_a_request_whose_deadline_passes_while_it_is_stopped_is_not_handed_over(make, reader):
    a, b = make()
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.engine.before["stop"] = lambda _: time.sleep(1.2)
    moving = a.migrations.migrate("r", "b", timeout=1.0)
    with pytest.raises(kvpool.DeadlineExceeded):
        moving.wait(20)
    assert moving.state == "here"
    assert a.engine.requests["r"].term.number == 0  # nobody was given the next one
    check(reader, a.engine, "r", prompt_of(1))
    for each in (a, b):
        each.check_empty()


def test_an_error_at_the_destination_after_the_hand_over_does_not_lose_a_request_whose_source_has_died(make, reader):
    """What fails is the look whether its source is gone, which it is by then."""
    proofs = []
    a, b = make({"gone": lambda *_: proofs[0] if proofs else None})
    evidence, fetch, failed = b.migrations._evidence, b.pool.fetch, []
    of = evidence.of

    def fails(*args):
        if proofs and len(failed) < 3:
            failed.append(1)
            raise OSError("out of descriptors")
        return of(*args)

    def dies(*args, priority, **named):
        if priority == "decode":
            proofs.append("ended")
        return fetch(*args, priority=priority, **named)

    evidence.of, b.pool.fetch = fails, dies
    heard = a.migrations._hear_destination
    a.migrations._hear_destination = lambda peer, said: heard(peer, said) if said.phase == "moving" else None
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.migrations.migrate("r", "b", by="kv", timeout=20)
    eventually(lambda: "r" in b.engine.requests)
    assert failed
    check(reader, b.engine, "r", prompt_of(1))
    del b.pool.fetch


def test_a_request_that_is_lost_with_its_source_because_the_engine_fails_is_an_error_in_the_log(make, caplog):
    proofs = []
    a, b = make({"gone": lambda *_: proofs[0] if proofs else None})
    fetch = b.pool.fetch

    def dies(peer, *args, priority, **named):
        if priority == "decode":
            proofs.append("ended")
            raise kvpool.PeerLost("the link is lost", peer=peer)
        return fetch(peer, *args, priority=priority, **named)

    def prefill(_):
        raise RuntimeError("the GPU does not answer")

    b.pool.fetch, b.engine.before["prefill"] = dies, prefill
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.migrations.migrate("r", "b", by="kv", timeout=20)
    eventually(lambda: proofs and not b.migrations.arriving())
    lost = [each for each in caplog.records if each.levelno == logging.ERROR and "does not arrive" in each.getMessage()]
    assert [each.getMessage() for each in lost] == ["request 'r' does not arrive: the GPU does not answer"]
    b.check_empty()
    del b.pool.fetch


@pytest.mark.parametrize("side", ["a", "b"])
def test_an_engine_may_close_its_migrations_in_a_call_of_them(make, reader, side):
    a, b = make()
    place, call = (a, "release") if side == "a" else (b, "adopted")
    errors, closed = [], threading.Event()

    def close(_):
        try:
            place.migrations.close(timeout=0.1)
        except RuntimeError as error:  # cannot join current thread
            errors.append(error)
        closed.set()

    place.engine.before[call] = close
    a.engine.begin("r", prompt_of(1), LENGTH)
    a.migrations.migrate("r", "b", timeout=20)
    assert closed.wait(20)
    assert errors == []
    assert place.migrations.closed


def test_an_engine_may_close_its_rebalancer_in_a_call_of_a_move():
    world = World()
    one, _ = world.add_all({"a": 5}, {})
    errors, done = [], threading.Event()

    def migrate(*_, **__):
        try:
            one.epochs.carrier.close(0.1)
        except RuntimeError as error:
            errors.append(error)
        done.set()
        raise kvpool.Busy("it is closed")

    one.migrations.migrate = migrate
    one.epochs.carrier.carry([PlannedMove("a", 1, 2, 5, "kv")], {2: "i2"}, 0)
    assert done.wait(20)
    assert errors == []
