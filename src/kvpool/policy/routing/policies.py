"""The policies of MemServe, Table 6, and eq. 1: they choose an instance from a view of all.

None of them leaves an instance idle while a request waits longer than computing its prefix again would take
(`kvpool.policy.routing.choosing`).

A policy chooses from a view of all instances. A policy that ranks each instance by its own values alone is a `Ranking`;
the scheduler then calls it for few instances (`kvpool.policy.routing.search`), with the same result.

| policy         | keeps a session together | shares between sessions | minds load              |
|----------------|--------------------------|-------------------------|-------------------------|
| LeastLoad      | no                       | no                      | alone                   |
| SessionId      | yes                      | no                      | at a session's start    |
| LongestPrefix  | yes                      | yes                     | by the cap (§6)         |
| QueuePlusExec  | yes                      | yes                     | in what it minimises (eq. 1) |

`KeepHits`, the default, stands in `kvpool.policy.routing.keeping`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy.routing.load import Bools, Floats
from kvpool.policy.routing.tokens import Tokens

__all__ = [
    "TOLERANCE",
    "Asked",
    "LeastLoad",
    "LongestPrefix",
    "Policy",
    "QueuePlusExec",
    "Ranking",
    "SessionId",
    "View",
    "first_of",
]

Ints = npt.NDArray[np.int64]

TOLERANCE = 1e-12  # figures that differ by such a part are equal: rounding is not to decide


class View(NamedTuple):
    """What a policy sees: arrays with an entry for each instance.

    Attributes:
        ids: Instances.
        cached: Tokens of the prompt that each holds.
        backlog: Work before each is free; eq. 1's first term.
        exec_s: The time of the prompt there; eq. 1's second term.
        load: Backlog and recent work, per share.
        open: Whether it takes new requests, and the request does not wait for it longer than computing the prefix again
            takes on an idle instance (`Balance.patience`).
        allowed: Whether it is open and below the load cap. At least one is.
        session: The request's.
    """

    ids: Ints
    cached: Ints
    backlog: Floats
    exec_s: Floats
    load: Floats
    open: Bools
    allowed: Bools
    session: str | None


class Asked(NamedTuple):
    """The prompt that is to be placed.

    Attributes:
        tokens: Token ids.
        namespace: As in Request.
        block_tokens: Tokens a block.
        held: The most tokens of it that an instance holds, whole blocks.
        exec_s: Its time by how many tokens of it an instance holds, with the fleet's model. Each length is computed
            once for all who ask.
        instances: How many take requests; at least 1.
        transfer_s: The time to fetch so many tokens from another instance; None where nothing is fetched, or where
            links differ, so that it depends on the two instances.
        again: The request was placed before, where it came to nothing, and is routed once more.
    """

    tokens: Tokens
    namespace: str
    block_tokens: int
    held: int
    exec_s: Callable[[int], float]
    instances: int
    transfer_s: Callable[[int], float] | None = None
    again: bool = False


class Policy(Protocol):
    """Chooses an instance. Any object with this method is a policy; a `Ranking` decides faster."""

    def choose(self, view: View) -> int:
        """The index of the chosen instance in the view's arrays."""


class Ranking:
    """A policy that ranks each instance by its own values alone.

    REQUIRES: of two instances that hold equally much and take equally long, the one with more backlog and load does not
    rank before the other.

    Attributes:
        minds_cached: Whether the rank of an instance depends on its cached tokens and its execution time. If not, the
            search skips the instances that hold a part of the prompt. True for a class that defines `rank`, unless the
            class sets it.
        remembers: Whether it learns from the requests that it places: then one object is for one kind of decision.
        patience: How long a request may wait while an instance is idle, where the balance does not say it
            (`Balance.patience`).
    """

    minds_cached: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    patience: float = 1.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "rank" in vars(cls) and "minds_cached" not in vars(cls):
            cls.minds_cached = True  # regardless of the base class

    def asked(self, asked: Asked) -> None:
        """Called with each prompt before instances that prefill are ranked for it; never for those that decode."""

    def placed(self, asked: Asked) -> None:
        """Called after `asked` when the request is under way; not when no instance decodes what it would prefill."""

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """The rank: the instance with the least first figure wins; among equals, the one with the least second; etc.

        Args:
            backlog: As in View, of one instance or of several.
            load: As in View.
            cached: As in View.
            exec_s: As in View.
        """
        raise NotImplementedError

    def ranks(self, session: str | None) -> bool:
        """Whether `rank` and `home` decide where requests of this session go."""
        return True

    def home(self, session: str | None) -> int:
        """The instance that gets all requests of a session while it is open; -1 without one."""
        return -1

    def sent(self, session: str | None, instance: int) -> None:
        """Called when a request of the session goes to an instance."""

    def choose(self, view: View) -> int:
        """As Policy.choose: the first of those that rank alike."""
        home = self.home(view.session)
        if home >= 0 and (positions := np.flatnonzero((view.ids == home) & view.open)).size:
            position = int(positions[0])
        else:
            left = np.flatnonzero(view.allowed)
            ranks = self.rank(view.backlog[left], view.load[left], view.cached[left], view.exec_s[left])
            position = int(left[first_of(ranks, len(left))[0]])
        self.sent(view.session, int(view.ids[position]))
        return position


