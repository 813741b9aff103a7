"""The global scheduler: prompt trees, policies, and where a request goes (MemServe §6).

transfer = cost.KVTransfer(link, shape.kv_bytes_per_token)
scheduler = routing.GlobalScheduler(model, clock=time.monotonic, transfer=transfer)
scheduler.add_instance(1)
decision = scheduler.route(routing.Request(tokens))
...                                           # send it to decision.instance
scheduler.first_token(decision.ticket)
scheduler.finished(decision.ticket, output)
"""

from kvpool.policy.routing.balance import Balance
from kvpool.policy.routing.fetching import TransferModel
from kvpool.policy.routing.keeping import KeepHits
from kvpool.policy.routing.policies import (
    Asked,
    LeastLoad,
    LongestPrefix,
    Policy,
    QueuePlusExec,
    Ranking,
    SessionId,
    View,
)
from kvpool.policy.routing.scheduler import GlobalScheduler
from kvpool.policy.routing.tree import PromptTree
from kvpool.policy.routing.types import Decision, Fetch, Holder, Kind, Request

__all__ = [
    "Asked",
    "Balance",
    "Decision",
    "Fetch",
    "GlobalScheduler",
    "Holder",
    "KeepHits",
    "Kind",
    "LeastLoad",
    "LongestPrefix",
    "Policy",
    "PromptTree",
    "QueuePlusExec",
    "Ranking",
    "Request",
    "SessionId",
    "TransferModel",
    "View",
]
