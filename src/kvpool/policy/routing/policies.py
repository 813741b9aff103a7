"""The policies of MemServe, Table 6, and eq. 1: from what is known of the instances to the one that is chosen.

| policy         | keeps a session together | shares between sessions | minds load              |
|----------------|--------------------------|-------------------------|-------------------------|
| LeastLoad      | no                       | no                      | alone                   |
| SessionId      | yes                      | no                      | at a session's start    |
| LongestPrefix  | yes                      | yes                     | by the cap (§6)         |
| QueuePlusExec  | yes                      | yes                     | in what it minimises (eq. 1) |
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy.routing.load import Bools, Floats

__all__ = ["LeastLoad", "LongestPrefix", "Policy", "QueuePlusExec", "SessionId", "View"]

Ints = npt.NDArray[np.int64]


class View(NamedTuple):
    """What a policy sees: arrays with an entry for each instance.

    Attributes:
        ids: Instances.
        cached: Tokens of the prompt that each holds.
        backlog: Work before it is free; eq. 1's first term.
        exec_s: What the prompt takes there; eq. 1's second term.
        load: Backlog and what it did lately, for its share.
        open: Takes new requests.
        allowed: Open, and below the load cap. At least one is.
        session: Of the request.
    """

    ids: Ints
    cached: Ints
    backlog: Floats
    exec_s: Floats
    load: Floats
    open: Bools
    allowed: Bools
    session: str | None


class Policy(Protocol):
    """Chooses an instance."""

    def choose(self, view: View) -> int:
        """The place of the chosen one in the view's arrays."""


def _least(value: Floats, tie: Floats, among: Bools) -> int:
    """Where `value` is least; of equals, where `tie` is, or the first would get all that comes to an idle fleet."""
    masked = value if among.all() else np.where(among, value, np.inf)
    best = float(masked.min())
    equal = (masked <= best + 1e-12 * abs(best)).nonzero()[0]
    return int(equal[0] if len(equal) == 1 else equal[tie[equal].argmin()])


class LeastLoad:
    """The instance that is free first, whatever it holds."""

    def choose(self, view: View) -> int:
        """As Policy.choose."""
        return _least(view.backlog, view.load, view.allowed)


class LongestPrefix:
    """The instance below the load cap that holds the most of the prompt; of equals, the one that is free first (§6)."""

    def choose(self, view: View) -> int:
        """As Policy.choose."""
        return _least(-view.cached.astype(np.float64), view.backlog + 1e-6 * view.load, view.allowed)


class QueuePlusExec:
    """The instance below the load cap where the prompt is computed first: queueing plus execution (eq. 1).

    Args:
        thrift: Eq. 1 sees what a choice costs this prompt, not those behind it: it recomputes what is cached elsewhere
            as soon as that ends a moment earlier. Each second of execution counts as 1 + thrift; 0 is the paper's.
    """

    def __init__(self, thrift: float = 0.0) -> None:
        if not thrift >= 0:
            raise ArgumentError(f"thrift is {thrift}; it must be at least 0")
        self._weight = 1.0 + thrift

    def choose(self, view: View) -> int:
        """As Policy.choose."""
        return _least(view.backlog + self._weight * view.exec_s, view.load, view.allowed)


class SessionId:
    """All requests of a session to one instance, as long as it is open.

    Args:
        first: Where a session begins: "least-load", or "hash", which several routers answer alike without talking, and
            which moves only the sessions of an instance that leaves.
        sessions_max: Sessions that are remembered; the longest unused is forgotten first. "hash" remembers none.
    """

    def __init__(self, first: Literal["least-load", "hash"] = "least-load", sessions_max: int = 1_000_000) -> None:
        if first not in ("least-load", "hash") or sessions_max < 1:
            raise ArgumentError(
                f"first {first!r} must be 'least-load' or 'hash', sessions_max {sessions_max} at least 1"
            )
        self._first = first
        self._sessions_max = sessions_max
        self._home: OrderedDict[str, int] = OrderedDict()

    def choose(self, view: View) -> int:
        """As Policy.choose."""
        if view.session is None:
            return LeastLoad().choose(view)
        if self._first == "hash":
            return _highest_hash(view.session, view.ids, view.open)
        home = self._home.get(view.session, -1)
        places = np.flatnonzero((view.ids == home) & view.open)
        place = int(places[0]) if len(places) else LeastLoad().choose(view)
        self._home[view.session] = int(view.ids[place])
        self._home.move_to_end(view.session)
        if len(self._home) > self._sessions_max:
            self._home.popitem(last=False)
        return place


def _highest_hash(session: str, ids: Ints, among: Bools) -> int:
    """Rendezvous hashing: each instance's hash of the session, and the highest wins."""
    seed = int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "little")
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return int(np.where(among, mixed >> np.uint64(1), np.uint64(0)).argmax())
