"""Instances that are drained, emptied and asked to end."""

from __future__ import annotations

import pytest
from control.rebalancing_kit import World


def test_an_instance_that_drains_is_emptied_and_ends_once():
    world = World("wf", instances_min=1)
    one, two = world.add_all({"a": 10}, {"b": 10, "c": 20})
    two.epochs.drain()
    two.engine.queue["w"] = 5
    world.rounds(12)
    assert set(world.where().values()) == {1}
    assert sorted(world.where()) == ["a", "b", "c", "w"]
    assert (one.terminated, two.terminated) == (0, 1)


def test_an_instance_that_something_is_on_its_way_to_is_asked_to_end_when_that_has_failed():
    world = World()
    one, two, _ = world.add_all({"a": 90}, {}, {"c": 5})
    two.migrations.arriving = lambda: ("r",)  # its source has not published yet that it leaves
    two.epochs.drain()
    world.rounds(8)
    assert 2 not in one.record["plan"]["e"]
    two.migrations.arriving = lambda: ()
    world.rounds(8)
    assert two.terminated == 1


def test_an_application_that_failed_to_end_is_asked_again():
    world = World()
    _, two = world.add_all({"a": 90}, {})
    failures, end = [1, 1], two.epochs._terminate

    def fails():
        if failures:
            raise OSError(failures.pop())
        end()

    two.epochs._terminate = fails
    world.rounds(30)
    assert (failures, two.terminated) == ([], 1)


def test_an_end_that_was_accepted_and_not_carried_out_is_asked_for_again():
    world = World()
    one, two = world.add_all({"a": 90}, {})
    accept = two.epochs.seat.book.accept

    def once(plan, *more):
        found = accept(plan, *more)
        if found and plan.ends:
            two.epochs.seat.book.accept = accept
            raise OSError("in the middle of a step")
        return found

    two.epochs.seat.book.accept = once
    world.rounds(1)
    with pytest.raises(OSError, match="middle"):
        world.rounds(20)
    assert two.terminated == 0
    world.rounds(8)
    assert two.terminated == 1
    assert one.terminated == 0
