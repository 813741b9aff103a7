"""How many GPUs decode a workload when KV caches are packed onto them, and what that moves: MELL and its baselines.

Here the number of GPUs follows the load, request by request and epoch by epoch (`kvpool.sim.packing`); requests decode
at one speed, and prefills are done elsewhere. Memory grows with the number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy import mell
from kvpool.sim.packing import Scheduler, demand, replay
from kvpool.sim.setup import Setup
from kvpool.sim.times import DecodeTimes
from kvpool.sim.workload import Arrival

__all__ = ["PACKERS", "pack"]

PACKERS: Final[Mapping[str, Callable[[int], Scheduler]]] = {
    "mell": mell.Mell,
    "best-fit": mell.BestFit,
    "worst-fit": mell.WorstFit,
    "load-balance": mell.LoadBalance,
}
_EPOCH_S: Final = 1.0
_TYPICAL: Final = 8  # requests of a batch at whose speed all decode


def pack(setup: Setup, packer: str) -> dict[str, Any]:
    """Packs a workload.

    Args:
        setup: Its workload, model and HBM; the number of GPUs follows the load.
        packer: A name of PACKERS.

    Returns:
        GPUs (mean, peak, and the lower bound of both), utilisation, moves and GB a second; ready for JSON.

    Raises:
        ArgumentError: An unknown packer, or a workload whose requests wait for answers.
    """
    if packer not in PACKERS:
        raise ArgumentError(f"no packer {packer!r}; there are {', '.join(PACKERS)}")
    arrivals = []
    for request in setup.make_workload().start():
        if request.then is not None:
            raise ArgumentError("requests of sessions wait for answers; packing takes a trace, poisson or power-law")
        arrivals.append(Arrival(request.time_s, request.prompt, request.output))
    model = setup.cost_model
    token_bytes = model.model.kv_bytes_per_token
    capacity = int(setup.hbm_gb_each * setup.tp * 1e9 / token_bytes)
    typical = sum(arrival.prompt + arrival.response for arrival in arrivals) // len(arrivals)
    step_s = DecodeTimes(model).run_s(1, _TYPICAL, _TYPICAL * typical)
    seconds = int(arrivals[-1].time_s / _EPOCH_S) + 1
    epochs, sizes, refused = demand(arrivals, capacity, 1 / step_s, _EPOCH_S, seconds)
    outcome = replay(epochs, PACKERS[packer](capacity))
    gpus = np.array(outcome.gpus)
    bound = np.array([mell.lower_bound(each.values(), capacity) for each in sizes])
    used = sum(sum(each.values()) for each in sizes)
    spent_s = seconds * _EPOCH_S
    return {
        "requests": {"arrived": len(arrivals), "refused": refused},
        "capacity_tokens": capacity,
        "step_s": step_s,
        "instances": {"mean": float(gpus.mean()), "peak": int(gpus.max())},
        "lower_bound": {"mean": float(bound.mean()), "peak": int(bound.max())},
        "gpus": {"mean": float(gpus.mean()) * setup.tp, "peak": int(gpus.max()) * setup.tp},
        "utilisation": used / max(1.0, float(capacity * gpus.sum())),
        "moves_per_s": sum(outcome.item_moves) / spent_s,
        "requests_moved_per_s": sum(outcome.request_moves) / spent_s,
        "moved_gb_per_s": sum(outcome.tokens_moved) * token_bytes / 1e9 / spent_s,
        "redispatched": sum(outcome.redispatched),
    }
