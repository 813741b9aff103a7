"""What an engine, a cluster or a machine raises at a bad moment of a live migration: the request stays in one place.

Bugs these tests are there to find: an error that ends the thread of a migration although the other side counts on it,
so that a request is decoded in two places or in none; room and slots that such an error leaves behind.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from control.migration_kit import Place, Reader, eventually, prompt_of, reference

import kvpool
from kvpool.control.migration import Timing
from kvpool.control.migration.background import Chores
from kvpool.control.migration.room import Room
from kvpool.control.migration.talking import Dialogue

LENGTH = 60


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


def check(reader, engine, name, prompt):
    expected = reference(prompt, LENGTH)
    assert engine.finish(name) == expected
    assert reader.tokens[name] == expected[len(prompt) :]


def make_deaf(place, phase):
    """The source does not hear this of its destination before the event is set."""
    hears, heard = threading.Event(), place.migrations._hear_destination
    place.migrations._hear_destination = lambda peer, said: (
        heard(peer, said) if hears.is_set() or said.phase != phase else None
    )
    return hears


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
