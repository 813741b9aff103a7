"""Instances that come from a cluster: members with a URL come, drain, go and come back."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from kit import BLOCK
from router.publishing import Publishing
from router.router_kit import Fake, Running, asked_of, eventually, fakes, logged, routing

import kvpool
from kvpool.control.router import ClusterSettings, InstanceSpec, Router, RouterSettings

incarnations = itertools.count(1)


@pytest.fixture
def url() -> Iterator[str]:
    url = f"local://router-{secrets.token_hex(6)}"
    yield url
    kvpool.Cluster.forget(url)


@contextmanager
def member(url: str, name: str, fake: Fake | None = None, address: str = "", role: str = "both"):
    """A member, in this process, that publishes the fake's URL."""
    with kvpool.Cluster.join(url) as cluster:
        at = address if fake is None else fake.spec.url
        yield cluster.register(name=name, role=role, incarnation=next(incarnations), url=at)


@contextmanager
def routing_members(url: str, *instances, **settings) -> Iterator[Running]:
    with routing(*instances, up=len(instances), cluster=ClusterSettings(url), **settings) as running:
        yield running


def up(running: Running) -> set[str]:
    return {name for name, each in running.states().items() if each["state"] == "healthy" and not each["draining"]}


def test_members_come_and_go_by_themselves(url):
    with fakes("a", "b") as (one, other), routing_members(url) as running:
        assert running.complete().status_code == 503
        with member(url, "a", one):
            eventually(lambda: up(running) == {"a"})
            with member(url, "b", other):
                eventually(lambda: up(running) == {"a", "b"})
            eventually(lambda: set(running.states()) == {"a"})
            assert running.where("x") == "a"
        eventually(lambda: running.states() == {})
        assert running.complete().status_code == 503


def test_a_draining_member_gets_nothing_new_and_its_requests_end(url):
    with fakes("a", "b") as (one, other), routing_members(url, other) as running, member(url, "a", one) as entry:
        eventually(lambda: up(running) == {"a", "b"})
        running.admin.post("/instances/b/drain")
        fields = {"prompt": "x", "stream": True, "hold_at": 1}
        with running.client.stream("POST", "/v1/completions", json=fields) as response:
            running.admin.post("/instances/b/resume")
            entry.publish(state="draining")
            eventually(lambda: running.states()["a"]["draining"])
            assert {running.where(f"{number}") for number in range(4)} == {"b"}
            entry.leave()
            eventually(lambda: running.router._members._wanted == {})
            assert running.states()["a"]["in_flight"] == 1
            one.released.set()
            assert response.read().endswith(b"[DONE]\n\n")
        eventually(lambda: "a" not in running.states())


def test_a_member_that_comes_back_is_a_new_instance(url):
    """At another address, and with nothing cached."""
    with fakes("a1", "a2") as (old, new), routing_members(url) as running:
        with member(url, "a", old):
            eventually(lambda: up(running) == {"a"})
            running.complete("A long prompt. " * 40)
            assert running.states()["a"]["cached_blocks"]
        with member(url, "a", new):
            eventually(lambda: running.complete().json().get("instance") == "a2")
            assert running.states()["a"]["cached_blocks"] == 0, "of the long prompt"


def test_both_halves_come_from_a_cluster(url):
    with (
        fakes("p1", "d1") as (prefill, decode),
        routing_members(url) as running,
        member(url, "p1", prefill, role="prefill"),
        member(url, "d1", decode, role="decode"),
    ):
        eventually(lambda: up(running) == {"p1", "d1"})
        assert running.complete().headers["x-kvpool-prefill"] == "p1"
        assert asked_of(prefill)[0]["kv_transfer_params"] == {"kvpool": {"to": "d1"}}


def test_members_without_a_url_or_with_a_bad_one_are_left_alone(url):
    with fakes("a") as (one,), logged() as records, routing_members(url, one) as running:
        with (
            member(url, "silent"),
            member(url, "bad", address="not a url"),
            member(url, "spaces in its name", address="http://127.0.0.1:9"),
            member(url, "a", address="http://127.0.0.1:9"),  # the operator's instance has the name
        ):
            eventually(lambda: sum(each.msg == "member not routed to" for each in records) == 3)
            assert set(running.states()) == {"a"}
            assert running.where("x") == "a"
        eventually(lambda: running.router._members._followed == {})
        assert set(running.states()) == {"a"}, "the operator's instance stays"


def test_what_the_operator_removes_stays_out(url):
    with fakes("a") as (one,), routing_members(url) as running:
        with member(url, "a", one) as entry:
            eventually(lambda: up(running) == {"a"})
            assert running.admin.delete("/instances/a").status_code == 204
            entry.publish(load=kvpool.Load(requests=1))
            eventually(lambda: [each.load.requests for each in list(running.router._members._wanted.values())] == [1])
            assert running.states() == {}
        eventually(lambda: running.router._members._followed == {})
        with member(url, "a", one):  # started again
            eventually(lambda: up(running) == {"a"})


