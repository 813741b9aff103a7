"""Members lend, borrow, settle and pay back in a cluster that is made up, with rows that are late, doubled or lost."""

from __future__ import annotations

import os

import pytest
from policy.lending_cluster import Cluster

SEEDS = range(60) if os.environ.get("KVPOOL_LONG") else range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_and_caps_hold_and_all_debts_are_paid_in_the_end(seed):
    """The members check at every change that nobody has less than no memory or lends beyond its cap."""
    cluster = Cluster(seed)
    for _ in range(150):
        cluster.tick()
    assert cluster.loans > 20
    assert cluster.refusals > 0
    assert cluster.drain(60)


def test_cycles_arise_and_are_settled():
    settled = 0
    for seed in SEEDS:
        cluster = Cluster(seed)
        for _ in range(150):
            cluster.tick()
        settled += cluster.settled
    assert settled > 0
