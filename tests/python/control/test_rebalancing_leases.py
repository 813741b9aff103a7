"""Epochs of instances that are made up: planners and others that were stopped or cut off for longer than their lease.

Bugs these tests are there to find: a plan that is carried out after another planner's newer one, by its maker or by
others; and what nobody does, because the planner that is back has asked for it before.
"""

from __future__ import annotations

import gc
import random
import threading

import pytest
from control.migration_kit import eventually
from control.rebalancing_kit import World

import kvpool
from kvpool.control.rebalancing import Rebalancer
from kvpool.policy.rebalancing import SCHEDULERS, EpochPlan, PlannedMove, Planner, PlanNumber, plan_json


def test_a_planner_that_was_only_slow_is_believed_again_in_a_new_term():
    world = World()
    one, two, three = world.add_all({"a": 40}, {"b": 40}, {"c": 70})
    world.rounds(2)
    record = world.records.pop(1)  # it is lost to the others, and goes on
    world.rounds(4, but=(1,))
    assert two.epochs.plans
    term = three.record["state"]["n"][0]
    stale = record.rebalancing["plan"]
    world.records[1] = record  # it is back, with the plan of its old term
    accepted = three.epochs.tally.totals().plans_accepted
    three.step()
    assert three.epochs.tally.totals().plans_accepted == accepted
    assert stale["n"][0] < term
    world.instances[3].engine.requests["d"] = 5
    world.rounds(4)
    assert one.epochs.plans
    assert not two.epochs.plans
    assert three.record["state"]["n"][0] > term


def test_one_that_never_heard_the_new_plan_refuses_the_old_one_of_a_planner_that_is_back():
    """And what the old one asked for is asked for again, though the planner wants nothing else."""
    world = World()
    _, two, three = world.add_all({"a": 90}, {"b": 90}, {})
    world.rounds(2)
    three.epochs.drain()
    three.step()
    accepted = three.epochs.tally.totals().plans_accepted
    world.rounds(3, but=(3,))  # it is stopped
    record = world.records.pop(1)  # and 1 is lost to the others
    assert record.rebalancing["plan"]["e"] == [3]
    world.rounds(3, but=(1, 3))
    assert two.record["state"]["n"] > record.rebalancing["plan"]["n"]
    world.records[1] = record
    three.step()
    assert three.epochs.tally.totals().plans_accepted == accepted
    assert three.terminated == 0
    world.rounds(4)
    assert three.terminated == 1


def test_an_instance_without_a_lease_neither_plans_nor_carries_out():
    world = World()
    one, two = world.add_all({"a": 10}, {"b": 10})
    one.cluster.valid = two.cluster.valid = False
    world.rounds(6)
    assert one.epochs.tally.totals().plans_made == 0
    assert two.migrations.asked == []
    one.cluster.valid = two.cluster.valid = True
    world.rounds(4)
    assert len(set(world.where().values())) == 1


@pytest.mark.parametrize("regained", [False, True])
def test_a_planner_that_was_stopped_for_too_long_while_it_planned_drops_its_plan(regained):
    class Slow(Planner):
        def plan(self, states, number, planner):
            made = super().plan(states, number, planner)
            one.cluster.valid, one.cluster.lost = regained, one.cluster.lost + 1  # another one may have planned by now
            return made

    world = World()
    world.planner = Slow(SCHEDULERS["mell"])
    one, two = world.add_all({"a": 10}, {"b": 60})
    world.rounds(6)
    assert one.epochs.tally.totals().plans_made == 0
    assert "plan" not in one.record
    assert one.migrations.asked == two.migrations.asked == []


@pytest.mark.parametrize("regained", [False, True])
def test_an_instance_that_was_stopped_for_too_long_while_it_read_does_nothing_of_it(regained):
    world = World()
    one, two = world.add_all({"a": 10}, {"b": 60})
    world.rounds(1)
    for each in (one, two):
        members = each.cluster.members

        def slowly(each=each, members=members):
            found = members()
            each.cluster.valid, each.cluster.lost = regained, each.cluster.lost + 1
            return found

        each.cluster.members = slowly
    plan = EpochPlan(PlanNumber(5, 7), 1, (PlannedMove("b", 2, 1, 60, "kv"),))
    one.cluster.publish(rebalancing=one.record | {"plan": plan_json(plan)})
    two.step()
    world.rounds(6)
    assert one.epochs.tally.totals().plans_made == 0
    assert one.migrations.asked == two.migrations.asked == []
    assert two.epochs.tally.totals().plans_accepted == 0


