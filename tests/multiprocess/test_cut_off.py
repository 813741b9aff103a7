"""A member that alone is cut off from etcd: the others are told, it fences itself when it hears, and it is back.

Bugs these tests are there to find: a member that was given up and goes on as if it was not (5); an id that is given to
two, because etcd came back empty while the one that had it could not be heard (6).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from attached import CLUSTER_LEASE, JOIN, Home, eventually, home_of, send_by_name
from cluster.own_etcd import own, own_etcd
from crew import near_nursery
from proxy import Proxy
from victims import LONG, Nursery, Victim

import kvpool

__all__ = ["near_nursery", "own", "own_etcd"]


@pytest.fixture
def home(own) -> Iterator[Home]:
    with home_of(own, 60.0) as one:
        yield one


@contextlib.contextmanager
def member_behind(proxy: Proxy, home: Home, nursery: Nursery) -> Iterator[tuple[Victim, int]]:
    """One that reaches its peers, and etcd only by the proxy."""
    url = f"etcd://{proxy.address.removeprefix('tcp:')}/{home.place.url.rpartition('/')[2]}"
    with nursery.victim() as victim:
        instance = victim(JOIN, url=url, lease=CLUSTER_LEASE, options=home.options, name="victim")
        home.events.wait("victim", "joined")
        send_by_name(home.pool, "victim")
        yield victim, instance
        victim.kill()


def test_one_that_is_cut_off_alone_is_lost_and_comes_back_in_a_new_term(home, own_etcd, near_nursery):
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (victim, instance),
    ):
        proxy.hold(up=True, down=True)
        home.events.wait("victim", "joined", "lost")
        addrs = home.pool.alloc(1)
        with pytest.raises(kvpool.PeerLost):
            home.pool.transfer("victim", addrs).wait()
        home.pool.free(addrs)
        assert victim("list(words)") == []  # it cannot tell this from an etcd that is down
        assert not victim("attachment._registration.lease_valid()")
        proxy.hold(up=False, down=False)
        home.events.wait("victim", "joined", "lost", "joined")
        eventually(lambda: victim("list(words)") == ["lost", "regained"])
        (found,) = (one for one in home.cluster.members() if one.name == "victim")
        assert (found.instance, found.term) == (instance, 1)
        send_by_name(home.pool, "victim")


def test_one_that_is_cut_off_for_less_than_its_lease_again_and_again_is_not_lost(home, own_etcd, near_nursery):
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (victim, _),
    ):
        until = "attachment._registration._entry.keeper.valid_until_ns"
        for up, down in ((True, True), (True, False), (False, True)) * (20 if LONG else 1):
            proxy.hold(up=up, down=down)
            time.sleep(CLUSTER_LEASE / 4)
            healed_ns = time.monotonic_ns()
            proxy.hold(up=False, down=False)
            eventually(lambda healed_ns=healed_ns: victim(until) > healed_ns + CLUSTER_LEASE * 0.9e9)  # renewed since
            send_by_name(home.pool, "victim")
        assert victim("list(words)") == []
        assert "lost" not in home.events.of("victim")


def test_the_id_of_one_that_is_cut_off_while_etcd_is_emptied_is_not_given_again(home, own_etcd, near_nursery):
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (_, instance),
    ):
        proxy.hold(up=True, down=True)
        home.events.wait("victim", "joined", "lost")
        own_etcd.kill()
        own_etcd.forget()
        own_etcd.start()
        with home.member(near_nursery, "newcomer") as newcomer:
            assert newcomer("attachment.instance") not in (instance, home.attachment.instance)
            proxy.hold(up=False, down=False)
            home.events.wait("victim", "joined", "lost", "joined")
            found = {one.name: one.instance for one in home.cluster.members()}
            assert found["victim"] == instance
            assert found["newcomer"] == newcomer("attachment.instance")
            for name in ("victim", "newcomer"):
                send_by_name(home.pool, name)
            newcomer.kill()
