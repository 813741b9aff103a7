"""Where a request is served: which instance prefills it, and which one decodes it.

Sessions stay where they are: what a turn has left in the caches of two instances is of use to the next one there only.
A new session goes to where the least is under way. An instance that comes later, or comes back, takes sessions over
from one that has at least two more: each at its next turn, so that what a newcomer has to compute anew comes bit by
bit. (For routing by what is cached, see `kvpool.policy.routing`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pd_disaggregated.fleet import Instance
from pd_disaggregated.requests import Request


@dataclass(frozen=True)
class _Home:
    """Where a session is served.

    Attributes:
        instance: There.
        at: When it was chosen, on the clock of `Places`.
    """

    instance: Instance
    at: int


class Places:
    """Chooses instances, and lets no more requests decode at one than its pool has blocks for."""

    def __init__(self, instances: Collection[Instance], block_tokens: int, hbm_blocks: int) -> None:
        """Takes all instances, and the size of the pool that each of them has."""
        self._instances = instances
        self._block_tokens = block_tokens
        self._hbm_blocks = hbm_blocks
        self._prefill_homes: dict[int, _Home] = {}  # of sessions
        self._decode_homes: dict[int, _Home] = {}
        self._clock = 0  # counts what is chosen, and who comes
        self._came: dict[Instance, tuple[int, int]] = {}  # the last time that it joined: which one it was, and when

    def begin(self, requests: Collection[Request]) -> None:
        """Begins all that wait and have a place. An older one that does not fit is not overtaken by a younger one."""
        for one in self._instances:
            if one.joined and self._came.get(one, (-1, 0))[0] != one.joins:
                self._clock += 1
                self._came[one] = (one.joins, self._clock)
        load = dict.fromkeys(self._instances, 0)
        for request in requests:
            for instance in {request.prefill, request.decode}:
                if instance is not None:
                    load[instance] += self._blocks_of(request)
        full: set[Instance] = set()
        for request in requests:
            if request.prefill is None:
                self._begin(request, load, full)

    def _begin(self, request: Request, load: dict[Instance, int], full: set[Instance]) -> None:
        up = [one for one in self._instances if one.joined]
        prefill = self._choose(request.session, self._prefill_homes, [one for one in up if one.prefills], load)
        decode: Instance | None = prefill
        if prefill is not None and not prefill.decodes:
            decode = self._choose(request.session, self._decode_homes, [one for one in up if not one.prefills], load)
        if prefill is None or decode is None:
            return
        blocks = self._blocks_of(request)
        if decode in full or load[decode] + blocks > self._hbm_blocks:
            full.add(decode)
            return
        for instance in {prefill, decode}:
            load[instance] += blocks
        self._note_home(request.session, self._prefill_homes, prefill)
        self._note_home(request.session, self._decode_homes, decode)
        prefill.tell(request.begin(prefill, decode))

    def _choose(
        self, session: int, homes: dict[int, _Home], instances: Sequence[Instance], load: dict[Instance, int]
    ) -> Instance | None:
        """One of these, which are up: the session's own, unless somebody has come since who has much less to do."""
        sessions = Counter(one.instance for one in homes.values())
        home = homes.get(session)
        if home is not None and home.instance in instances:
            instances = [
                one
                for one in instances
                if self._came[one][1] > home.at and sessions[one] + 2 <= sessions[home.instance]
            ] or [home.instance]
        return min(instances, key=lambda one: (load[one], sessions[one]), default=None)

    def _note_home(self, session: int, homes: dict[int, _Home], instance: Instance) -> None:
        home = homes.get(session)
        if home is None or home.instance is not instance or home.at < self._came[instance][1]:
            self._clock += 1
            homes[session] = _Home(instance, self._clock)

    def _blocks_of(self, request: Request) -> int:
        """All that it will have at its end."""
        return -(-(len(request.prompt) + request.new_tokens) // self._block_tokens)
