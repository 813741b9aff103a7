"""How several models share one memory: reserves, limits, quotas that follow what the models need, and who makes room.

Apart from `kvpool.policy.multiplexing`, which also offers these names, because a `Space` needs neither its schedulers
and placement nor their cost model. Everything here is pure: data in, plans out. docs/internals/multiplexing.md
"""

from kvpool.policy.quotas.adapting import (
    EPSILON,
    Adaptation,
    Fairness,
    Quotas,
    Seen,
    Trend,
    adapt,
    demand,
    fairness,
    first_quotas,
)
from kvpool.policy.quotas.admission import Eviction, Room, admit, reclaim
from kvpool.policy.quotas.filling import level_fill, targets
from kvpool.policy.quotas.tier import QuotaRule, Tier, Use

__all__ = [
    "EPSILON",
    "Adaptation",
    "Eviction",
    "Fairness",
    "QuotaRule",
    "Quotas",
    "Room",
    "Seen",
    "Tier",
    "Trend",
    "Use",
    "adapt",
    "admit",
    "demand",
    "fairness",
    "first_quotas",
    "level_fill",
    "reclaim",
    "targets",
]
