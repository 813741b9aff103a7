"""The directory of a cluster goes, comes back, and comes back empty, while blocks move between its members.

Bugs these tests are there to find: a coordinator that restarts empty and lets live data be overwritten (6); members
that stop when nobody counts them.
"""

from __future__ import annotations

import shutil

import pytest
from attached import Traffic, eventually, home_of, ids, send_by_name
from cluster.kit import LocalPlace
from cluster.own_etcd import own, own_etcd
from crew import near_nursery

__all__ = ["near_nursery", "own", "own_etcd"]


def test_removing_the_folder_of_a_local_cluster_disturbs_no_member(near_nursery):
    place = LocalPlace()
    try:
        with home_of(place, 60.0) as home, home.member(near_nursery) as victim:
            send_by_name(home.pool, "victim")
            before = ids(home.cluster)
            traffic = Traffic(home.pool, "victim")
            for _ in range(3):
                shutil.rmtree(place.folder, ignore_errors=True)  # while members restore missing files
                traffic.goes_on()
                eventually(lambda: (place.folder / "m.victim.lock").exists())
            traffic.close()
            assert traffic.failed == []
            assert ids(home.cluster) == before
            assert "lost" not in home.events.of("victim")
            with home.member(near_nursery, "newcomer") as newcomer:
                assert newcomer("attachment.instance") not in before.values()
                send_by_name(home.pool, "newcomer")
            victim.kill()
    finally:
        place.close()


@pytest.mark.parametrize("memory", ["with its data", "empty"])
def test_etcd_is_killed_and_comes_back(memory, own, own_etcd, near_nursery):
    with home_of(own, 60.0) as home, home.member(near_nursery) as victim:
        send_by_name(home.pool, "victim")
        before = ids(home.cluster)
        traffic = Traffic(home.pool, "victim")
        own_etcd.kill()
        traffic.goes_on()
        if memory == "empty":
            own_etcd.forget()
        traffic.goes_on()
        own_etcd.start()
        traffic.goes_on()
        with own.join() as watching:  # one that knows nothing from before
            eventually(lambda: {one.name: one.instance for one in watching.members()} == before)
        with home.member(near_nursery, "newcomer") as newcomer:
            assert newcomer("attachment.instance") not in before.values()
            send_by_name(home.pool, "newcomer")
        traffic.goes_on()
        traffic.close()
        assert traffic.failed == []
        assert victim("words") == []
        assert ids(home.cluster)["victim"] == before["victim"]
        victim.kill()
