"""How the pool of an engine joins a cluster."""

from __future__ import annotations

import pytest
from attach_kit import eventually, names
from kit import small_pool

import kvpool
from kvpool.engines.membership import Published
from kvpool.engines.vllm.members import ROLES, Membership


def test_a_member_is_known_by_name_and_role_until_it_leaves(url):
    with small_pool(name="a") as one, small_pool(name="b") as other:
        first = Membership(one, url, ROLES["kv_producer"], None, {"lease": 60.0})
        second = Membership(other, url, ROLES["kv_consumer"], None, {"lease": 60.0})
        assert (first.name, second.name) == ("a", "b")
        eventually(lambda: first.has("b"))
        assert second.has("a")  # it was there before
        assert not first.has("a")  # nobody sends to itself
        assert first.others() == ["b"]
        with kvpool.Cluster.join(url) as observer:
            assert {member.name: member.role for member in observer.members()} == {"a": "prefill", "b": "decode"}
            second.close()
            eventually(lambda: not first.has("b"))
            first.close()
            eventually(lambda: names(observer) == [])


@pytest.mark.parametrize(
    ("options", "listen", "error"),
    [
        ({"lease": -1}, None, kvpool.ArgumentError),
        ({"heartbeat": "x"}, None, kvpool.ArgumentTypeError),
        ({}, "tcp:*:0", kvpool.ArgumentError),
        ({}, 3, kvpool.ArgumentTypeError),
    ],
)
def test_what_the_cluster_refuses_leaves_no_member(url, options, listen, error):
    with small_pool(name="a") as pool, kvpool.Cluster.join(url) as observer:
        with pytest.raises(error):
            Membership(pool, url, "both", listen, options)
        assert names(observer) == []


def test_a_name_that_is_taken_is_refused(url):
    with small_pool(name="a") as one, small_pool(name="a") as other:
        first = Membership(one, url, "both", None, {"lease": 60.0})
        with pytest.raises(kvpool.StateError, match="name"):
            Membership(other, url, "both", None, {"lease": 60.0})
        first.close()


@pytest.mark.parametrize(("options", "lease"), [({}, 15.0), ({"lease": 60.0}, 60.0)])
def test_a_busy_engine_is_not_given_up_at_once(url, options, lease):
    with small_pool(name="a") as pool:
        member = Membership(pool, url, "both", None, options)
        assert member._cluster.lease_s == lease
        member.close()


def test_routers_learn_where_an_engine_answers_and_publishes(url):
    published = Published("tcp://10.0.0.5:5560", "tcp://10.0.0.5:6003", rank=3)
    with small_pool(name="a") as pool, kvpool.Cluster.join(url) as observer:
        member = Membership(pool, url, "both", None, {"lease": 60.0}, "http://10.0.0.5:8000", published)
        eventually(observer.members)
        (seen,) = observer.members()
        assert (seen.url, seen.rank) == ("http://10.0.0.5:8000", 3)
        assert (seen.events, seen.events_replay) == (published.events, published.replay)
        member.close()
    with small_pool(name="b") as pool, kvpool.Cluster.join(url) as cluster:
        with pytest.raises(kvpool.ArgumentError, match="rank"):
            pool.attach(cluster, rank=-1)
        with pytest.raises(kvpool.ArgumentTypeError, match="events"):
            pool.attach(cluster, events=7)  # type: ignore[arg-type]
        pool.attach(cluster)  # nothing has changed
