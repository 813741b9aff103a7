"""Shared by the tests of the simulated cluster: small clusters, prompts, and one whose tokens are watched."""

from __future__ import annotations

import numpy as np
from policy.kit import made_model

from kvpool.policy import routing
from kvpool.sim.cluster import Cluster, ClusterSim
from kvpool.sim.instance import Batching
from kvpool.sim.requests import SimRequest
from kvpool.sim.times import DecodeTimes

UNIT = 16
MODEL = made_model()
DECODE = DecodeTimes(MODEL)
ONE_BY_ONE = Batching(batch_tokens=0, chunked=False)


def cluster(**changes):
    options = {"policy": routing.LeastLoad, "colocated": 1, "hbm_blocks": 100_000, "batching": ONE_BY_ONE}
    return Cluster(MODEL, UNIT, **{**options, **changes})


def simulated(requests, **changes):
    return ClusterSim(cluster(**changes)).run(requests)


def request(time_s, name, blocks, output=1, **fields):
    """A prompt of full blocks, that differs from those of other names from the first one on."""
    ids = np.arange(1000 * name, 1000 * name + blocks, dtype=np.int32)
    return SimRequest(time_s, ids, UNIT * blocks, output, **fields)


class Watched(ClusterSim):
    """Keeps, for a test, what the simulator drops: the times of each request's first and last token."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.first, self.last, self.hits = {}, {}, {}

    def _first_token(self, job):
        self.first[job.number] = self._loop.now
        self.hits[job.number] = job.held.cached
        return super()._first_token(job)

    def _ended(self, job):
        self.last[job.number] = self._loop.now
        super()._ended(job)
