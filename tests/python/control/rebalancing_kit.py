"""Instances that are made up: tests of epochs decide what each of them sees of the others, and when a move ends."""

from __future__ import annotations

import time
from dataclasses import replace

import kvpool
from kvpool import Member
from kvpool.control.migration import Migrated, Migration, MigrationTotals
from kvpool.control.rebalancing import Epochs
from kvpool.policy.rebalancing import SCHEDULERS, Planner

CAPACITY = 96


class World:
    """Instances, the records that they publish, and a clock that stands until it is moved."""

    def __init__(self, policy="mell", growth=0, **options):
        self.records: dict[int, Member] = {}
        self.instances: dict[int, Instance] = {}
        self.hidden: dict[int, set[int]] = {}  # whom an instance does not see
        self.now = 100.0
        self.planner = Planner(SCHEDULERS[policy], **options)
        self.growth = growth
        self.started = []

    def add(self, number, **running):
        self.records[number] = Member(f"i{number}", number, 1000 + number, "both")
        self.instances[number] = one = Instance(self, number, running)
        return one

    def add_all(self, *instances):
        return [self.add(number, **running) for number, running in enumerate(instances, 1)]

    def kill(self, number):
        del self.records[number]
        return self.instances.pop(number)

    def round(self, seconds=0.5, but=()):
        """Each instance steps once, in the order of their numbers, and what they have begun is done."""
        self.now += seconds
        for number, one in list(self.instances.items()):
            if number not in but:
                one.step()

    def rounds(self, count, but=()):
        for _ in range(count):
            self.round(but=but)

    def where(self):
        found = {}
        for number, one in self.instances.items():
            for name in one.engine.requests:
                assert name not in found, f"{name} runs twice"
                found[name] = number
        return found


class Instance:
    def __init__(self, world, number, running):
        self.world, self.number, self.name = world, number, f"i{number}"
        self.engine = Engine(self, running)
        self.migrations = FakeMigrations(self)
        self.terminated = 0
        self.cluster = FakeCluster(self)
        self.epochs = Epochs(
            self.migrations, self.engine, self.cluster, capacity=CAPACITY, growth=world.growth, planner=world.planner,
            epoch_s=1.0, move_s=5.0, moves_at_once=2, activate=world.started.append, terminate=self.end,
            clock=lambda: world.now,
        )  # fmt: skip

    def step(self):
        self.epochs.step()
        until = time.monotonic() + 20
        carrier = self.epochs.carrier  # its threads begin what there is, and wait for what is held
        while (carrier._queue and len(carrier._threads) > len(carrier._begun)) or any(
            each not in self.migrations.held for each in list(carrier._begun)
        ):
            assert time.monotonic() < until, "a move does not end"
            time.sleep(0.0005)

    def end(self):
        self.terminated += 1

    @property
    def moves(self):
        return self.epochs.tally.totals().moves

    @property
    def record(self):
        return self.world.records[self.number].rebalancing


class FakeCluster:
    def __init__(self, instance):
        self.world, self.instance, self.valid, self.lost = instance.world, instance.number, True, 0
        self.name, self.failure = instance.name, None
        self.lease_s, self.closed, self.close = 3.0, False, lambda: None

    @property
    def registration(self):
        return self

    def lease_valid(self):
        return self.valid

    @property
    def leases_lost(self):
        return self.lost

    def publish(self, *, rebalancing):
        if self.failure is not None:
            raise self.failure
        if self.instance in self.world.records:
            self.world.records[self.instance] = replace(self.world.records[self.instance], rebalancing=rebalancing)

    def on_change(self, callback):
        return self

    def members(self):
        unseen = self.world.hidden.get(self.instance, set())
        return [member for number, member in self.world.records.items() if number not in unseen]


class Engine:
    def __init__(self, instance, running):
        self.instance, self.requests, self.queue, self.placed = instance, dict(running), {}, []
        self.failure = None

    def running(self):
        return list(self.requests.items())

    def waiting(self):
        return list(self.queue.items())

    def place(self, request, to):
        if self.failure is not None:
            raise self.failure
        self.placed.append((request, to))
        number = int(to[1:])
        self.instance.world.instances[number].engine.requests[request] = self.queue.pop(request)


class FakeMigrations:
    """Moves at once; or, while `hold` is set, when `finish` is called."""

    def __init__(self, instance):
        self.instance, self.hold, self.failure = instance, False, None
        self.held: dict[str, Migration] = {}
        self.lost = None
        self.moved = 0
        self.asked = []

    def migrate(self, request, to, *, by, timeout):
        self.asked.append((request, to, by))
        if self.failure is not None:
            raise self.failure
        if request in self.held and not self.held[request].done():
            raise kvpool.StateError(f"request {request!r} is on its way already")
        if request not in self.instance.engine.requests:
            raise kvpool.StateError(f"the engine does not have request {request!r}")
        handle = Migration(request, to)
        if self.hold:
            self.held[request] = handle
        else:
            self._arrive(handle)
        return handle

    def finish(self, request, error=None):
        handle = self.held[request]
        if error is None:
            self._arrive(handle)
        else:
            handle._end(error)
        until = time.monotonic() + 20
        while request in self.instance.epochs.carrier._begun:
            assert time.monotonic() < until
            time.sleep(0.0005)
        del self.held[request]

    def _arrive(self, handle):
        engines = {one.name: one.engine for one in self.instance.world.instances.values()}
        if handle.to not in engines:
            handle._end(kvpool.PeerLost("gone", peer=handle.to))
            return
        engines[handle.to].requests[handle.request] = self.instance.engine.requests.pop(handle.request)
        self.moved += 1
        handle._note("there")
        handle._end(Migrated("kv", 1, 1, 0, 1, 1, 0.0, 0.0))

    def totals(self):
        return MigrationTotals({("kv", "ok"): self.moved, ("kv", "Busy"): 1}, {}, 0, 0.0, ())

    def check(self):
        if self.lost is not None:
            raise self.lost

    def under_way(self):
        return tuple(self.held.values())

    def arriving(self):
        names = []
        for one in self.instance.world.instances.values():
            names += [each.request for each in one.migrations.held.values() if each.to == self.instance.name]
        return tuple(names)
