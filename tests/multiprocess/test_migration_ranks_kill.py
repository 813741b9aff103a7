"""SIGKILL of one rank of an instance of two, at every phase of a live migration to it or from it.

With a rank a part of every block of its instance is gone, and the instance with it; its scheduler lives on, and proves
nothing by that.

Bugs these tests are there to find: a request that is decoded in two places; one that ended with its instance and of
which nobody is told; blocks at the other side that stay taken; a handle that waits for a deadline although its own
instance has no memory any more.
"""

from __future__ import annotations

import pytest
from rank_moving import Scene
from victims import Nursery, eventually

import kvpool


@pytest.fixture(scope="module")
def nursery():
    one = Nursery(modules="rank_moving")
    yield one
    one.close()


@pytest.fixture
def scene(nursery, tmp_path):
    one = Scene(nursery, str(tmp_path / "notes"))
    yield one
    one.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("phase", "by"), [("admit", "kv"), ("alloc", "kv"), ("background", "kv"), ("prefill", "tokens")]
)
def test_a_request_stays_when_a_rank_of_its_destination_is_killed_before_the_hand_over(scene, phase, by, rank):
    scene.begin_here()
    scene.hold("victim", phase)
    moving = scene.here.migrations.migrate("r", "victim", by=by, timeout=4)
    scene.lose(rank, "victim", phase)
    with pytest.raises(kvpool.DeadlineExceeded):
        moving.wait(30)
    assert moving.state == "here"
    scene.check_here()
    scene.check_nothing_here()
    eventually(lambda: scene.scheduler("list(place.migrations.arriving())") == [])
    assert scene.scheduler("list(place.engine.requests)") == []


@pytest.mark.parametrize("phase", ["decode", "adopt", "adopted"])
def test_a_request_is_in_doubt_when_a_rank_of_its_destination_is_killed_until_the_scheduler_ends(scene, phase):
    scene.begin_here()
    scene.hold("victim", phase)
    moving = scene.here.migrations.migrate("r", "victim", by="kv", timeout=4)
    scene.lose(1, "victim", phase)
    with pytest.raises(kvpool.DeadlineExceeded):
        moving.wait(30)
    assert moving.state == "handed over"
    assert not scene.here.engine.step("r")
    scene.scheduler.kill()
    eventually(lambda: moving.state == "here")
    eventually(lambda: scene.here.migrations.under_way() == ())
    scene.check_here()
    scene.check_nothing_here()


BEFORE = [("survivor", "admit"), ("survivor", "background"), ("victim", "between rounds"), ("victim", "stop")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("holder", "phase"), BEFORE)
def test_a_request_ends_with_a_rank_of_its_source_before_the_hand_over_and_is_reported(scene, holder, phase, rank):
    scene.hold(holder, phase)
    scene.scheduler("place.go_there(60)\nNone")
    scene.lose(rank, holder, phase)
    assert scene.scheduler("place.outcome()") == ("PeerLost", "here")
    scene.check_nothing_here()


@pytest.mark.parametrize(
    ("holder", "phase"), [("survivor", "decode"), ("survivor", "adopt"), ("survivor", "adopted"), ("victim", "release")]
)
def test_a_request_arrives_though_a_rank_of_its_source_is_killed_after_the_hand_over(scene, holder, phase):
    scene.hold(holder, phase)
    scene.scheduler("place.go_there(60)\nNone")
    scene.lose(0, holder, phase)
    heard = ("NoneType", "there") if phase == "release" else ("PeerLost", "handed over")
    assert scene.scheduler("place.outcome()") == heard
    eventually(lambda: "r" in scene.here.engine.requests)
    assert scene.scheduler("[one.stopped for one in place.engine.requests.values()]") in ([True], [])
    scene.check_here()
    assert scene.here.migrations.arriving() in (("r",), ())  # its scheduler lives, and may ask
    scene.scheduler.kill()
    scene.check_nothing_here()