def first_of(ranks: tuple[Any, ...], count: int) -> npt.NDArray[np.intp]:
    """The indices of the first-ranked instances. Ranks that differ by rounding only are equal, but for the last one.

    Args:
        ranks: Ranking.rank of `count` instances, at least one: arrays, or one figure for all of them.
        count: How many there are.
    """
    left = np.arange(count)
    for each in ranks[:-1]:
        figures = np.broadcast_to(each, count)[left]
        best = float(figures.min())
        left = left[figures <= best + TOLERANCE * abs(best)]
    last = np.broadcast_to(ranks[-1], count)[left]
    least: npt.NDArray[np.intp] = left[last == last.min()]
    return least


class LeastLoad(Ranking):
    """Chooses the instance that is free first, whatever it holds."""

    minds_cached = False

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """As Ranking.rank."""
        return backlog, load


class LongestPrefix(Ranking):
    """The instance below the load cap that holds the most of the prompt; of equals, the one that is free first (§6)."""

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """As Ranking.rank."""
        return -cached, backlog, load


class QueuePlusExec(Ranking):
    """The instance below the load cap where the prompt is computed first: queueing plus execution (eq. 1).

    Args:
        thrift: Each second of execution counts as 1 + thrift; 0 is the paper's. Eq. 1 counts what a choice costs this
            prompt, not those behind it: it recomputes cached tokens as soon as that ends a moment earlier.
    """

    def __init__(self, thrift: float = 0.0) -> None:
        if not thrift >= 0:
            raise ArgumentError(f"thrift is {thrift}; it must be at least 0")
        self._weight = 1.0 + thrift

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """As Ranking.rank."""
        return backlog + self._weight * exec_s, load


class SessionId(Ranking):
    """Sends all requests of a session to one instance, as long as it is open.

    Args:
        first: Where a session begins: "least-load", or "hash", with which several routers agree without communicating,
            and which moves only the sessions of an instance that leaves. A hash examines all instances.
        sessions_max: Sessions that are remembered; the least recently used is forgotten first. "hash" remembers none.
    """

    minds_cached = False
    remembers = True

    def __init__(self, first: Literal["least-load", "hash"] = "least-load", sessions_max: int = 1_000_000) -> None:
        if first not in ("least-load", "hash") or sessions_max < 1:
            raise ArgumentError(
                f"first {first!r} must be 'least-load' or 'hash', sessions_max {sessions_max} at least 1"
            )
        self._hashes = first == "hash"
        self._sessions_max = sessions_max
        self._home: OrderedDict[str, int] = OrderedDict()

    def rank(self, backlog: Any, load: Any, cached: Any, exec_s: Any) -> tuple[Any, ...]:
        """As Ranking.rank: where a session begins."""
        return backlog, load

    def ranks(self, session: str | None) -> bool:
        """As Ranking.ranks."""
        return session is None or not self._hashes

    def choose(self, view: View) -> int:
        """As Policy.choose."""
        if view.session is not None and self._hashes:
            return _highest_hash(view.session, view.ids, view.open)
        return super().choose(view)

    def home(self, session: str | None) -> int:
        """As Ranking.home."""
        return -1 if session is None else self._home.get(session, -1)

    def sent(self, session: str | None, instance: int) -> None:
        """As Ranking.sent."""
        if session is None:
            return
        self._home[session] = instance
        self._home.move_to_end(session)
        if len(self._home) > self._sessions_max:
            self._home.popitem(last=False)


def _highest_hash(session: str, ids: Ints, among: Bools) -> int:
    """Rendezvous hashing: each instance's hash of the session, and the highest wins."""
    seed = int.from_bytes(blake2b(session.encode(), digest_size=8).digest(), "little")
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return int(np.where(among, mixed >> np.uint64(1), np.uint64(0)).argmax())
