"""The default policy: eq. 1, and what a copy of a prefix costs later requests.

Eq. 1 of MemServe chooses the instance where this prompt is computed first. As soon as waiting takes a moment longer it
computes a prefix again that another instance holds. That costs the requests behind it the same time, and the copy
evicts blocks that would have been hit. So a busy fleet under eq. 1 holds the same prefixes many times over and others
not at all. This policy charges for the copy:

    backlog + execution + thrift * (execution of what another instance holds and this one lacks) * (1 - popularity)

A prefix that many prompts begin with has to be on several instances anyway: one alone could not serve all of them. A
copy of it is used again, so nothing is charged for it. Popularity is 1 when as many requests begin with the prefix as
one instance gets.

The wait is bounded: longer than 1 + thrift times what computing the prefix again takes, a request waits for no
instance while a less loaded one would begin sooner.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any, Final

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.routing.policies import Asked, Ranking
from kvpool.policy.routing.uses import Uses

__all__ = ["KeepHits"]

_THRIFT: Final = 7.0
_POPULAR: Final = 1.0  # in shares of the requests that an instance has
_FEWEST: Final = 2  # uses, below which nothing is popular: at the start every share is large
_WINDOW: Final = 64  # requests for each instance, over which uses are counted
_WINDOW_MOST: Final = 8192


class KeepHits(Ranking):
    """The instance below the load cap with the least queueing and execution, and the least charge for copies.

    One object is for one scheduler, since it counts how often prefixes are asked for.

    Args:
        thrift: How much a second counts that is spent on computing what another instance holds; 0 makes it eq. 1.
            Larger values keep more hits, and requests wait longer for them.

    Attributes:
        patience: 1 + thrift, see `Balance.patience`.
    """

    remembers = True

    def __init__(self, thrift: float = _THRIFT) -> None:
        if not thrift >= 0:
            raise ArgumentError(f"thrift is {thrift}; it must be at least 0")
        self.patience = 1.0 + thrift
        self._thrift = thrift
        self._uses = Uses()
        self._lengths = [0]  # rising
        self._charges = [0.0]  # of an instance that holds each; in between, the charge falls evenly
        self._known: dict[int, float] = {}

    def asked(self, asked: Asked) -> None:
        """As Ranking.asked: computes what lacking a part of the prompt costs."""
        window = min(_WINDOW * asked.instances, _WINDOW_MOST)
        counted = self._uses.note(asked.tokens, asked.held, asked.block_tokens, asked.namespace, window)
        self._known = {}
        self._lengths, self._charges = [0], [0.0]
        if not counted:
            return
        popular = max(_POPULAR * self._uses.requests / asked.instances, _FEWEST)
        token_s = self._thrift * max(0.0, asked.uncached_s - asked.cached_s) / asked.held
        parts, start = [], 0
        for end, uses in counted:
            parts.append(token_s * (end - start) * (1.0 - uses / popular) if uses < popular else 0.0)
            self._lengths.append(end)
            start = end
        self._charges = [*accumulate(reversed(parts), initial=0.0)][::-1]

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """As Ranking.rank."""
        if isinstance(cached, np.ndarray):
            charges = np.array([self._charge(each) for each in cached.tolist()])
            return backlog + exec_s + charges, load
        return backlog + exec_s + self._charge(cached), load

    def _charge(self, cached: int) -> float:
        """What an instance that holds so much is charged for the copy of the rest."""
        charge = self._known.get(cached)
        if charge is None:
            charge = self._known[cached] = self._interpolated(cached)
        return charge

    def _interpolated(self, cached: int) -> float:
        lengths, charges = self._lengths, self._charges
        at = bisect_right(lengths, cached)
        if at == len(lengths):
            return charges[-1]
        start, end = lengths[at - 1], lengths[at]
        return charges[at - 1] + (charges[at] - charges[at - 1]) * ((cached - start) / (end - start))
