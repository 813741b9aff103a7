"""A model whose times can be followed by hand, and small fleets of it."""

from __future__ import annotations

import numpy as np

from kvpool.policy import cost
from kvpool.sim.lending_engine import Batching
from kvpool.sim.lending_fleet import LendingFleet, Machines
from kvpool.sim.lending_market import Rules
from kvpool.sim.lending_times import StepTimes
from kvpool.sim.workload import Arrival

# Two layers. Without attention a step takes 1.25 s, and 0.25 s for each sequence after the first; in each layer a token
# that is read takes 1 s, and a pair of query and token of a prompt 2 s.
SHAPE = cost.ModelShape(layers=2, hidden=4, heads=2, kv_heads=2, ffn=8, vocab=10)
WAVES = cost.WaveModel(1, 1, 1, flops_per_s=float("inf"), weight_bytes_per_s=float("inf"), call_s=0.125)
MODEL = cost.CostModel(SHAPE, cost.Fits(WAVES, {"attention": (2, 1, 1, 0, 0), "lm_head": (0.25, 0)}), block_tokens=4)
FAST = cost.Link(1e12, latency_s=1.0)  # a second each way, and nothing for the bytes


def times(scale=1.0):
    """Steps; attention takes `scale` times as long."""
    linear = {"attention": (2 * scale, scale, scale, 0, 0), "lm_head": (0.25, 0)}
    return StepTimes(cost.CostModel(SHAPE, cost.Fits(WAVES, linear), block_tokens=4))


def machines(engines, blocks, scale=1.0):
    """All on one machine."""
    return Machines(engines, times(scale), blocks, FAST, FAST, per_host=engines)


def fleet(engines, blocks, rules=None, scale=1e-3, chunk=16, share=0.5, **settings):
    """Blocks of four tokens; a creditor computes for others for this share of its time."""
    batching = Batching(4, chunk, compute_share=share)
    return LendingFleet(machines(engines, blocks, scale), batching, rules, heartbeat_s=5.0, **settings)


def rules(**settings):
    """Leaves of two blocks."""
    return Rules(**{"leaf": 2, "chunk": 1, "settle_every": 2, "settle_least": 1, **settings})


def mixed(seed, count=60, longest=400, rate=0.5):
    """Short requests and a few long ones, as they arrive."""
    rng = np.random.default_rng(seed)
    long = rng.random(count) < 0.1
    prompts = np.where(long, rng.integers(longest // 2, longest, count), rng.integers(1, 40, count))
    answers = rng.integers(1, 60, count)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [Arrival(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, answers, strict=True)]
