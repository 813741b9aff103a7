"""Many models on the same GPUs and in one space of memory (MuxServe): quotas, a scheduler, and placement.

    hbm = multiplexing.Tier(capacity, {"a": multiplexing.QuotaRule(reserve=1000), "b": multiplexing.QuotaRule()})
    quotas = multiplexing.first_quotas(hbm.capacity, hbm.rules, {"a": multiplexing.demand(2.0, 500, 8), "b": 9000.0})
    room = multiplexing.reclaim(hbm, "a", units=64)         # free units and evictions, or OutOfQuota

    QuotaRule, Use, Tier        reserve, limit and weight; what a model occupies; all models of one medium
    demand, targets             units that a model needs, and weighted water-filling within reserves and limits
    admit, reclaim              whether a model may grow, and whose historical units make room
    Quotas, first_quotas, adapt quotas that follow moving averages of use and backlog
    fairness                    eq. 2, over backlogged models
    ADBS, and others            step(state) -> [Job(model, phase, requests, share)]
    State, ModelQueues, Waiting what they see; `started` is the state after a step
    misfits                     prompts that an engine should refuse: no scheduler can start them
    preemption                  whose request an engine should stop when nothing can go on
    ServedModel, Machines       models with their workloads, and the GPUs; `place` and `candidates` are Alg. 1 and 2
    spatial, by_rate, together  placements to compare with: each by itself, the paper's greedy one, all on one mesh
    CostTiming, FittedTiming    t(share, batch, length), from a cost model or from measurements

Everything here is pure: data in, plans out. docs/internals/multiplexing.md says where the paper is mended.
"""

from kvpool.policy.multiplexing.adbs import ADBS, preemption
from kvpool.policy.multiplexing.baselines import FCFS, RoundRobin, Temporal
from kvpool.policy.multiplexing.divisions import by_rate, spatial, together
from kvpool.policy.multiplexing.estimate import (
    BATCH_MAX,
    SHARES,
    Candidate,
    Machines,
    ServedModel,
    Unit,
    candidates,
    estimate_unit,
)
from kvpool.policy.multiplexing.jobs import Job, ModelQueues, Phase, State, Turns, Waiting, misfits, started
from kvpool.policy.multiplexing.placement import exhaustive, mesh_groups, place
from kvpool.policy.multiplexing.search import Placed, PlacedUnit, Placement
from kvpool.policy.multiplexing.timing import BANDWIDTH_SHARE, CostTiming, FittedTiming, StepFit, StepSample, Timing
from kvpool.policy.quotas import (
    EPSILON,
    Adaptation,
    Eviction,
    Fairness,
    QuotaRule,
    Quotas,
    Room,
    Seen,
    Tier,
    Trend,
    Use,
    adapt,
    admit,
    demand,
    fairness,
    first_quotas,
    level_fill,
    reclaim,
    targets,
)

__all__ = [
    "ADBS",
    "BANDWIDTH_SHARE",
    "BATCH_MAX",
    "EPSILON",
    "FCFS",
    "SHARES",
    "Adaptation",
    "Candidate",
    "CostTiming",
    "Eviction",
    "Fairness",
    "FittedTiming",
    "Job",
    "Machines",
    "ModelQueues",
    "Phase",
    "Placed",
    "PlacedUnit",
    "Placement",
    "QuotaRule",
    "Quotas",
    "Room",
    "RoundRobin",
    "Seen",
    "ServedModel",
    "State",
    "StepFit",
    "StepSample",
    "Temporal",
    "Tier",
    "Timing",
    "Trend",
    "Turns",
    "Unit",
    "Use",
    "Waiting",
    "adapt",
    "admit",
    "by_rate",
    "candidates",
    "demand",
    "estimate_unit",
    "exhaustive",
    "fairness",
    "first_quotas",
    "level_fill",
    "mesh_groups",
    "misfits",
    "place",
    "preemption",
    "reclaim",
    "spatial",
    "started",
    "targets",
    "together",
]
