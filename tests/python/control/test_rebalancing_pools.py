"""Pools of one cluster, with requests that decode meanwhile: plans are carried out by live migrations.

Each token is a function of all keys and values before it (migration_kit), so a request that came from elsewhere and
has other tokens than alone has read a wrong block.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
from attach_kit import join
from cluster.own_etcd import own, own_etcd
from cluster.places import etcd, etcd_server, local, place
from control.migration_kit import Reader, ToyEngine, eventually, prompt_of, reference
from kit import BLOCK, small_pool
from transfer.kit import SECRET

import kvpool
from kvpool import cli
from kvpool.control.migration import Migrations
from kvpool.control.rebalancing import Rebalancer
from kvpool.policy.mell import Boundaries, ComputeProfile
from kvpool.policy.rebalancing import Planner

__all__ = ["etcd", "etcd_server", "local", "own", "own_etcd", "place"]

BLOCKS = 97
LENGTH = 110
CAPACITY = (BLOCKS - 1) * BLOCK


class Server(ToyEngine):
    """A toy engine that takes part in epochs: it says what it runs, and sends new requests to their place.

    Requests keep their last token back until `may_end`, so that they are there for as long as a plan needs them.
    """

    def __init__(self, pool, reader, name, everybody, may_end):
        super().__init__(pool, reader, name)
        self.everybody, self.new, self.may_end = everybody, {}, may_end
        everybody[name] = self

    def running(self):
        with self.lock:
            return [(name, len(one.blocks) * BLOCK) for name, one in self.requests.items()]

    def waiting(self):
        with self.lock:
            return [(name, -(-len(prompt) // BLOCK) * BLOCK) for name, (prompt, _) in self.new.items()]

    def step(self, name):
        with self.lock:
            one = self.requests.get(name)
            if one is not None and len(one.tokens) == one.length - 1 and not self.may_end.is_set():
                return
        if not super().step(name):
            with self.lock:
                one = self.requests.get(name)
                if one is not None and not one.stopped and len(one.tokens) == one.length:
                    self._free(self.requests.pop(name))

    def place(self, request, to):
        prompt, length = self.new.pop(request)
        try:
            self.everybody[to].begin(request, prompt, length)
        except (kvpool.Error, KeyError):
            self.new[request] = prompt, length


class Instance:
    def __init__(self, url, name, reader, everybody, may_end, **options):
        self.stack = contextlib.ExitStack()
        self.cluster = self.stack.enter_context(join(url, heartbeat=0.05))
        secret = {} if self.cluster.secret else {"secret": SECRET}  # etcd keeps none
        self.pool = self.stack.enter_context(small_pool(BLOCKS, 0, name=name, **secret))
        self.pool.attach(self.cluster, name=name)
        self.engine = Server(self.pool, reader, name, everybody, may_end)
        self.migrations = self.stack.enter_context(Migrations(self.pool, self.engine, cluster=self.cluster))
        self.ended, self.asked = threading.Event(), []
        self.rebalancer = self.stack.enter_context(
            Rebalancer(
                self.migrations, self.engine, self.cluster, capacity=CAPACITY, growth=2 * BLOCK, epoch_s=0.1, move_s=20,
                activate=self.asked.append, terminate=self.ended.set, **options,
            )
        )  # fmt: skip
        self.stack.callback(self.engine.end)
        self.engine.run(0.012)

    def close(self):
        self.stack.close()


@contextlib.contextmanager
def instances_of(place):
    """A maker of instances of one cluster."""
    found, everybody, reader, may_end = [], {}, Reader(), threading.Event()

    def instance(name, **options):
        found.append(Instance(place.url, name, reader, everybody, may_end, **options))
        return found[-1]

    instance.reader, instance.may_end = reader, may_end
    try:
        yield instance
    finally:
        for each in found:
            each.close()


@pytest.fixture
def make(place):
    with instances_of(place) as made:
        yield made


def check(reader, prompts, length):
    for name, prompt in prompts.items():
        eventually(lambda name=name: len(reader.tokens.get(name, ())) == length - 10)
        assert reader.tokens[name] == reference(prompt, length)[10:]


def test_requests_come_together_with_the_same_tokens_and_an_instance_ends(make):
    a, b, c = (make(name) for name in "abc")
    prompts = {f"r{number}": prompt_of(number) for number in range(3)}
    for (name, prompt), one in zip(prompts.items(), (a, b, c), strict=True):
        one.engine.new[name] = prompt, LENGTH
        one.engine.place(name, one.engine.name)
    eventually(lambda: sum(bool(each.engine.requests) for each in (a, b, c)) == 1)
    eventually(lambda: any(each.ended.is_set() for each in (a, b, c)))
    make.may_end.set()
    check(make.reader, prompts, LENGTH)

    def totals():
        return [each.rebalancer.totals() for each in (a, b, c)]

    eventually(lambda: sum(one.moves.get("ok", 0) for one in totals()) >= 2)  # counted after a request has come
    assert [bool(one.plans_made) for one in totals()] == [True, False, False]


def limits(instances):
    """No link has time for migration; each instance prefills what comes."""
    compute = {each: ComputeProfile({0: 1000, 99: 1000}) for each in instances}
    return Boundaries(lambda source, destination: [("up", source)], {}, compute)


def test_requests_move_by_tokens_where_the_links_have_no_time(make):
    a, b = (make(name, policy=Planner(boundaries=limits)) for name in "ab")
    prompts = {f"r{number}": prompt_of(number) for number in range(2)}
    for (name, prompt), one in zip(prompts.items(), (a, b), strict=True):
        one.engine.new[name] = prompt, LENGTH
        one.engine.place(name, one.engine.name)

    def left():
        return [key for one in (a, b) for key in one.migrations.totals().left]

    eventually(lambda: ("tokens", "ok") in left())
    make.may_end.set()
    check(make.reader, prompts, LENGTH)
    assert ("kv", "ok") not in left()


def test_new_requests_begin_by_plan_and_another_planner_takes_over(make):
    a, b = (make(name, policy=Planner(instances_min=2)) for name in "ab")
    make.may_end.set()
    eventually(lambda: a.rebalancer.plans)
    prompts = {f"r{number}": prompt_of(number) for number in range(4)}
    a.engine.new["r0"] = prompts["r0"], 60
    b.engine.new["r1"] = prompts["r1"], 60
    check(make.reader, {name: prompts[name] for name in ("r0", "r1")}, 60)
    a.rebalancer.close()
    eventually(lambda: b.rebalancer.plans)
    b.engine.new["r2"] = prompts["r2"], 60
    check(make.reader, {"r2": prompts["r2"]}, 60)
    assert b.rebalancer.totals().takeovers >= 1


@pytest.mark.parametrize("memory", ["with its data", "empty"])
def test_plans_go_on_when_etcd_is_back_and_requests_move_without_it(memory, own, own_etcd):
    """While it is gone nobody can publish, so no plan is told; nobody is taken for dead, and a move needs no record."""
    with instances_of(own) as make:
        a, b = (make(name, policy=Planner(instances_min=2)) for name in "ab")
        eventually(lambda: a.rebalancer.plans)
        prompts = {f"r{number}": prompt_of(number) for number in range(2)}
        a.engine.new["r0"] = prompts["r0"], LENGTH
        eventually(lambda: make.reader.tokens.get("r0"))
        own_etcd.kill()
        here, there = (a, b) if "r0" in a.engine.requests else (b, a)
        here.migrations.migrate("r0", there.engine.name, by="kv", timeout=20).wait()
        assert "r0" in there.engine.requests
        if memory == "empty":
            own_etcd.forget()
        own_etcd.start()
        b.engine.new["r1"] = prompts["r1"], LENGTH
        make.may_end.set()
        check(make.reader, {name: prompts[name] for name in ("r0", "r1")}, LENGTH)
        totals = [one.migrations.totals() for one in (a, b)]
        assert not any(key[1] == "PeerLost" for one in totals for key in one.left)


def test_wrong_arguments_and_the_end(make):
    one = make("a")
    alone = kvpool.Cluster.join("local://kvpool-test-nobody-is-here", lease=60)
    with alone, pytest.raises(kvpool.StateError, match="attach"):
        Rebalancer(one.migrations, one.engine, alone, capacity=8)
    for wrong in (
        {"capacity": 0},
        {"growth": -1},
        {"epoch_s": 0},
        {"move_s": 0},
        {"moves_at_once": 0},
        {"policy": "x"},
    ):
        with pytest.raises(kvpool.ArgumentError):
            Rebalancer(one.migrations, one.engine, one.cluster, **{"capacity": 8} | wrong)
    assert not one.rebalancer.draining
    one.rebalancer.drain()
    eventually(one.ended.is_set)
    one.rebalancer.close()
    one.rebalancer.close()
    assert not one.cluster.registration.record.rebalancing


def test_top_shows_migrations(make, place, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    pytest.importorskip("rich", reason="rich is not installed")
    one = make("a")
    eventually(lambda: one.cluster.registration.written.rebalancing)
    assert cli.main(["top", place.url, "--once"]) == 0
    text = capsys.readouterr().out
    assert "tokens/failed" in text
    assert "0/0/0/0" in text