@pytest.mark.parametrize("regained", [False, True])
def test_moves_that_have_not_begun_when_the_lease_is_lost_never_begin(regained):
    world = World()
    one, _ = world.add_all(dict.fromkeys("abcd", 5), {})
    one.migrations.hold = True
    one.epochs.carrier.carry([PlannedMove(name, 1, 2, 5, "kv") for name in "abcd"], {2: "i2"}, 0)
    eventually(lambda: sorted(one.migrations.held) == ["a", "b"])
    one.cluster.valid, one.cluster.lost = regained, 1
    for name in "ab":
        one.migrations.finish(name)
    eventually(lambda: one.moves == {"ok": 2, "Fenced": 2})
    assert len(one.migrations.asked) == 2


def test_another_instance_plans_when_the_planner_steps_no_more_and_stays_a_member():
    """It comes back with the plan that it had made, and plans in a new term."""
    world = World()
    one, two, three = world.add_all({"a": 90}, {"b": 90}, {"c": 80})
    world.rounds(4)
    assert one.epochs.plans
    term = three.record["state"]["n"][0]
    world.rounds(8, but=(1,))
    assert not two.epochs.plans  # it may be slow
    world.rounds(12, but=(1,))
    assert two.epochs.plans
    three.epochs.drain()
    world.instances[2].engine.requests.clear()
    world.rounds(8, but=(1,))
    assert three.record["state"]["n"][0] > term
    assert three.terminated == 1
    newer = three.record["state"]["n"]
    assert one.record["plan"]["n"] < newer
    world.rounds(8)
    assert one.epochs.plans
    assert not two.epochs.plans
    assert one.record["plan"]["n"] > newer
    assert one.record["plan"]["n"][0] > newer[0]


def test_a_planner_that_fails_in_every_step_takes_no_part_until_it_does_not():
    world = World()
    one, two, _ = world.add_all({"a": 90}, {"b": 90}, {"c": 80})
    world.rounds(2)
    running = one.engine.running

    def fails():
        raise kvpool.ClosedError("the engine's")

    one.engine.running = fails
    one.step = lambda: step_of(one)
    world.rounds(8)
    assert one.record
    world.rounds(2)
    assert one.record == {}
    world.rounds(3)
    assert two.epochs.plans
    one.engine.running = running
    world.rounds(4)
    assert one.record
    assert one.epochs.plans
    assert not two.epochs.plans
    assert one.record["plan"]["n"][0] > 2


def test_another_instance_plans_when_no_plan_of_the_planner_can_be_made():
    """Its other steps go on, and it is a member."""
    world = World()
    one, two, _ = world.add_all({"a": 90}, {"b": 90}, {"c": 80})
    world.rounds(2)

    class Failing(Planner):
        def plan(self, states, number, here):
            raise kvpool.ArgumentError("a fault of a scheduler")

    planner = one.epochs._planner
    one.epochs._planner = Failing(**vars(planner))
    one.step = lambda: step_of(one)
    world.rounds(24)
    assert two.epochs.plans
    assert one.record
    one.epochs._planner = planner
    world.rounds(8)
    assert one.epochs.plans
    assert not two.epochs.plans


def step_of(instance):
    """As the thread of `Rebalancer` does it."""
    try:
        instance.epochs.step()
    except kvpool.Error:
        instance.epochs.failed()


def test_a_step_that_took_too_long_makes_no_plan_and_accepts_none(caplog):
    """Its lease goes on; the others may have given it up all the same."""

    class Slow(Planner):
        def plan(self, states, number, planner):
            world.now += 2.5
            return super().plan(states, number, planner)

    world = World()
    world.planner = Slow(SCHEDULERS["mell"])
    one, two = world.add_all({"a": 10}, {"b": 60})
    world.rounds(6)
    assert one.epochs.tally.totals().plans_made == 0
    assert "was dropped" in caplog.text
    assert one.record["beat"] == 1  # the next one may be quicker
    assert one.migrations.asked == two.migrations.asked == []


def test_a_step_that_outlives_the_end_says_and_does_nothing_more():
    world = World()
    one, two = world.add_all({"a": 30}, {"b": 30})
    running = one.engine.running

    def slowly():
        one.engine.running = running
        one.epochs.leave()  # `close` has waited for long enough
        return running()

    one.engine.running = slowly
    world.rounds(1)
    assert one.record == {}
    world.rounds(1, but=(1,))
    assert one.record == {}
    world.rounds(4, but=(1,))
    assert two.epochs.plans


def test_a_rebalancer_is_closed_by_the_engine_that_it_calls():
    """`terminate` may do so: then the thread that steps cannot wait for itself."""
    world = World()
    (one,) = world.add_all({"a": 30})
    made, closed, running = threading.Event(), threading.Event(), one.engine.running

    def ends():
        assert made.wait(20)
        rebalancer.close()
        closed.set()
        return running()

    one.engine.running = ends
    rebalancer = Rebalancer(one.migrations, one.engine, one.cluster, capacity=96, epoch_s=0.02)
    made.set()
    assert closed.wait(20)
    rebalancer._thread.join(20)
    assert not rebalancer._thread.is_alive()
    assert one.record == {}


