"""The router: HTTP in front of OpenAI-compatible instances, routed by the global scheduler (MemServe §6).

    server      two listeners, signals, the end
    app         the endpoints, of the public and of the operator
    forward     an endpoint: takes a request in, and notes how it ended
    forwarding  one request: choose, send, retry, relay; two where prefill and decode are apart
    intake      a request's body: held and read, or passed on as a stream    <- body, budget, exchange
    prompts     reads bodies; long ones in processes (kvpool.control.reading)
    fleet       the instances, their limits, the scheduler's input           <- health, upstream
    following   what instances have cached, by their KV events
    tokenizing  asks instances for the model's tokens of prompts
    adapters    which models of requests are LoRA adapters
    ranks       data-parallel ranks of a server as instances
    lease       what a request holds at instances and at the scheduler
    members     a cluster's members as instances
    probing     polls the instances' health, on a separate thread and loop
    events      where a stream of events may be cut
    settings    costs   errors   metrics   logs

Needs the extra `kvpool[router]`. One event loop owns everything but the probing
and the feeding of the trees by events, so nothing else here is thread-safe.
"""

from kvpool.control.router.app import admin_app, public_app
from kvpool.control.router.ranks import by_rank
from kvpool.control.router.server import serve
from kvpool.control.router.service import Router
from kvpool.control.router.settings import ClusterSettings, EventsSpec, HealthSettings, InstanceSpec, RouterSettings

__all__ = [
    "ClusterSettings",
    "EventsSpec",
    "HealthSettings",
    "InstanceSpec",
    "Router",
    "RouterSettings",
    "admin_app",
    "by_rank",
    "public_app",
    "serve",
]
