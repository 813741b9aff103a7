"""A link that is cut between the two acknowledgements of a live migration, over TCP: nobody can tell who has died.

Bugs these tests are there to find: a source that goes on with a request because it did not hear that it decodes
elsewhere; a destination that drops one, or lets it migrate on, because it did not hear that it was let go.
"""

from __future__ import annotations

import pytest
from crew import near_nursery
from moving import Hold, Scene
from proxy import Proxy
from transfer.kit import SECRET
from victims import eventually

import kvpool

__all__ = ["near_nursery"]

OVER_TCP = {"routes": ("sock",), "prefer_unix_socket": False, "secret": SECRET}


@pytest.fixture
def apart(near_nursery):
    """A scene whose victim connects by a cable, what cuts it, and what was proved of the victim."""
    proxies, proofs = [], []

    def where(pool):
        proxies.append(Proxy(pool.peers.listen("tcp:127.0.0.1:0")))
        return proxies[0].address

    one = Scene(
        near_nursery, where=where, settings=OVER_TCP, step_s=0.05, gone=lambda name, incarnation: (proofs or [None])[0]
    )

    def cut():
        """Both have noticed when this returns."""
        proxies[0].reset()
        one.await_lost()
        eventually(lambda: one.ask("len(pool.peers.list())") == 0)

    one.ask("pool = place.pool\nNone")
    yield one, cut, proofs
    one.close()
    proxies[0].close()


def connect_again(scene):
    scene.ask(f"place.pool.peers.connect({scene.where!r})\nNone")


def move_until_adopted(scene, cut):
    """The victim decodes it, and this process cannot have heard that."""
    scene.ask("hold_at('adopted', 60)\nNone")
    scene.here.engine.begin("r", scene.prompt, len(scene.expected))
    moving = scene.here.migrations.migrate("r", "victim", by="kv", timeout=60)
    scene.await_phase()
    cut()
    tokens = scene.ask("go.set()\nlen(place.engine.requests['r'].tokens)")
    eventually(lambda: scene.ask("len(place.engine.requests['r'].tokens)") > tokens)
    assert moving.state == "handed over"
    assert not scene.here.engine.step("r")
    return moving


def test_a_request_whose_destination_could_not_say_that_it_decodes_stays_there(apart):
    scene, cut, _ = apart
    moving = move_until_adopted(scene, cut)
    connect_again(scene)
    moving.wait(60)
    assert moving.state == "there"
    scene.check_there()


@pytest.mark.parametrize("proof", ["ended", "fenced"])
def test_a_request_whose_destination_could_not_say_so_goes_on_at_its_source_when_that_is_proved_gone(apart, proof):
    scene, cut, proofs = apart
    moving = move_until_adopted(scene, cut)
    if proof == "ended":
        scene.victim.kill()
    proofs.append(proof)
    with pytest.raises(kvpool.PeerLost):
        moving.wait(60)
    assert moving.state == "here"
    assert scene.here.engine.requests["r"].term.number == 2
    assert scene.here.engine.step("r")
    if proof == "fenced":  # it wakes, and hears that its term is over
        connect_again(scene)
        eventually(lambda: scene.ask("len(place.engine.requests)") == 0)
        scene.ask("place.check_empty()\nNone")
    scene.check_here()


def test_a_destination_that_does_not_hear_that_a_request_was_let_go_keeps_it_and_asks_again(apart):
    scene, cut, _ = apart
    hold = Hold()
    scene.here.engine.before["release"] = hold
    scene.here.engine.begin("r", scene.prompt, len(scene.expected))
    moving = scene.here.migrations.migrate("r", "victim", by="kv", timeout=60)
    eventually(hold.reached.is_set)
    cut()
    hold.go()
    moving.wait(60)
    assert moving.state == "there"
    scene.here.check_empty()
    assert scene.ask("list(place.migrations.arriving())") == ["r"]
    with pytest.raises(kvpool.Busy):  # its source may ask for it
        scene.ask("place.migrations._incoming.check_may_leave('r')")
    connect_again(scene)
    eventually(lambda: scene.ask("list(place.migrations.arriving())") == [])
    scene.check_there()
