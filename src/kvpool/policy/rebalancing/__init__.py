"""One plan of all instances for each epoch: which requests move, where new ones begin, which instances start and end.

    states                                      what each instance says: InstanceState
    Planner(...).plan(states, number, planner)  -> EpochPlan, the same at every instance that has the same states
    Beats.planner(others, now)                  who plans
    PlanBook.accept(plan, planner)              each plan at most once, none of an old epoch or of a planner replaced
    duties_of(plan, instance, ...)              what one instance does of it

Pure: data in, plans out; kvpool.control.rebalancing publishes and carries out. Section IV of the MELL paper has the
epochs, section V the two ways and their boundaries.
"""

from kvpool.policy.rebalancing.beats import Beats
from kvpool.policy.rebalancing.fields import NAME_BYTES_MAX
from kvpool.policy.rebalancing.picture import Picture, picture_of
from kvpool.policy.rebalancing.plan import NO_PLAN, EpochPlan, Placement, PlannedMove, PlanNumber, plan_from, plan_json
from kvpool.policy.rebalancing.planner import UNBOUNDED, Planner
from kvpool.policy.rebalancing.schedulers import SCHEDULERS, PolicyName, Scheduler
from kvpool.policy.rebalancing.states import InstanceState, RunningRequest, WaitingRequest, state_from, state_json
from kvpool.policy.rebalancing.turns import Duties, PlanBook, duties_of, planner_of

__all__ = [
    "NAME_BYTES_MAX",
    "NO_PLAN",
    "SCHEDULERS",
    "UNBOUNDED",
    "Beats",
    "Duties",
    "EpochPlan",
    "InstanceState",
    "Picture",
    "Placement",
    "PlanBook",
    "PlanNumber",
    "PlannedMove",
    "Planner",
    "PolicyName",
    "RunningRequest",
    "Scheduler",
    "WaitingRequest",
    "duties_of",
    "picture_of",
    "plan_from",
    "plan_json",
    "planner_of",
    "state_from",
    "state_json",
]
