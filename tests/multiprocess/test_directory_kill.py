"""SIGKILL of the process with the directory of a cluster, at a random moment, while blocks move between its members.

Over etcd that is the server. On one machine nobody keeps it: the first member makes the folder, and is killed there at
any moment from its first step on, while others come.

Bugs these tests are there to find: a cluster that a half-made directory keeps from beginning, or divides; a directory
that comes back without what it knew, and gives away ids that are in use (6); members that stop when nobody counts them.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator

from attached import CLUSTER_LEASE, Traffic, eventually, home_of, ids, send_by_name
from cluster.kit import LocalPlace
from cluster.own_etcd import own, own_etcd
from crew import near_nursery
from victims import Nursery, Victim, repeats, seed_of

__all__ = ["near_nursery", "own", "own_etcd"]

KILLS = repeats(15, long=1000)  # by each of two tests
LINK_LEASE = 60.0  # nothing here may end by it

# The first member makes the cluster, then enters it and leaves it all the time. Tells the secret, and each of its ids.
FIRST = """
cluster = kvpool.Cluster.join(url, lease=lease)
tell(cluster.secret)
for incarnation in range(1, 10_000):
    registration = cluster.register(name='first', role='both', incarnation=incarnation)
    tell(registration.instance)
    registration.leave()
"""


@contextlib.contextmanager
def short_lived(nursery: Nursery, place: LocalPlace, seconds: float, enters: int) -> Iterator[Victim]:
    """The first member, which has so long to live once it has entered so often; it is dead when this is left."""
    with nursery.victim() as first:
        first.send(FIRST, url=place.url, lease=CLUSTER_LEASE)
        eventually(lambda: ids_given(place) >= enters)
        killer = threading.Timer(seconds, first.kill)
        killer.start()
        try:
            yield first
        finally:
            killer.join(60)


def ids_given(place: LocalPlace) -> int:
    try:
        return json.loads((place.folder / "state").read_bytes())["highest"]
    except FileNotFoundError:
        return 0


def test_the_first_member_of_a_local_cluster_is_killed_at_any_moment(near_nursery, request):
    """Whatever it has left, the next members find each other: with its secret, if any, and with new ids."""
    dice = random.Random(seed_of(request))
    began = entered = 0
    for life in range(KILLS):
        place = LocalPlace()
        moment = dice.choice([0.005, 0.02, 0.1]) * dice.random()
        try:
            with short_lived(near_nursery, place, moment, enters=0 if life else 3) as first:
                time.sleep(0.02 * dice.random())
                with home_of(place, LINK_LEASE) as home, home.member(near_nursery, "second") as second:
                    send_by_name(home.pool, "second")
                    first.wait()
                    eventually(lambda home=home: set(ids(home.cluster)) == {"survivor", "second"})
                    said = first.told()
                    assert all(worked for worked, _, _ in said), said
                    secrets, had = [value for _, value, _ in said[:1]], {value for _, value, _ in said[1:]}
                    began += bool(secrets)
                    entered += bool(had)
                    assert {*secrets, second("cluster.secret")} == {home.cluster.secret}
                    assert len({*ids(home.cluster).values()} - had) == 2
        finally:
            place.close()
    assert began > 0
    assert entered > 0


def test_etcd_is_killed_at_any_moment_and_comes_back_with_its_data_or_empty(own, own_etcd, near_nursery, request):
    """No transfer fails, no lease is reported lost, and all are members again with their earlier ids."""
    dice = random.Random(seed_of(request))
    with home_of(own, LINK_LEASE) as home, home.member(near_nursery) as victim:
        send_by_name(home.pool, "victim")
        before = ids(home.cluster)
        traffic = Traffic(home.pool, "victim")
        for life in range(KILLS):
            time.sleep(0.05 * dice.random())
            own_etcd.kill()
            traffic.goes_on()
            if life % 3 == 2:
                own_etcd.forget()
            own_etcd.start()
            with own.join() as watching:  # one that knows nothing from before
                eventually(lambda watching=watching: ids(watching) == before)
        with home.member(near_nursery, "newcomer") as newcomer:
            assert newcomer("attachment.instance") not in before.values()
            send_by_name(home.pool, "newcomer")
        traffic.close()
        assert traffic.failed == []
        assert victim("words") == []
        assert ids(home.cluster)["victim"] == before["victim"]
        victim.kill()