def test_what_the_operator_has_named_again_is_his(url):
    with fakes("a", "b") as (one, other), routing_members(url) as running:
        with member(url, "a", one):
            eventually(lambda: up(running) == {"a"})
            assert running.admin.delete("/instances/a").status_code == 204
            assert running.admin.post("/instances", json={"name": "a", "url": other.spec.url}).status_code == 201
            eventually(lambda: up(running) == {"a"})
        eventually(lambda: running.router._members._followed == {})
        assert up(running) == {"a"}
        assert running.complete().json()["instance"] == "b"


def test_the_operators_draining_outlasts_the_members(url):
    with fakes("a") as (one,), routing_members(url) as running, member(url, "a", one) as entry:
        eventually(lambda: up(running) == {"a"})
        running.admin.post("/instances/a/drain")
        entry.publish(state="draining")
        instance = running.router.fleet.get("a")
        eventually(lambda: instance.leaving)
        entry.publish(state="up")
        eventually(lambda: not instance.leaving)
        assert running.states()["a"]["draining"]
        running.admin.post("/instances/a/resume")
        eventually(lambda: up(running) == {"a"})


def test_a_member_takes_the_url_of_one_that_is_leaving(url):
    """Started again under another name while the router waits for the old one's last request."""
    with fakes("a") as (one,), routing_members(url) as running:
        with member(url, "old", one):
            eventually(lambda: up(running) == {"old"})
            streaming = running.client.stream(
                "POST", "/v1/completions", json={"prompt": "x", "stream": True, "hold_at": 1}
            )
            response = streaming.__enter__()
        with member(url, "new", one):
            eventually(lambda: "new" in running.router._members._followed)
            assert set(running.states()) == {"old"}
            one.released.set()
            response.read()
            streaming.__exit__(None, None, None)
            eventually(lambda: up(running) == {"new"})


def test_half_a_fleet_is_no_error_where_a_cluster_brings_the_rest():
    half = InstanceSpec("p", "http://h:1", "prefill")
    assert RouterSettings((half,), cluster=ClusterSettings("local://x")).instances == (half,)


def test_a_clusters_url_that_is_wrong_is_refused():
    with pytest.raises(kvpool.ArgumentError, match="nonsense"):
        Router(RouterSettings((), cluster=ClusterSettings("nonsense://x")))


def test_a_member_says_where_its_events_and_which_rank_it_is(url):
    """Two ranks of one server, of which one publishes."""
    settings = {"block_tokens": BLOCK, "policy": "longest-prefix", "warmup_s": 0.0, "cap": 1000.0}
    with fakes("a") as (fake,), Publishing() as publisher, routing_members(url, **settings) as running:
        shared = {"role": "both", "url": fake.spec.url}
        with kvpool.Cluster.join(url) as one, kvpool.Cluster.join(url) as other:
            one.register(name="a-dp0", incarnation=next(incarnations), rank=0, **shared)
            other.register(name="a-dp1", incarnation=next(incarnations), rank=1, events=publisher.endpoint, **shared)
            eventually(lambda: up(running) == {"a-dp0", "a-dp1"})
            publisher.wait_until_heard()
            prompt = [7] * 12 * BLOCK
            publisher.store(prompt)
            eventually(lambda: running.states()["a-dp1"]["cached_blocks"] == 12)
            assert running.where(prompt, model="any") == "a-dp1"  # by events, which name no model
            assert fake.seen[-1][1]["x-data-parallel-rank"] == "1"
            assert running.metric("events_synced", engine="a-dp1") == 1
            assert running.states()["a-dp0"]["events"] is None


def test_a_member_with_a_wrong_endpoint_is_told_and_routed_to_without_events(url):
    with logged() as records, fakes("a") as (fake,), routing_members(url) as running:
        with kvpool.Cluster.join(url) as cluster:
            cluster.register(
                name="a", role="both", incarnation=next(incarnations), url=fake.spec.url, events="tcp://*:5557"
            )
            eventually(lambda: up(running) == {"a"})
            assert running.where("x") == "a"
            assert running.states()["a"]["events"] is None
    assert [each.getMessage() for each in records].count("member's events not followed") == 1


def test_of_two_members_with_one_endpoint_one_is_followed(url):
    """The other is routed to, and followed when the first has gone."""
    with logged() as records, fakes("a", "b") as two, Publishing() as publisher, routing_members(url) as running:
        with kvpool.Cluster.join(url) as one, kvpool.Cluster.join(url) as other:
            for cluster, fake in zip((one, other), two, strict=True):
                cluster.register(
                    name=fake.spec.name,
                    role="both",
                    incarnation=next(incarnations),
                    url=fake.spec.url,
                    events=publisher.endpoint,
                )
                eventually(lambda name=fake.spec.name: name in up(running))
            assert [running.states()[name]["events"] is None for name in ("a", "b")] == [False, True]
            one.close()
            eventually(lambda: running.states().keys() == {"b"} and running.states()["b"]["events"])
    told = [each for each in records if each.getMessage() == "instance not followed"]
    assert len(told) == 1
