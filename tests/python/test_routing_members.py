"""kvpool.control.routing_members: a scheduler that is in step with a cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest
from kit import prompt
from policy.fleet import UnitModel
from transfer.kit import eventually

import kvpool
from kvpool.control.routing_members import RoutingMembers
from kvpool.policy.routing import Balance, GlobalScheduler, Kind, LeastLoad, Request

_numbers = itertools.count(1)


class World:
    """A cluster whose members are registrations without pools, and a scheduler with a separate clock."""

    def __init__(self) -> None:
        self.url = f"local://routing-{os.getpid()}-{next(_numbers)}"
        self.now = 0.0
        self.watching = kvpool.Cluster.join(self.url)
        balance = Balance(warmup_s=100.0, cap=1.5)
        self.scheduler = GlobalScheduler(UnitModel(), lambda: self.now, policy=LeastLoad(), balance=balance)
        self.members = RoutingMembers(self.watching, self.scheduler)

    def join(self, name: str, role: str = "both", incarnation: int = 1) -> kvpool.Cluster:
        cluster = kvpool.Cluster.join(self.url)
        cluster.register(name=name, role=role, incarnation=incarnation, endpoints=["unix:@nowhere"])
        return cluster

    def until(self, kind: str, name: str) -> None:
        seen: list[tuple[str, str]] = []

        def told() -> bool:
            seen.extend((event.kind, event.member.name) for event in self.members.apply())
            return (kind, name) in seen

        eventually(told)

    def choices(self, n: int = 30) -> dict[str, int]:
        """How often each is chosen for requests that end at once, by name."""
        counts: dict[str, int] = {}
        for i in range(n):
            decision = self.scheduler.route(Request(prompt(2, i)))
            member = self.members.member(decision.instance)
            assert member is not None
            counts[member.name] = counts.get(member.name, 0) + 1
            self.scheduler.finished(decision.ticket)
        return counts

    def close(self) -> None:
        self.members.close()
        self.watching.close()
        kvpool.Cluster.forget(self.url)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    with contextlib.closing(made):
        yield made


def test_a_member_that_joins_gets_requests_and_one_that_left_gets_none(world):
    with world.join("a"):
        world.until("joined", "a")
        assert set(world.choices()) == {"a"}
        with world.join("b"):
            world.until("joined", "b")
            world.now += 1000  # it is no newcomer any more
            assert set(world.choices()) == {"a", "b"}
        world.until("left", "b")
        assert set(world.choices()) == {"a"}
    world.until("left", "a")
    with pytest.raises(kvpool.StateError):
        world.choices(1)


def test_a_newcomer_gets_its_load_gradually(world):
    with world.join("a"), world.join("b"):
        world.until("joined", "a")
        world.until("joined", "b") if world.members.member(2) is None else None
        world.now += 1000
        world.choices(60)
        with world.join("new"):
            world.until("joined", "new")
            world.now += 1
            early = world.choices(60).get("new", 0)
            world.now += 1000
            late = world.choices(60)["new"]
            assert early < late


def test_a_draining_member_is_not_chosen_and_may_come_back(world):
    with world.join("a"), world.join("b") as leaver:
        eventually(lambda: world.members.apply() is not None and len(world.members._members) == 2)
        world.now += 1000
        assert set(world.choices()) == {"a", "b"}
        leaver.registration.publish(state="draining")
        world.until("changed", "b")
        assert set(world.choices()) == {"a"}
        leaver.registration.publish(state="up")
        world.until("changed", "b")
        assert "b" in world.choices()


def test_roles_become_kinds(world):
    with world.join("p", "prefill"), world.join("d", "decode"):
        eventually(lambda: world.members.apply() is not None and len(world.members._members) == 2)
        decision = world.scheduler.route(Request(prompt(2)))
        assert world.members.member(decision.instance).name == "p"
        assert world.members.member(decision.decode).name == "d"
        assert world.scheduler._instances[decision.instance].kind is Kind.PREFILL


def test_a_restarted_member_begins_with_nothing_cached(world):
    with world.join("a", incarnation=1):
        world.until("joined", "a")
        decision = world.scheduler.route(Request(prompt(8)))
        world.scheduler.finished(decision.ticket)
        assert world.scheduler.route(Request(prompt(8))).cached > 0
    with world.join("a", incarnation=2):
        world.until("joined", "a")
        again = world.scheduler.route(Request(prompt(8)))
        assert again.instance != decision.instance
        assert again.cached == 0


def test_a_member_without_an_address_is_not_chosen(world):
    with kvpool.Cluster.join(world.url) as cluster:
        registration = cluster.register(name="a", role="both", incarnation=1)
        world.until("joined", "a")
        with pytest.raises(kvpool.StateError):
            world.choices(1)
        registration.publish(endpoints=["unix:@here"])
        world.until("changed", "a")
        assert set(world.choices()) == {"a"}
