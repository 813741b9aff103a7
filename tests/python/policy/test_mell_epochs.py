"""Epochs: what instances report becomes one batch."""

from __future__ import annotations

import pytest

from kvpool import ArgumentError, ArgumentTypeError
from kvpool.policy import mell


def cluster():
    """A monitor over two GPUs: a and b on one, c on the other."""
    scheduler = mell.Mell(100)
    monitor = mell.ClusterMonitor(scheduler)
    for request, size in (("a", 60), ("b", 35), ("c", 70)):
        assert monitor.submit(request, size)
    monitor.plan()
    assert [scheduler.where(request) for request in "abc"] == [1, 1, 0]
    return scheduler, monitor


def test_requests_that_grew_ended_and_came_are_told_apart():
    scheduler, monitor = cluster()
    monitor.report(0, {"c": 75})
    monitor.report(1, {"a": 65})
    monitor.submit("d", 10)
    plan = monitor.plan()
    assert dict(scheduler.sizes) == {"a": 65, "c": 75, "d": 10}
    assert [place.request for place in plan.placed] == ["d"]
    assert monitor.waiting == {}


def test_a_silent_instance_keeps_its_requests():
    scheduler, monitor = cluster()
    monitor.report(1, {"a": 60})
    monitor.plan()
    assert dict(scheduler.sizes) == {"a": 60, "c": 70}


def test_a_request_under_way_is_reported_by_either_end():
    scheduler, monitor = cluster()
    source = scheduler.where("b")
    monitor.report(source, {"a": 60})
    monitor.report(1 - source, {"c": 70, "b": 36})
    monitor.plan()
    assert scheduler.sizes["b"] == 36


def test_a_request_longer_than_a_gpu_is_refused_and_counted():
    scheduler, monitor = cluster()
    assert not monitor.submit("huge", 101)
    monitor.report(0, {"c": 101})
    monitor.plan()
    assert "c" not in scheduler.sizes
    assert monitor.take_refused() == {"huge": 101, "c": 101}
    assert monitor.take_refused() == {}


def test_the_requests_of_a_lost_gpu_arrive_anew():
    scheduler, monitor = cluster()
    assert monitor.lost(0) == ["c"]
    assert monitor.lost(0) == []
    assert monitor.waiting == {"c": 70}
    plan = monitor.plan()
    assert [(place.request, place.tokens) for place in plan.placed] == [("c", 70)]
    assert (plan.moves, plan.activated, plan.terminated) == ([], (2,), (0,))
    assert scheduler.where("c") == 2


def moved():
    """Two GPUs; a grows on GPU 1, and b has to leave for GPU 0."""
    scheduler, monitor = cluster()
    monitor.report(0, {"c": 62})
    monitor.report(1, {"a": 60, "b": 35})
    monitor.plan()
    monitor.report(0, {})
    monitor.report(1, {"a": 70, "b": 35})
    plan = monitor.plan()
    assert [(move.requests, move.source) for move in plan.moves] == [(("b",), 1)]
    return scheduler, monitor, plan.moves[0].destination


def test_a_request_whose_move_waits_is_not_given_up_while_its_instance_is_silent():
    scheduler, monitor, destination = moved()
    monitor.report(destination, {})
    monitor.plan()
    assert scheduler.sizes["b"] == 35
    monitor.report(1, {"a": 70, "b": 36})
    monitor.report(destination, {})
    monitor.plan()
    assert scheduler.sizes["b"] == 36
    monitor.report(1, {"a": 70})
    monitor.report(destination, {})
    monitor.plan()
    assert "b" not in scheduler.sizes


def test_a_request_whose_move_waits_is_lost_with_either_gpu():
    for at in (0, 1):
        scheduler, monitor, destination = moved()
        lost = monitor.lost((1, destination)[at])
        assert "b" in lost
        assert monitor.waiting["b"] == 35
        plan = monitor.plan()
        assert "b" in {place.request for place in plan.placed}
        assert scheduler.sizes["b"] == 35


def test_a_request_is_submitted_once():
    _, monitor = cluster()
    for request, size in (("a", 1), ("new", 0)):
        with pytest.raises(ArgumentError):
            monitor.submit(request, size)
    monitor.submit("new", 1)
    with pytest.raises(ArgumentError):
        monitor.submit("new", 1)


@pytest.mark.parametrize("size", [3.5, float("nan"), "3", None, True])
def test_a_size_that_is_no_int_is_refused_and_the_next_epoch_is_planned(size):
    scheduler, monitor = cluster()
    with pytest.raises(ArgumentTypeError, match="'x'"):
        monitor.submit("x", size)
    monitor.report(1, {"a": 61, "b": 35})
    with pytest.raises(ArgumentTypeError, match="'b'"):
        monitor.report(1, {"a": 60, "b": size})
    assert monitor.waiting == {}
    monitor.plan()
    assert dict(scheduler.sizes) == {"a": 61, "b": 35, "c": 70}  # the report before is the last one


def test_a_gpu_is_a_number():
    _, monitor = cluster()
    for call in (monitor.lost, lambda gpu: monitor.report(gpu, {})):
        with pytest.raises(ArgumentTypeError, match="GPU"):
            call("0")
