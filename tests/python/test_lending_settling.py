"""Pools of a cluster that owe each other blocks in a circle: these come home, and attention keeps its bits."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from attach_kit import eventually, url
from test_lending import attention, filled, knows, members, owners

import kvpool

__all__ = ["url"]

BLOCKS = 24


@contextlib.contextmanager
def ring(url, **options):
    """Each of three members owes the next two leaves; the first has room for one, and the others have none."""
    with members(url, *[BLOCKS] * 3, settle_min=1, settle_blocks=4, **options) as made:
        sequences = [filled(pool, 14 + number) for number, (pool, _) in enumerate(made)]
        before = [attention(pool, seq) for (pool, _), seq in zip(made, sequences, strict=True)]
        for number, ((pool, lending), seq) in enumerate(zip(made, sequences, strict=True)):
            pool.free(seq.offload(8, to=f"m{(number + 1) % 3}"))
            lending.watch(seq)
            lending._settling._settler._coordinator._freeze_s = 60.0  # not cut in a round because the machine is busy
        for number, (pool, _) in enumerate(made):
            pool.alloc(pool.stats().dram.free - (4 if number == 0 else 0), kvpool.DRAM)
        eventually(lambda: all(knows(lending, 3) and len(lending._members.ledger.debts()) == 3 for _, lending in made))
        yield SimpleNamespace(made=made, sequences=sequences, before=before)


def lent(each):
    return [pool.stats().dram.lent for pool, _ in each.made if not pool.closed]


def frozen(each):
    return [
        lending._settling._settler.frozen(creditor, lending._settling._clock())
        for pool, lending in each.made
        if not (pool.closed or lending.closed)
        for creditor in lending.row.debts
    ]


def has_same_bits(each, numbers=(0, 1, 2)):
    for number in numbers:
        pool, seq = each.made[number][0], each.sequences[number]
        assert np.array_equal(attention(pool, seq), each.before[number])


def turns(each):
    """One of each member; how many blocks each lends then."""
    for _, lending in each.made:
        with contextlib.suppress(kvpool.ClosedError):
            lending.settle()
    return lent(each)


def test_debts_in_a_circle_come_home_with_the_same_bits(url):
    """Each member settles in a thread, while attention is computed."""
    with ring(url) as each:
        assert lent(each) == [8, 8, 8]
        has_same_bits(each)
        failures, stop = [], threading.Event()

        def settle(lending):
            try:
                while not stop.wait(0.02):
                    lending.settle()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=settle, args=(lending,)) for _, lending in each.made]
        for thread in threads:
            thread.start()
        try:

            def is_home():
                has_same_bits(each)
                return failures or lent(each) == [0, 0, 0]

            eventually(is_home)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert lent(each) == [0, 0, 0]
        has_same_bits(each)
        for (pool, _), seq in zip(each.made, each.sequences, strict=True):
            assert owners(seq) == {pool._attachment.instance}
        eventually(lambda: [pool.stats().dram.free for pool, _ in each.made] == [4, 0, 0])


@pytest.mark.parametrize("number", [0, 1])  # the coordinator, if it has the smallest id, or another
def test_a_member_that_ends_in_the_middle_costs_only_what_it_had(url, number):
    with ring(url) as each:
        eventually(lambda: sum(turns(each)) <= 20)
        gone, its_lending = each.made[number]
        its_lending.close()
        gone.close()
        others = [other for other in range(3) if other != number]
        eventually(lambda: all(knows(each.made[other][1], 2) for other in others))
        turns(each)
        assert not any(frozen(each))
        debtor, creditor = (number + 2) % 3, (number + 1) % 3  # of the one that is gone, and to it
        has_same_bits(each, [creditor])  # its blocks lie with the debtor
        if gone._attachment.instance in owners(each.sequences[debtor]):
            with pytest.raises((kvpool.PeerLost, kvpool.StaleAddress)):
                attention(each.made[debtor][0], each.sequences[debtor])
        eventually(lambda: each.made[creditor][0].stats().dram.lent == 0)  # what it had borrowed is free again


def test_one_that_lends_no_more_ends_the_settlement_and_nothing_is_lost(url):
    with ring(url) as each:
        eventually(lambda: sum(turns(each)) <= 20)
        each.made[1][1].close()
        eventually(lambda: turns(each) and not any(frozen(each)))
        has_same_bits(each)
        owed = lent(each)
        for _, lending in (each.made[0], each.made[2]):
            assert lending.payback() <= 4
        has_same_bits(each)
        assert sum(lent(each)) <= sum(owed)
