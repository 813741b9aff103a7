"""What an engine, a cluster or a machine raises at a bad moment of a live migration: the request stays in one place.

Bugs these tests are there to find: an error that ends the thread of a migration although the other side counts on it,
so that a request is decoded in two places or in none; room and slots that such an error leaves behind.
"""

from __future__ import annotations

import threading
import time

import pytest
from control.migration_kit import LENGTH, check, eventually, prompt_of
from control.migration_pair import make, make_deaf, reader

import kvpool
from kvpool.control.migration.background import Chores
from kvpool.control.migration.room import Room
from kvpool.control.migration.talking import Dialogue

__all__ = ["make", "reader"]


class Failing:
    """Instead of a method: raises while it is to, and goes on as before then."""

    def __init__(self, method):
        self.method = method
        self.left = 0

    def __call__(self, *args, **named):
        if self.left:
            self.left -= 1
            raise OSError("out of descriptors")
        return self.method(*args, **named)


def test_an_error_at_the_destination_after_it_decodes_leaves_it_the_request(make, reader):
    a, b = make()
    prompt = prompt_of(1)
    hears = make_deaf(a, "decoding")
    evidence = b.migrations._evidence
    evidence.of = failing = Failing(evidence.of)
    a.engine.begin("r", prompt, LENGTH)
    moving = a.migrations.migrate("r", "b", timeout=20)
    eventually(lambda: "r" in b.engine.requests)
    failing.left = 2
    eventually(lambda: not failing.left)
    time.sleep(0.2)  # the source repeats that it has handed the request over
    assert moving.state == "handed over"
    hears.set()
    moving.wait(20)
    assert moving.state == "there"
    check(reader, b.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in (a, b):
        each.check_empty()


@pytest.mark.parametrize("arrives", [True, False])
def test_an_error_at_the_source_after_the_hand_over_does_not_lose_the_request(make, reader, arrives):
    a, b = make()
    prompt = prompt_of(2)
    reached, go = threading.Event(), threading.Event()

    def adopt(_):
        reached.set()
        go.wait(20)
        if not arrives:
            raise RuntimeError("no room in the batch")

    b.engine.before["adopt"] = adopt
    evidence = a.migrations._evidence
    evidence.of = failing = Failing(evidence.of)
    a.engine.begin("r", prompt, LENGTH)
    moving = a.migrations.migrate("r", "b", timeout=20)
    assert reached.wait(20)
    failing.left = 2
    eventually(lambda: not failing.left)
    assert moving.state == "handed over"
    go.set()
    if arrives:
        moving.wait(20)
    else:
        with pytest.raises(OSError, match="descriptors"):
            moving.wait(20)
    check(reader, (b if arrives else a).engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in (a, b):
        each.check_empty()


def test_a_destination_that_is_closed_says_what_it_decodes_and_nothing_else(make, reader):
    a, b = make({"take_inbox": False})
    prompt = prompt_of(3)
    with b.pool.inbox.on_received(b.migrations.take):
        hears = make_deaf(a, "decoding")
        a.engine.begin("r", prompt, LENGTH)
        moving = a.migrations.migrate("r", "b", timeout=20)
        eventually(lambda: "r" in b.engine.requests)
        b.migrations.close(timeout=0.1)
        hears.set()
        moving.wait(20)
        assert moving.state == "there"
        check(reader, b.engine, "r", prompt)


@pytest.mark.parametrize(
    ("error", "seen"), [(KeyError("link"), kvpool.StateError), (kvpool.OutOfBlocks("batch"), kvpool.OutOfBlocks)]
)
def test_an_error_while_the_way_is_chosen_leaves_no_room_taken(make, reader, error, seen):
    class Costs:
        def choose(self, *_):
            raise error

    a, b = make({"costs": Costs(), "arrivals_max": 1})
    prompt = prompt_of(4)
    a.engine.begin("r", prompt, LENGTH)
    for _ in range(2):  # and the slot is free again
        with pytest.raises(seen, match=r"link|batch"):
            a.migrations.migrate("r", "b").wait(20)
    b.check_empty()
    a.migrations.migrate("r", "b", by="kv").wait(20)
    check(reader, b.engine, "r", prompt)


def test_whoever_waits_ends_though_the_last_word_cannot_be_said(make, reader, monkeypatch):
    a, b = make()
    a.engine.begin("r", prompt_of(4), LENGTH)
    finish = Failing(Dialogue.finish)
    monkeypatch.setattr(Dialogue, "finish", lambda self: finish(self))
    finish.left = 2  # of both
    a.migrations.migrate("r", "b").wait(20)
    assert a.migrations.under_way() == ()
    eventually(lambda: not b.migrations.arriving())
    check(reader, b.engine, "r", prompt_of(4))


def test_a_request_for_which_there_is_no_thread_stays_and_can_go_later(make, reader, monkeypatch):
    a, b = make()
    a.engine.begin("r", prompt_of(4), LENGTH)
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "kvpool-migration":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        a.migrations.migrate("r", "b")
    assert a.migrations.under_way() == ()
    assert not a.migrations._threads._running
    fail_at, started = iter([False, True]), fails

    def fails_there(thread):
        started(thread) if thread.name == "kvpool-migration" and next(fail_at) else start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_there)
    with pytest.raises(kvpool.StateError, match="new thread"):
        a.migrations.migrate("r", "b").wait(20)
    monkeypatch.setattr(threading.Thread, "start", start)
    a.migrations.migrate("r", "b").wait(20)
    check(reader, b.engine, "r", prompt_of(4))


def test_pools_of_one_process_that_lose_their_link_keep_their_requests(make, reader):
    a, b = make()
    prompt = prompt_of(5)
    a.engine.begin("r", prompt, LENGTH)
    reached, go = threading.Event(), threading.Event()
    b.engine.before["adopted"] = lambda _: (reached.set(), go.wait(20))
    moving = a.migrations.migrate("r", "b", timeout=20)
    assert reached.wait(20)
    a.pool.peers.disconnect("b")
    go.set()
    time.sleep(0.2)
    assert moving.state == "handed over"
    assert not a.engine.step("r")
    a.pool.peers.connect(b.address)
    moving.wait(20)
    check(reader, b.engine, "r", prompt)


def test_a_request_that_was_stopped_by_a_call_that_failed_goes_on(make, reader):
    a, _ = make()
    prompt = prompt_of(6)
    a.engine.begin("r", prompt, LENGTH)
    stop = a.engine.stop

    def fails(name):
        stop(name)
        raise RuntimeError("the GPU does not answer")

    a.engine.stop = fails
    with pytest.raises(RuntimeError, match="does not answer"):
        a.migrations.migrate("r", "b").wait(20)
    check(reader, a.engine, "r", prompt)


def test_blocks_that_stay_quarantined_are_freed_after_errors_and_a_close(make):
    _, b = make()
    own = b.pool.alloc(4)
    free, left = b.pool.free, [RuntimeError("a fault"), kvpool.StateError("quarantined"), RuntimeError("a fault")]

    def refuse(addrs):
        if left:
            raise left.pop()
        free(addrs)

    b.pool.free = refuse
    room = Room(b.pool, kvpool.HBM, b.pool.match(own[:0].astype("int32")), own)
    b.migrations.close()
    Chores(b.pool, 0.01).add(room.give_up)
    eventually(lambda: b.pool.stats().hbm.active == 0)
    del b.pool.free


def test_what_has_no_thread_now_is_done_with_the_next_that_is_left(make, monkeypatch):
    _, b = make()
    chores, done = Chores(b.pool, 0.01), []
    with monkeypatch.context() as patched:

        def no_thread(_):
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", no_thread)
        chores.add(lambda: done.append(1) is None)
    chores.add(lambda: done.append(2) is None)
    eventually(lambda: done == [1, 2])
