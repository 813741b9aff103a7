"""A member that alone is cut off from etcd is kept by its links; one that is cut off from its peers, too, is dropped.

Bugs these tests are there to find: a member that was dropped and goes on as if it was not (5); an id that is given to
two, because etcd came back empty while the one that had it could not be heard (6).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
from attached import CLUSTER_LEASE, JOIN, Home, Traffic, eventually, home_of, send_by_name
from cluster.kit import Events
from cluster.own_etcd import own, own_etcd
from crew import near_nursery
from proxy import Proxy
from victims import LONG, Nursery, Victim

import kvpool
from kvpool.cluster.etcd.gateway import encode

LINK_LEASE = 2.0  # of those that are cut off from their peers, too

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


def is_listed(own_etcd, home):
    return "kvs" in own_etcd.call("kv/range", {"key": encode(f"{home.place.prefix}/members/victim")})


def runs_out(own_etcd, home):
    """Until etcd has given up the victim's record."""
    eventually(lambda: not is_listed(own_etcd, home))


def test_the_link_keeps_a_member_that_only_etcd_cannot_reach(home, own_etcd, near_nursery):
    """Its lease runs out, and no linked peer loses it, a transfer or a lent block."""
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (victim, instance),
        home.place.join(lease=CLUSTER_LEASE) as router,
    ):
        watching = Events(router)
        lent = home.pool.alloc(2, instance="victim")
        traffic = Traffic(home.pool, "victim")
        watching.wait("victim", "joined")
        proxy.hold(up=True, down=True)
        runs_out(own_etcd, home)
        watching.wait("victim", "joined", "lost")  # it has no link, and cannot know better
        traffic.goes_on()
        proxy.hold(up=False, down=False)
        watching.wait("victim", "joined", "lost", "joined")
        traffic.goes_on()
        traffic.close()
        home.pool.free(lent)
        assert traffic.failed == []
        assert "lost" not in home.events.of("victim")
        assert victim("list(words)") == []
        (found,) = (one for one in router.members() if one.name == "victim")
        assert (found.instance, found.term) == (instance, 0)


@pytest.mark.parametrize("learns", ["from its peer", "from etcd"])
def test_a_member_that_is_cut_off_from_all_is_dropped_learns_it_and_begins_a_new_term(
    own, own_etcd, near_nursery, learns
):
    with (
        home_of(own, LINK_LEASE, routes=("sock",), prefer_unix_socket=False) as home,  # so that links stay in the proxy
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as to_etcd,
        contextlib.ExitStack() as stack,
    ):
        url = f"etcd://{to_etcd.address.removeprefix('tcp:')}/{own.prefix}"
        victim = stack.enter_context(near_nursery.victim())
        instance = victim(JOIN, url=url, lease=CLUSTER_LEASE, options=home.options, name="victim")
        # The survivor calls it by the second proxy; its own calls go the direct way.
        to_victim = stack.enter_context(Proxy(victim("attachment._registration.record.endpoints[0]")))
        victim("attachment._registration.publish(endpoints=[where])", where=to_victim.address)
        eventually(lambda: any(one.endpoints == (to_victim.address,) for one in home.cluster.members()))
        send_by_name(home.pool, "victim")
        home.pool.alloc(2, instance="victim")
        assert victim("pool.stats().hbm.lent") == 2
        for proxy in (to_etcd, to_victim):
            proxy.hold(up=True, down=True)
        home.events.wait("victim", "joined", "lost")  # its record has run out, and its link has ended
        eventually(lambda: victim("len(pool.peers.list())") == 0)
        assert victim("list(words)") == []  # it cannot tell this from an etcd that is down
        if learns == "from its peer":
            code = "addrs = pool.alloc(1)\npool.transfer('survivor', addrs, timeout=1.0).wait()"
            with pytest.raises(kvpool.Error):
                victim(code)
            eventually(lambda: victim("list(words)") == ["lost"])
            with pytest.raises(kvpool.Fenced):
                victim(code)
        for proxy in (to_etcd, to_victim):
            proxy.hold(up=False, down=False)
        home.events.wait("victim", "joined", "lost", "joined")
        eventually(lambda: victim("list(words)") == ["lost", "regained"])
        (found,) = (one for one in home.cluster.members() if one.name == "victim")
        assert (found.instance, found.term) == (instance, 1)
        send_by_name(home.pool, "victim")
        victim.kill()


def test_a_member_that_is_repeatedly_cut_off_for_less_than_its_lease_is_not_lost(home, own_etcd, near_nursery):
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (victim, _),
    ):
        until = "attachment._registration._entry.renewer.valid_until_ns"
        for up, down in ((True, True), (True, False), (False, True)) * (20 if LONG else 1):
            proxy.hold(up=up, down=down)
            time.sleep(CLUSTER_LEASE / 4)
            healed_ns = time.monotonic_ns()
            proxy.hold(up=False, down=False)
            eventually(lambda healed_ns=healed_ns: victim(until) > healed_ns + CLUSTER_LEASE * 0.9e9)  # renewed since
            send_by_name(home.pool, "victim")
        assert victim("list(words)") == []
        assert "lost" not in home.events.of("victim")


def test_the_id_of_a_member_that_is_cut_off_while_etcd_is_emptied_is_not_given_again(home, own_etcd, near_nursery):
    with (
        Proxy(f"tcp:127.0.0.1:{own_etcd.port}") as proxy,
        member_behind(proxy, home, near_nursery) as (_, instance),
    ):
        proxy.hold(up=True, down=True)
        runs_out(own_etcd, home)
        own_etcd.kill()
        own_etcd.forget()
        own_etcd.start()
        with home.member(near_nursery, "newcomer") as newcomer:
            assert newcomer("attachment.instance") not in (instance, home.attachment.instance)
            proxy.hold(up=False, down=False)
            eventually(lambda: is_listed(own_etcd, home))
            assert "lost" not in home.events.of("victim")
            found = {one.name: one.instance for one in home.cluster.members()}
            assert found["victim"] == instance
            assert found["newcomer"] == newcomer("attachment.instance")
            for name in ("victim", "newcomer"):
                send_by_name(home.pool, name)
            newcomer.kill()
