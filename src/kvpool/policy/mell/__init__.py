"""MELL: requests, whose KV caches grow, on as few GPUs as possible, with few migrations (the paper's §V and §VI).

    scheduler = mell.Mell(capacity=14_648)                  # tokens of KV cache on each GPU
    plan = scheduler.batch(departures=[7], growths=[(3, 912)], arrivals=[(9, 700)])
    plan.moves, plan.placed, plan.activated, plan.terminated

    Mell            the scheduler: allocate, depart, grow, and batches of them
    ClusterMonitor  epochs: turns reports of instances into batches
    divide          which moves go as KV cache, which as tokens, and which wait (adaptive migration)
    Backlog         the moves that wait, from one epoch to the next, until they are made
    BoundaryProfile the spare capacity of links and instances, as measured by control.profile_boundaries
    BestFit, WorstFit, LoadBalance      the baselines of the paper
    lower_bound, promised               how few GPUs could suffice, and how many more Mell may use

Everything here is pure: data in, plans out. docs/internals/mell.md says how the algorithm completes the printed one.
"""

from kvpool.policy.mell.backlog import Backlog
from kvpool.policy.mell.baselines import BestFit, LoadBalance, Overflow, WorstFit
from kvpool.policy.mell.boundaries import Boundaries, ComputeProfile, Link
from kvpool.policy.mell.bounds import lower_bound, promised
from kvpool.policy.mell.classes import Class, class_of
from kvpool.policy.mell.epochs import ClusterMonitor
from kvpool.policy.mell.measured import BoundaryProfile, IterationSample, LinkSample
from kvpool.policy.mell.migration import Division, Fit, Part, Way, divide
from kvpool.policy.mell.plan import Move, Place, Plan, RequestId
from kvpool.policy.mell.scheduler import Mell
from kvpool.policy.mell.settings import MOVES_AN_OPERATION, Settings, Weights

__all__ = [
    "MOVES_AN_OPERATION",
    "Backlog",
    "BestFit",
    "Boundaries",
    "BoundaryProfile",
    "Class",
    "ClusterMonitor",
    "ComputeProfile",
    "Division",
    "Fit",
    "IterationSample",
    "Link",
    "LinkSample",
    "LoadBalance",
    "Mell",
    "Move",
    "Overflow",
    "Part",
    "Place",
    "Plan",
    "RequestId",
    "Settings",
    "Way",
    "Weights",
    "WorstFit",
    "class_of",
    "divide",
    "lower_bound",
    "promised",
]
