"""The default policy: eq. 1, and what a copy of a prefix costs later requests.

Eq. 1 of MemServe chooses the instance where this prompt is computed first. As soon as waiting takes a moment longer it
computes a prefix again that another instance holds. That costs the requests behind it the same time, and the copy
evicts blocks that would have been hit. So a busy fleet under eq. 1 holds the same prefixes many times over and others
not at all. This policy charges for the copy:

    backlog + execution + thrift * (execution of what another instance holds and this one lacks) * (1 - popularity)

A prefix that many prompts begin with has to be on several instances anyway: one alone could not serve all of them. A
copy of it is used again, so nothing is charged for it. Popularity is 1 when as many requests begin with the prefix as
one instance gets.

A part that an instance could fetch is charged by the time of fetching it, if that is shorter (eq. 2).

The wait is bounded. Of the instances below the load cap, a request goes to none where it begins later than at another
one by more than 1 + thrift times what computing there takes longer. These times are the cost model's for each part of
the prompt, since the end of a long prompt takes longer than its beginning; those of the charge are the fleet's.
"""

from __future__ import annotations

from math import inf
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
            Larger values keep more hits, and requests wait longer for them. Finite.

    Attributes:
        patience: 1 + thrift, see `Balance.patience`.
    """

    remembers = True

    def __init__(self, thrift: float = _THRIFT) -> None:
        if not 0 <= thrift < inf:
            raise ArgumentError(f"thrift is {thrift}; it must be at least 0, and finite")
        self.patience = 1.0 + thrift
        self._thrift = thrift
        self._uses = Uses()
        self._asked: Asked | None = None
        self._parts: list[tuple[int, float]] = []  # where each begins, and the weight of its time; the last one first
        self._known: dict[int, float] = {}

    def asked(self, asked: Asked) -> None:
        """As Ranking.asked: weighs the parts of the prompt."""
        counted = self._uses.look_up(asked.tokens, asked.held, asked.block_tokens, asked.namespace, asked.again)
        self._asked, self._known = asked, {}
        requests = self._uses.requests + (not asked.again)
        popular = max(_POPULAR * requests / asked.instances, _FEWEST)
        parts, start, last = [], 0, -1.0
        for end, uses in counted:
            weight = self._thrift * (1.0 - uses / popular) if uses < popular else 0.0
            if weight != last:  # else it is one part with the one before: each part is a time to predict
                parts.append((start, weight))
            start, last = end, weight
        self._parts = parts[::-1]

    def placed(self, asked: Asked) -> None:
        """As Ranking.placed: counts the prompt among the uses of its prefixes."""
        if not asked.again:
            self._uses.note(min(_WINDOW * asked.instances, _WINDOW_MOST))

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
            charge = self._known[cached] = self._computed(cached)
        return charge

    def _computed(self, cached: int) -> float:
        asked = self._asked
        if asked is None or cached >= asked.held:
            return 0.0
        exec_s, fetch_s, held = asked.exec_s, asked.transfer_s, asked.held
        charge, end, later_s = 0.0, held, 0.0
        for first, weight in self._parts:
            start = first if first > cached else cached
            part_s = exec_s(start) - exec_s(end) if weight else 0.0
            if fetch_s is not None:
                fetched_s = fetch_s(held - start)
                part_s, later_s = min(part_s, fetched_s - later_s), fetched_s
            if part_s > 0.0:
                charge += weight * part_s
            if start == cached:
                break
            end = start
        return charge
