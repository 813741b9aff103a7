"""How many GPUs decode a workload when KV caches are packed onto them, and how much migrates: MELL and its baselines.

Here the number of GPUs follows the load, request by request and epoch by epoch (`kvpool.sim.packing`); requests decode
at one speed, and prefills are done elsewhere. Memory grows with the number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy import mell
from kvpool.sim.packing import Epoch, Scheduler, demand, replay
from kvpool.sim.setup import Setup
from kvpool.sim.times import DecodeTimes
from kvpool.sim.workload import Arrival

__all__ = ["PACKERS", "pack"]

_BASELINES: Final[Mapping[str, Callable[[int], Scheduler]]] = {
    "best-fit": mell.BestFit,
    "worst-fit": mell.WorstFit,
    "load-balance": mell.LoadBalance,
}
PACKERS: Final = ("mell", *_BASELINES)
_EPOCH_S: Final = 1.0
_SLACK_MAX: Final = 0.25
_TYPICAL: Final = 8  # all requests decode at the speed of a batch of this many
_POINTS: Final = 200  # of GPUs over time, at most


def pack(
    setup: Setup, packer: str, told: Callable[[int, float], None] | None = None, slack: float | None = None
) -> dict[str, Any]:
    """Packs a workload.

    Args:
        setup: Only its workload, `skip`, model, `tp` and HBM matter, because the number of GPUs follows the load.
            Figures begin with the epoch in which the first request that is not skipped arrives.
        packer: A name of PACKERS.
        told: Called after each epoch with how many requests have ended and the virtual time.
        slack: The part of a GPU's KV that MELL leaves free for growth, 0 to 0.25; None: its own, 1/40.

    Returns:
        GPUs (mean, peak, and the lower bound of both), utilisation, moves and GB a second; and GPUs over time, from the
        start, in parts of equal length; ready for JSON.

    Raises:
        ArgumentError: An unknown packer, a slack out of range or of another packer, a workload whose requests wait for
            answers, or all of it is skipped.
    """
    if packer not in PACKERS:
        raise ArgumentError(f"no packer {packer!r}; there are {', '.join(PACKERS)}")
    if slack is not None and (packer != "mell" or not 0 <= slack <= _SLACK_MAX):
        raise ArgumentError(f"slack is {slack:g}, for {packer}; it is MELL's, from 0 to {_SLACK_MAX} of a GPU's KV")
    arrivals = []
    for request in setup.make_workload().start():
        if request.then is not None:
            raise ArgumentError("requests of sessions wait for answers; packing takes a trace, poisson or power-law")
        arrivals.append(Arrival(request.time_s, request.prompt, request.output))
    setup.check_skip(len(arrivals))
    model = setup.cost_model
    token_bytes = model.model.kv_bytes_per_token
    capacity = int(setup.hbm_gb_each * setup.tp * 1e9 / token_bytes)
    typical = sum(arrival.prompt + arrival.response for arrival in arrivals) // len(arrivals)
    step_s = DecodeTimes(model).run_s(1, _TYPICAL, _TYPICAL * typical)
    seconds = int(arrivals[-1].time_s / _EPOCH_S) + 1
    epochs, sizes, refused = demand(arrivals, capacity, 1 / step_s, _EPOCH_S, seconds)
    outcome = replay(epochs, _scheduler(packer, capacity, slack), watch=None if told is None else _watching(told))
    first = int(arrivals[setup.skip].time_s / _EPOCH_S)
    all_gpus = np.array(outcome.gpus)
    all_bound = np.array([mell.lower_bound(each.values(), capacity) for each in sizes])
    gpus, bound = all_gpus[first:], all_bound[first:]
    used = sum(sum(each.values()) for each in sizes[first:])
    spent_s = (seconds - first) * _EPOCH_S
    return {
        "requests": {"arrived": len(arrivals), "refused": refused},
        "measured_from_s": first * _EPOCH_S,
        "capacity_tokens": capacity,
        "step_s": step_s,
        "instances": {"mean": float(gpus.mean()), "peak": int(gpus.max())},
        "lower_bound": {"mean": float(bound.mean()), "peak": int(bound.max())},
        "gpus": {"mean": float(gpus.mean()) * setup.tp, "peak": int(gpus.max()) * setup.tp},
        "utilisation": used / max(1.0, float(capacity * gpus.sum())),
        "moves_per_s": sum(outcome.item_moves[first:]) / spent_s,
        "requests_moved_per_s": sum(outcome.request_moves[first:]) / spent_s,
        "moved_gb_per_s": sum(outcome.tokens_moved[first:]) * token_bytes / 1e9 / spent_s,
        "redispatched": sum(outcome.redispatched[first:]),
        "gpus_over_time": _over_time(setup.tp * all_gpus, setup.tp * all_bound),
    }


def _scheduler(packer: str, capacity: int, slack: float | None) -> Scheduler:
    if packer != "mell":
        return _BASELINES[packer](capacity)
    return mell.Mell(capacity, mell.Settings(slack=None if slack is None else int(slack * capacity)))


def _watching(told: Callable[[int, float], None]) -> Callable[[Epoch, mell.Plan], None]:
    """Reports the progress after each epoch."""
    ended, now_s = 0, 0.0

    def watch(epoch: Epoch, _: mell.Plan) -> None:
        nonlocal ended, now_s
        ended, now_s = ended + len(epoch.departures), now_s + _EPOCH_S
        told(ended, now_s)

    return watch


def _over_time(gpus: npt.NDArray[np.int64], bound: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Means and peaks over as many epochs each as leaves few enough points; the last one may be of fewer."""
    epochs = -(-len(gpus) // _POINTS)
    starts = np.arange(0, len(gpus), epochs)
    counts = np.diff(np.append(starts, len(gpus)))
    return {
        "step_s": epochs * _EPOCH_S,
        "mean": (np.add.reduceat(gpus, starts) / counts).tolist(),
        "peak": np.maximum.reduceat(gpus, starts).tolist(),
        "lower_bound": (np.add.reduceat(bound, starts) / counts).tolist(),
    }
