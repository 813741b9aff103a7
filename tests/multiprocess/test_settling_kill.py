"""SIGKILL and SIGSTOP of a member, coordinator or not, in the middle of a settlement.

Bugs these tests are there to find: debts of the others that stay frozen; blocks that come home for a settlement that is
over; a block that is lost on its way, or whose content is.
"""

from __future__ import annotations

import contextlib
import random
import time

import pytest
from attached import CLUSTER_LEASE, LINK_LEASE, eventually
from cluster.kit import LocalPlace
from crew import near_nursery
from victims import big_pool, check, repeats, seed_of, stamp

import kvpool
from kvpool.control.lending import Lending

__all__ = ["near_nursery"]

KILLS = repeats(2, long=40)
BLOCKS, OWED = 24, 8
OPTIONS = {"medium": kvpool.HBM, "tail": 1, "settle_min": 1, "settle_blocks": 2}

JOIN = """
import contextlib, time
from kvpool.control.lending import Lending
cluster = kvpool.Cluster.join(url, lease=lease, heartbeat=0.05)
pool = big_pool(blocks, lease_s=link_lease)
attachment = pool.attach(cluster, name="victim")
lending = Lending(pool, cluster, **options)
None
"""
SETTLE = """
def settle_for_ever():
    while True:
        with contextlib.suppress(kvpool.Error):
            lending.settle()
        time.sleep(0.002)

threading.Thread(target=settle_for_ever, daemon=True).start()
attachment.instance
"""
LEND = """
seq = pool.sequence(pool.alloc(2 * owed))
pool.free(seq.offload(owed, to=creditor, medium=kvpool.HBM))
lending.watch(seq)
None
"""


class Member:
    """One of this process, with a sequence of which a part is lent."""

    def __init__(self, place, name, lease):
        self.name = name
        self.cluster = place.join(lease=lease, heartbeat=0.05)
        self.pool = big_pool(BLOCKS, lease_s=LINK_LEASE)
        self.attachment = self.pool.attach(self.cluster, name=name)
        self.lending = Lending(self.pool, self.cluster, **OPTIONS)

    def lend(self, creditor, number):
        addrs = self.pool.alloc(2 * OWED)
        stamp(self.pool, addrs, number)
        self.number, self.seq = number, self.pool.sequence(addrs)
        self.pool.free(self.seq.offload(OWED, to=creditor, medium=kvpool.HBM))
        self.lending.watch(self.seq)

    @property
    def owes(self):
        return int((self.seq.instances != 0).sum())

    @property
    def is_frozen(self):
        settling = self.lending._settling
        return any(settling._settler.frozen(creditor, settling._clock()) for creditor in self.lending.row.debts)

    def wrong(self):
        """Errors in the blocks that are home."""
        assert self.owes == 0
        return check(self.pool, self.seq.addrs, self.number)

    def close(self):
        self.lending.close()
        self.pool.close()


@pytest.fixture
def place():
    one = LocalPlace()
    yield one
    one.close()


@contextlib.contextmanager
def circle(place, nursery, coordinates, lease):
    """The first member owes the second, that the victim, and that the first, which alone has free blocks: two.

    `coordinates`: whether the victim is there first, so that its id is the smallest. `lease`: of all in the cluster.
    """
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(nursery.victim())
        join = {"url": place.url, "lease": lease, "link_lease": LINK_LEASE}
        if coordinates:
            victim(JOIN, **join, blocks=BLOCKS, options=OPTIONS)
        first, second = Member(place, "first", lease), Member(place, "second", lease)
        stack.callback(first.close)
        stack.callback(second.close)
        if not coordinates:
            victim(JOIN, **join, blocks=BLOCKS, options=OPTIONS)
        for each in (first, second):
            eventually(lambda each=each: len(each.cluster.members()) == 3)
        eventually(lambda: victim("len(cluster.members())") == 3)
        first.lend("second", 1)
        second.lend("victim", 2)
        victim(LEND, owed=OWED, creditor="first")
        first.filler = first.pool.alloc(first.pool.stats().hbm.free - 2)
        second.filler = second.pool.alloc(second.pool.stats().hbm.free)
        victim("filler = pool.alloc(pool.stats().hbm.free)\nNone")
        instance = victim(SETTLE)
        assert coordinates == (instance < min(first.attachment.instance, second.attachment.instance))
        yield victim, first, second


def turns(*members):
    for each in members:
        each.lending.settle()
    time.sleep(0.002)
    return [each.owes for each in members]


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_member_that_is_killed_in_the_middle_holds_nobody_up_and_costs_no_block(
    coordinates, place, near_nursery, request
):
    dice = random.Random(seed_of(request))
    for _ in range(KILLS):
        with circle(place, near_nursery, coordinates, CLUSTER_LEASE) as (victim, first, second):
            left = dice.randint(3, OWED - 1)  # a circle is left, even if a freeze has ended in a round
            eventually(lambda left=left, first=first, second=second: turns(first, second)[0] <= left)
            time.sleep(dice.choice([0.0, 0.01]) * dice.random())
            victim.kill()
            for each in (first, second):
                eventually(lambda each=each: each.lending.settle() == 0 and not each.is_frozen)
            first.pool.free(first.filler)  # now what it owes the other member comes home by itself
            eventually(lambda first=first: first.lending.payback() is not None and first.owes == 0)
            assert first.wrong() == []
            second.pool.free(second.filler)
            for each in (first, second):  # what the victim had is free, or in quarantine until it is
                addrs = each.seq.addrs[each.seq.instances == 0]
                each.seq.close()
                each.pool.free(addrs)
                eventually(lambda each=each: each.pool.audit().hbm.free == BLOCKS)


@pytest.mark.parametrize("coordinates", [True, False])
def test_a_member_that_is_stopped_in_the_middle_holds_nobody_up_for_longer_than_the_freeze(
    coordinates, place, near_nursery
):
    """Its leases outlive the freeze: nothing but time ends that. Then it wakes in the middle of what is over."""
    with circle(place, near_nursery, coordinates, LINK_LEASE) as (victim, first, second):
        eventually(lambda: turns(first, second)[0] <= OWED - 2)
        victim.stop()
        eventually(lambda: turns(first, second) and not (first.is_frozen or second.is_frozen))
        first.pool.free(first.filler)
        eventually(lambda: first.lending.payback() is not None and first.owes == 0)
        assert first.wrong() == []
        victim.wake()
        second.pool.free(second.filler)
        eventually(lambda: second.lending.payback() is not None and second.owes == 0)
        assert second.wrong() == []
        victim("pool.free(filler)\nNone")
        eventually(lambda: victim("lending.payback()\nint((seq.instances != 0).sum())") == 0)
        for each in (first, second):
            assert each.pool.audit().hbm.lent == 0
