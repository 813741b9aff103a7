"""SIGKILL and SIGSTOP of the source or the destination of a live migration, at every phase.

Each with a destination that has free blocks, and with one that evicts a cached prompt for every block. Where the phases
end in bytes and messages is left to policy/test_migration_moments.py, which goes through all moments of the protocol.

Bugs these tests are there to find: a request that decodes in two places, or in none; other tokens than without
migration; blocks of a request that has gone, or never came, that nobody frees; a destination that is taken for dead
because it is silent.
"""

from __future__ import annotations

import time

import pytest
from crew import near_nursery
from moving import LENGTH, SLOW, Scene, come_here, send_there
from victims import eventually

import kvpool
from kvpool.policy.migration import Term

__all__ = ["near_nursery"]

SHORT_LEASE = 2.0


@pytest.fixture
def scene(near_nursery):
    one = Scene(near_nursery, bytes_per_s=SLOW)
    yield one
    one.close()


@pytest.fixture(params=[False, True], ids=["roomy", "evicting"])
def evicting(request):
    """Whether the destination evicts all along."""
    return request.param


HANDED_OVER = ("last blocks", "handed", "adopt", "adopted", "release", "released")
TO_VICTIM = [
    ("before the offer", "kv"),
    ("admit", "tokens"),
    ("alloc", "kv"),
    ("prefill", "tokens"),
    ("fetching", "kv"),
    ("between rounds", "kv"),
    ("stop", "kv"),
    ("last blocks", "kv"),
    ("adopt", "kv"),
    ("adopted", "kv"),
]
LET_GO = [("release", "kv"), ("released", "kv")]


@pytest.mark.parametrize(("phase", "by"), TO_VICTIM)
def test_a_request_goes_on_at_its_source_when_its_destination_is_killed(scene, phase, by, evicting):
    moving, go = send_there(scene, phase, by, evicting=evicting)
    scene.victim.kill()
    go()
    with pytest.raises(kvpool.PeerLost):
        moving.wait(30)
    assert moving.state == "here"
    term = scene.here.engine.requests["r"].term.number
    if phase != "between rounds":  # whether it was handed over by then, nobody knows
        assert term == (2 if phase in ("stop", *HANDED_OVER) else 0)  # what has stopped is handed over
    scene.victim = scene.begin()  # of the same name: another incarnation, to which nothing was sent
    assert scene.ask("len(place.engine.requests)") == 0
    scene.check_here()


@pytest.mark.parametrize(("phase", "by"), LET_GO)
def test_a_request_that_its_source_has_let_go_ends_with_its_destination(scene, phase, by, evicting):
    """As it would without migration. The source has heard that it decodes there, and never goes on with it."""
    moving, go = send_there(scene, phase, by, evicting=evicting)
    scene.victim.kill()
    go()
    moving.wait(30)
    assert moving.state == "there"
    eventually(lambda: scene.here.migrations.under_way() == ())
    assert not scene.here.engine.requests
    scene.here.check_empty()
    scene.victim = scene.begin()
    assert scene.ask("len(place.engine.requests)") == 0
    assert not scene.here.engine.requests


@pytest.mark.parametrize(("phase", "by"), TO_VICTIM + LET_GO)
def test_a_request_arrives_when_its_destination_was_stopped_for_a_while(scene, phase, by, evicting):
    moving, go = send_there(scene, phase, by, 0.1, evicting)
    scene.victim.stop()
    go()
    time.sleep(0.3)
    assert not moving.done() or phase in ("adopted", "release", "released")
    scene.victim.wake()
    moving.wait(30)
    assert moving.state == "there"
    scene.check_there()


FROM_VICTIM = [
    "before the offer",
    "admit",
    "alloc",
    "prefill",
    "fetching",
    "between rounds",
    "stop",
    "last blocks",
    "handed",
    "adopted",
    "release",
    "released",
]


@pytest.mark.parametrize("phase", FROM_VICTIM)
def test_a_source_that_is_killed_leaves_its_request_where_it_was_handed_over_to(scene, phase, evicting):
    go = come_here(scene, phase, evicting=evicting)
    scene.victim.kill()
    go()
    if phase in HANDED_OVER:
        eventually(lambda: "r" in scene.here.engine.requests)
        assert scene.here.engine.requests["r"].term.number == 1
        scene.check_here()
        assert not scene.here.migrations._incoming._arrivals.holds_back("r")
    else:
        scene.evicting.end()
        eventually(lambda: scene.here.migrations.arriving() == ())
        assert not scene.here.engine.requests
        eventually(lambda: scene.here.pool.audit().hbm.active == 0)
        eventually(lambda: scene.here.pool.audit().hbm.quarantined == 0)
        scene.here.check_empty()


@pytest.mark.parametrize("phase", FROM_VICTIM)
def test_a_request_arrives_when_its_source_was_stopped_for_a_while(scene, phase, evicting):
    go = come_here(scene, phase, 0.1, evicting)
    scene.victim.stop()
    go()
    time.sleep(0.3)
    scene.victim.wake()
    eventually(lambda: "r" in scene.here.engine.requests)
    assert len(scene.here.engine.requests["r"].tokens) < LENGTH
    scene.check_here()
    assert scene.ask("moving.wait(30)\nmoving.state") == "there"
    eventually(lambda: scene.ask("len(place.engine.requests)") == 0)
    scene.ask("place.check_empty()\nNone")


def test_a_silent_destination_may_have_the_request_until_it_is_heard_again(near_nursery):
    """Its link is lost, and nothing proves that it has ended: the source keeps the blocks and does not decode."""
    scene = Scene(near_nursery, SHORT_LEASE)
    try:
        scene.ask("hold_at('adopted', 0.1)\nNone")
        scene.here.engine.begin("r", scene.prompt, LENGTH)
        moving = scene.here.migrations.migrate("r", "victim", timeout=4)
        scene.await_phase()
        scene.victim.stop()
        scene.await_lost()
        with pytest.raises(kvpool.DeadlineExceeded):
            moving.wait(30)
        assert moving.state == "handed over"
        assert not scene.here.engine.step("r")
        scene.victim.wake()
        scene.ask(f"place.pool.peers.connect({scene.here.address!r})\nNone")
        eventually(lambda: moving.state == "there")
        eventually(lambda: "r" not in scene.here.engine.requests)
        scene.check_there()
    finally:
        scene.close()


def test_a_destination_that_was_fenced_drops_the_request_when_it_wakes(near_nursery):
    """The source has taken it back, in a higher term; the reader hears no more of the old one."""
    fenced = []
    scene = Scene(near_nursery, SHORT_LEASE, gone=lambda name, incarnation: "fenced" if fenced else None)
    try:
        scene.ask("hold_at('adopted', 0.1)\nNone")
        scene.here.engine.begin("r", scene.prompt, LENGTH)
        moving = scene.here.migrations.migrate("r", "victim")
        scene.await_phase()
        scene.victim.stop()
        scene.await_lost()
        fenced.append(True)
        with pytest.raises(kvpool.PeerLost):
            moving.wait(30)
        assert moving.state == "here"
        assert scene.here.engine.requests["r"].term == Term(2, scene.here.pool._incarnation())
        assert scene.here.engine.step("r")
        scene.victim.wake()
        scene.ask(f"place.pool.peers.connect({scene.here.address!r})\nNone")
        eventually(lambda: scene.ask("len(place.engine.requests)") == 0)
        scene.ask("place.check_empty()\nNone")
        eventually(lambda: not len(scene.here.migrations._departures._taken_back))  # it has said so
        scene.check_here()
    finally:
        scene.close()