@pytest.fixture
def no_search_for_cycles():
    gc.disable()
    yield
    gc.enable()


def test_an_instance_whose_rebalancer_is_dropped_or_fails_takes_no_part(no_search_for_cycles):
    world = World()
    one, two = world.add_all({"a": 30}, {"b": 30})

    def rebalancer(each):
        return Rebalancer(each.migrations, each.engine, each.cluster, capacity=96, epoch_s=0.02)

    dropped, kept = rebalancer(one), rebalancer(two)
    with kept:
        eventually(lambda: one.record.get("plan"))
        del dropped
        eventually(lambda: one.record == {})
        eventually(lambda: kept.plans)
        running = two.engine.running
        two.engine.running = lambda: two.cluster.publish(no=1)  # a TypeError
        eventually(lambda: two.record == {})
        two.engine.running = running
        eventually(lambda: kept.plans and two.record.get("plan"))
    assert two.record == {}


def test_a_rebalancer_that_is_dropped_takes_nothing_back_for_the_one_that_has_followed(no_search_for_cycles):
    world = World()
    one, _ = world.add_all({"a": 30}, {})
    said = []
    publish = one.cluster.publish
    one.cluster.publish = lambda *, rebalancing: (said.append(rebalancing), publish(rebalancing=rebalancing))

    def rebalancer():
        return Rebalancer(one.migrations, one.engine, one.cluster, capacity=96, epoch_s=0.02)

    dropped = rebalancer()
    thread = dropped._thread
    with rebalancer():
        eventually(lambda: one.record)
        del dropped
        thread.join(20)
        assert not thread.is_alive()
        assert {} not in said


class Drowsy(Planner):
    """Its world decides whether it falls asleep before it plans, or when it has."""

    world = None

    def plan(self, states, number, planner):
        Drowsy.world.nap(planner, "collected")
        made = super().plan(states, number, planner)
        Drowsy.world.nap(planner, "made")
        return made


class DrowsyWorld(World):
    """Instances stop in the middle of a step, are lost to the others, and wake with what they had published."""

    def __init__(self, rng, policy):
        super().__init__(policy, growth=1, behind_max=3)
        self.rng, self.naps, self.asleep = rng, 0, set()
        self.planner = Drowsy(SCHEDULERS[policy], instances_min=4, behind_max=3)
        Drowsy.world = self
        self.made = {}

    def add(self, number, **running):
        one = super().add(number, **running)
        book, members, publish = one.epochs.seat.book, one.cluster.members, one.cluster.publish
        accept, made = book.accept, book.made

        def watched(plan, planner, others=()):
            found = accept(plan, planner, others)
            if found:
                said = [each.rebalancing for each in self.records.values() if each.rebalancing]
                newest = max((tuple(each["state"]["n"]) for each in said), default=(0, 0))
                assert plan.number >= newest, f"{number} carries out {plan.number} after {newest}"
            return found

        def noted(plan_number):
            assert self.made.setdefault(plan_number, number) == number, f"two plans have the number {plan_number}"
            made(plan_number)

        def read():
            self.nap(number, "looks")
            found = members()
            self.nap(number, "has looked")
            return found

        def say(**fields):
            self.nap(number, "speaks")
            publish(**fields)

        book.accept, book.made, one.cluster.members, one.cluster.publish = watched, noted, read, say
        return one

    def nap(self, number, phase):
        """Now and then; the others go on meanwhile."""
        if len(self.asleep) > 1 or self.rng.random() > (0.04 if number > 2 else 0.12):
            return
        self.naps += 1
        self.asleep.add(number)
        record = self.records.pop(number)
        for _ in range(self.rng.randrange(1, 6)):
            self.round(but=self.asleep)
        self.records[number] = record
        self.asleep.discard(number)
        self.instances[number].cluster.lost += 1


@pytest.mark.parametrize("policy", ["mell", "lb"])
@pytest.mark.parametrize("seed", range(4))
def test_instances_that_stop_at_any_moment_and_wake_carry_out_nothing_old(policy, seed):
    world = DrowsyWorld(random.Random(seed), policy)
    world.add_all({"a": 40}, {"b": 10, "e": 10}, {"c": 20}, {"d": 15})
    for tick in range(60):
        engine = world.instances[1 + tick % 4].engine
        engine.requests = {name: size + (tick % 7 == 0) for name, size in engine.requests.items()}
        world.round()
        world.where()
    assert world.naps > 20
    world.nap = lambda number, phase: None
    world.rounds(12)
    assert sorted(world.where()) == list("abcde")
    assert [one.number for one in world.instances.values() if one.epochs.plans] == [1]
    assert len({tuple(one.record["state"]["n"]) for one in world.instances.values()}) == 1
