"""A fleet for the tests of routing: a clock by hand, a cost of one second a token, blocks of four."""

from __future__ import annotations

import numpy as np

from kvpool.policy import cost, routing

BLOCK = 4


class UnitModel:
    """exec(x, y): one second for each token that is not cached."""

    block_tokens = BLOCK
    parallel = cost.Parallel()

    def exec_s(self, tokens, cached=0):
        return float(tokens - min(cached, tokens - 1))

    def exec_many_s(self, tokens, cached):
        return (tokens - np.minimum(cached, tokens - 1)).astype(float)


class Curved(UnitModel):
    """Each token takes longer than the one before it, as with attention: (x^2 - y^2) milliseconds."""

    def exec_s(self, tokens, cached=0):
        cached = min(cached, tokens - 1)
        return (tokens * tokens - cached * cached) / 1000

    def exec_many_s(self, tokens, cached):
        cached = np.minimum(cached, tokens - 1)
        return (tokens * tokens - cached * cached) / 1000


def prompt(blocks, name=1, fork=None, fork_name=0):
    """`blocks` blocks that all say `name`; from block `fork` on, `fork_name`."""
    tokens = np.full(blocks * BLOCK, name, np.int32)
    if fork is not None:
        tokens[fork * BLOCK :] = fork_name
    return tokens


class Fleet:
    """A scheduler with instances 1 to n and a clock that stands still.

    It learns from responses alone, unless told otherwise: so instances hold what a test says, whatever is under way.
    """

    def __init__(self, n=3, kind=routing.Kind.COLOCATED, model=None, **options):
        self.now = 1000.0
        options.setdefault("learn_at", "response")
        options.setdefault("balance", routing.Balance(cap=float("inf"), warmup_s=0))
        self.scheduler = routing.GlobalScheduler(model or UnitModel(), lambda: self.now, **options)
        for instance in range(1, n + 1):
            self.scheduler.add_instance(instance, kind)

    def route(self, tokens, session=None):
        return self.scheduler.route(routing.Request(tokens, session))

    def serve(self, tokens, session=None, output=()):
        """Routes and finishes at once; returns the decision."""
        decision = self.route(tokens, session)
        self.scheduler.finished(decision.ticket, output)
        return decision

    def hold(self, instance, tokens, kind=routing.Kind.COLOCATED):
        self.scheduler.tree(kind).insert(tokens, instance)


def transfer(seconds_a_token, latency_s=0.0):
    link = cost.Link(bytes_per_s=1 / seconds_a_token, latency_s=latency_s)
    return cost.KVTransfer(link, bytes_per_token=1, block_tokens=BLOCK)
