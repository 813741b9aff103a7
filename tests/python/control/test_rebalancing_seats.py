"""Two rebalancers of one member, of which the later one counts: the earlier one was replaced, closed late, or dropped.

Bugs these tests are there to find: an earlier one that takes back, or overwrites, what the later one says; a plan that
both carry out.
"""

from __future__ import annotations

import threading

import pytest
from control.migration_kit import eventually
from control.rebalancing_kit import Instance, World

import kvpool
from kvpool.control.rebalancing import Rebalancer
from kvpool.control.rebalancing.seat import Seat
from kvpool.policy.rebalancing import EpochPlan, PlannedMove, PlanNumber, plan_json


def rebalancer(one):
    return Rebalancer(one.migrations, one.engine, one.cluster, capacity=96, epoch_s=0.02)


def watch(one):
    """What it publishes from now on."""
    said, publish = [], one.cluster.publish
    one.cluster.publish = lambda *, rebalancing: (said.append(rebalancing), publish(rebalancing=rebalancing))
    return said


def test_one_that_is_closed_after_a_later_one_began_takes_nothing_back():
    world = World()
    (one,) = world.add_all({"a": 30})
    earlier = rebalancer(one)
    eventually(lambda: one.record.get("plan"))
    with rebalancer(one) as later:
        said = watch(one)
        eventually(lambda: later.plans)
        earlier.close()
        assert one.record["plan"]
        assert {} not in said
    assert one.record == {}


def test_an_earlier_one_ends_when_a_later_one_begins():
    world = World()
    (one,) = world.add_all({"a": 30})
    earlier = rebalancer(one)
    eventually(lambda: earlier.plans)
    with rebalancer(one):
        earlier._thread.join(20)
        assert not earlier._thread.is_alive()
        assert not earlier.plans
        assert earlier._epochs.left
    earlier.close()


def test_what_an_earlier_one_still_does_is_neither_published_nor_begun():
    """It is in the middle of a step, and its moves wait, when the later one comes."""
    world = World()
    one, _ = world.add_all(dict.fromkeys("abcd", 5), {})
    one.migrations.hold = True
    one.epochs.carrier.carry([PlannedMove(name, 1, 2, 5, "kv") for name in "abcd"], {2: "i2"}, 0)
    eventually(lambda: sorted(one.migrations.held) == ["a", "b"])
    running, said = one.engine.running, watch(one)

    def replaced():
        one.engine.running = running
        world.later = Seat(one.cluster)
        return running()

    one.engine.running = replaced
    one.epochs.step()
    assert said == []
    for name in "ab":
        one.migrations.finish(name)
    eventually(lambda: one.moves == {"ok": 2, "Fenced": 2})


def test_a_later_one_carries_out_no_plan_of_an_earlier_one_again():
    world = World("bf")
    _, two = world.add_all({}, {"a": 10, "b": 10})
    two.migrations.failure = kvpool.OutOfBlocks("full")
    world.round()
    plan = EpochPlan(PlanNumber(5, 7), 1, (PlannedMove("a", 2, 1, 10, "kv"),))
    world.instances[1].cluster.publish(rebalancing=world.records[1].rebalancing | {"plan": plan_json(plan)})
    two.step()
    assert two.migrations.asked == [("a", "i1", "kv")]
    later = Instance(world, 2, two.engine.requests)
    later.cluster = two.cluster
    later.epochs = type(later.epochs)(
        later.migrations, later.engine, two.cluster, capacity=96, growth=0, planner=world.planner,
        epoch_s=1.0, move_s=5.0, moves_at_once=2, clock=lambda: world.now,
    )  # fmt: skip
    world.now += 100
    later.step()
    assert later.migrations.asked == []
    assert two.record["state"]["n"] == [5, 7]


def test_a_later_one_whose_steps_fail_takes_back_what_an_earlier_one_has_said():
    world = World()
    (one,) = world.add_all({"a": 30})
    earlier = rebalancer(one)
    eventually(lambda: one.record)
    one.engine.running = lambda: 1 / 0
    with rebalancer(one):
        eventually(lambda: one.record == {})
    earlier.close()


def test_a_rebalancer_for_which_there_is_no_thread_says_and_watches_nothing(monkeypatch):
    world = World()
    (one,) = world.add_all({"a": 30})
    closed = []
    one.cluster.close = lambda: closed.append(1)
    start = threading.Thread.start

    def fails(thread):
        if thread.name == "kvpool-rebalancing":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            rebalancer(one)
    assert closed == [1]
    assert one.record == {}
    with rebalancer(one) as other:
        eventually(lambda: other.plans)


@pytest.mark.parametrize("name", ["kvpool-members", "kvpool-rebalancing"])
def test_an_earlier_one_goes_on_where_a_later_one_cannot_be_made(monkeypatch, name):
    world = World()
    (one,) = world.add_all({"a": 30})
    start = threading.Thread.start

    def fails(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def on_change(callback):
        threading.Thread(target=callback, args=(None,), name="kvpool-members").start()
        return one.cluster

    one.cluster.on_change = on_change
    with rebalancer(one) as earlier:
        eventually(lambda: earlier.plans)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError, match="new thread"):
                rebalancer(one)
        beat = one.record["beat"]
        eventually(lambda: one.record["beat"] > beat)
        assert earlier.plans
        assert not earlier._epochs.left


def test_an_earlier_one_asks_for_no_instances_once_it_was_replaced():
    """The later one comes while the earlier one accepts its own plan, which asks for an instance."""
    world = World()
    (one,) = world.add_all({"a": 30})
    one.engine.queue = {"b": 90}
    seat = one.epochs.seat
    accept, later = seat.accept, []

    def replaced(*arguments):
        later.append(Seat(one.cluster))
        return accept(*arguments)

    seat.accept = replaced
    world.rounds(4)
    assert later
    assert world.started == []
