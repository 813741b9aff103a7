"""How migrations end when they are cancelled, refused, or one side has gone."""

from __future__ import annotations

import threading

import pytest
from control.migration_kit import LENGTH, check, eventually, prompt_of

import kvpool
from kvpool.control import migration
from kvpool.policy import migration as policy


@pytest.mark.parametrize("phase", ["admit", "prefill", "progress", "stop"])
def test_a_cancelled_request_stays_where_it_is(places, reader, phase):
    a, b = places
    prompt = prompt_of(10)
    a.engine.begin("r", prompt, LENGTH)
    calls, reached, go = [], threading.Event(), threading.Event()

    def hook(*_):
        calls.append(phase)
        if len(calls) > (phase == "progress"):  # `migrate` asks first
            reached.set()
            go.wait(20)

    (a if phase in ("progress", "stop") else b).engine.before[phase] = hook
    moving = a.migrations.migrate("r", "b", by="tokens")
    assert reached.wait(20)
    assert moving.cancel()
    go.set()
    with pytest.raises(kvpool.Cancelled):
        moving.wait()
    assert moving.state == "here"
    assert not moving.cancel()
    check(reader, a.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in places:
        each.check_empty()


def test_a_request_that_was_handed_over_comes_back_if_it_is_not_decoded_there(places, reader):
    a, b = places
    prompt = prompt_of(11)
    a.engine.begin("r", prompt, LENGTH)
    reached, go = threading.Event(), threading.Event()

    def fetched_slowly(*_):
        reached.set()
        go.wait(20)
        raise RuntimeError("no room in the batch")

    b.engine.before["adopt"] = fetched_slowly
    moving = a.migrations.migrate("r", "b")
    assert reached.wait(20)
    eventually(lambda: moving.state == "handed over")
    moving.cancel()
    assert not moving.done()
    assert "r" in a.engine.requests
    assert not a.engine.step("r")
    go.set()
    with pytest.raises(kvpool.Cancelled):
        moving.wait()
    assert moving.state == "here"
    assert a.engine.requests["r"].term.number == 2
    check(reader, a.engine, "r", prompt)
    eventually(lambda: not b.migrations.arriving())
    for each in places:
        each.check_empty()


def test_a_cancel_that_is_too_late_says_who_has_the_request(places, reader):
    a, b = places
    prompt = prompt_of(12)
    a.engine.begin("r", prompt, LENGTH)
    moving = None
    b.engine.before["adopted"] = lambda _: moving.cancel()
    go = threading.Event()
    b.engine.before["admit"] = lambda _: go.wait(20)
    moving = a.migrations.migrate("r", "b")
    go.set()
    assert moving.wait().tokens == len(prompt)
    assert moving.state == "there"
    check(reader, b.engine, "r", prompt)


def test_a_request_that_ends_meanwhile_ends_its_migration(places):
    a, b = places
    prompt = prompt_of(13)
    a.engine.begin("r", prompt, len(prompt))
    b.engine.before["admit"] = lambda _: a.engine.finish("r")
    with pytest.raises(kvpool.StateError, match="has ended here"):
        a.migrations.migrate("r", "b").wait()
    eventually(lambda: not b.migrations.arriving())
    for each in places:
        each.check_empty()


def test_a_destination_whose_pool_is_closed_leaves_the_request_at_its_source(places, reader):
    a, b = places
    prompt = prompt_of(14)
    a.engine.begin("r", prompt, LENGTH)
    b.engine.before["adopt"] = lambda _: b.pool.close()
    moving = a.migrations.migrate("r", "b")
    with pytest.raises(kvpool.PeerLost):
        moving.wait()
    assert moving.state == "here"
    eventually(lambda: b.engine.requests.pop("r", None))  # its engine adopts what arrived when its pool is closed
    check(reader, a.engine, "r", prompt)
    a.check_empty()


def test_messages_of_another_incarnation_are_not_heard(places):
    a, b = places
    says = policy.SourceSays((a.pool._incarnation() ^ 1, b.pool._incarnation(), 1), 1, "offered", "r")
    admitted = []
    b.engine.before["admit"] = admitted.append
    a.migrations._mailbox.begin("b", policy.encode(says), 5).wait()
    a.engine.begin("s", prompt_of(20), LENGTH)
    a.migrations.migrate("s", "b").wait()
    assert admitted == ["s"]
    b.engine.finish("s")


def test_a_pool_without_peers_migrates_nothing():
    with kvpool.Pool(kvpool.RawLayout(64, 4), hbm_blocks=2) as pool, pytest.raises(kvpool.StateError, match="no peers"):
        migration.Migrations(pool, None)


def test_a_pool_has_one_in_its_life(places):
    a, _ = places
    for _ in range(2):
        with pytest.raises(kvpool.StateError, match="one in its life"):
            migration.Migrations(a.pool, a.engine)
        a.migrations.close()


def test_a_cancelled_hand_over_to_a_destination_that_stays_silent_ends_in_time(places, reader):
    """And the request in doubt: neither decoded nor freed here, and the handle says so."""
    a, b = places
    prompt = prompt_of(24)
    a.engine.begin("r", prompt, LENGTH)
    reached, go = threading.Event(), threading.Event()
    b.engine.before["adopt"] = lambda _: (reached.set(), go.wait(20))
    moving = a.migrations.migrate("r", "b", timeout=5)
    assert reached.wait(20)
    moving.cancel()
    with pytest.raises(kvpool.DeadlineExceeded):
        moving.wait(60)
    assert moving.state == "handed over"
    assert not a.engine.step("r")
    go.set()
    eventually(lambda: moving.state == "there")
    check(reader, b.engine, "r", prompt)
