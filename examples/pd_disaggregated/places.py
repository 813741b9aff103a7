"""Where a request is served: which instance prefills it, and which one decodes it.

Prefill is chosen by eq. 1 of the MemServe paper: where the prompt is computed first. In tokens, that is what waits at
an instance and what it does not have of the prompt. So sessions that begin alike meet at one instance, as long as they
do not wait there longer than another one takes to compute the shared part, too. A later turn finds most of its prompt
where its session was before, and leaves only if it would wait too long.

Decode stays where it is: what a turn has left in the cache there is of use to the next one there only. A new session
goes to where the least is under way.

An instance that comes later, or comes back, takes sessions over from one that has at least two more: each at its next
turn, so that what a newcomer has to compute anew comes bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from pd_disaggregated.caches import PromptCaches
from pd_disaggregated.fleet import Instance
from pd_disaggregated.records import Setting
from pd_disaggregated.requests import Request

_STEP_TOKENS: Final = 10  # of a prompt, which take about as long as to decode one


@dataclass(frozen=True)
class _Home:
    """Where a session is served.

    Attributes:
        instance: There.
        at: When it was chosen, on the clock of `Places`.
    """

    instance: Instance
    at: int


class _Work:
    """What is under way at each instance."""

    def __init__(self, instances: Collection[Instance]) -> None:
        """Nothing yet."""
        self.blocks = dict.fromkeys(instances, 0)  # that its requests will have at their end
        self.to_prefill = dict.fromkeys(instances, 0)  # tokens of prompts that are not computed
        self.to_decode = dict.fromkeys(instances, 0)  # in tokens of a prompt, where one instance does both

    def add(self, request: Request, blocks: int, to_prefill: int) -> None:
        """REQUIRES: the request has its instances."""
        prefill, decode = request.prefill, request.decode
        assert prefill is not None
        assert decode is not None
        for instance in {prefill, decode}:
            self.blocks[instance] += blocks
        if len(request.tokens) == request.base:
            self.to_prefill[prefill] += to_prefill
        if prefill is decode:
            self.to_decode[prefill] += _STEP_TOKENS * (request.new_tokens - len(request.tokens))


class Places:
    """Chooses instances, and lets no more requests decode at one than its pool has blocks for."""

    def __init__(self, instances: Collection[Instance], setting: Setting, block_tokens: int, hbm_blocks: int) -> None:
        """Takes all instances, what they run, and the size of the pool that each of them has."""
        self._instances = instances
        self._block_tokens = block_tokens
        self._hbm_blocks = hbm_blocks
        self._caches = PromptCaches(instances, setting, block_tokens, hbm_blocks)
        self._prefill_homes: dict[int, _Home] = {}  # of sessions
        self._decode_homes: dict[int, _Home] = {}
        self._clock = 0  # counts what is chosen, and who comes
        self._came: dict[Instance, tuple[int, int]] = {}  # the last time that it joined: which one it was, and when
        self._missing: dict[Request, int] = {}  # tokens that the instance had to compute when it got the request

    def begin(self, requests: Collection[Request]) -> None:
        """Begins all that wait and have a place. An older one that does not fit is not overtaken by a younger one."""
        for one in self._instances:
            if one.joined and self._came.get(one, (-1, 0))[0] != one.joins:
                self._clock += 1
                self._came[one] = (one.joins, self._clock)
        self._caches.follow()
        self._missing = {request: self._missing.get(request, 0) for request in requests}
        work = _Work(self._instances)
        for request in requests:
            if request.prefill is not None:
                work.add(request, self._blocks_of(request), self._missing[request])
        full: set[Instance] = set()
        for request in requests:
            if request.prefill is None:
                self._begin(request, work, full)

    def answered(self, request: Request) -> None:
        """A request has its answer, and its instances keep what their design says."""
        self._caches.answered(request)

    def _begin(self, request: Request, work: _Work, full: set[Instance]) -> None:
        up = [one for one in self._instances if one.joined]
        prompt, session = request.next_prompt, request.session
        missing = self._caches.missing(prompt)
        prefill = self._choose_prefill(session, [one for one in up if one.prefills], work, missing)
        decode: Instance | None = prefill
        if prefill is not None and not prefill.decodes:
            decode = self._choose_decode(session, [one for one in up if not one.prefills], work)
        if prefill is None or decode is None:
            return
        blocks = self._blocks_of(request)
        if decode in full or work.blocks[decode] + blocks > self._hbm_blocks:
            full.add(decode)
            return
        self._note_home(session, self._prefill_homes, prefill)
        self._note_home(session, self._decode_homes, decode)
        self._missing[request] = missing[prefill]
        self._caches.sent(prompt, prefill)
        prefill.tell(request.begin(prefill, decode))
        work.add(request, blocks, missing[prefill])

    def _choose_prefill(
        self, session: int, instances: Sequence[Instance], work: _Work, missing: dict[Instance, int]
    ) -> Instance | None:
        """One of these, which are up: where the prompt is computed first."""
        sessions = Counter(one.instance for one in self._prefill_homes.values())
        home = self._home(session, self._prefill_homes, instances)
        newcomers = [] if home is None else self._newcomers(home, instances, sessions)
        if home is not None and not newcomers:
            first = min(work.to_prefill[one] + missing[one] for one in instances)
            if work.to_prefill[home.instance] + missing[home.instance] == first:
                return home.instance

        def rank(one: Instance) -> tuple[int, int, int]:
            soon = work.to_prefill[one] + missing[one] + work.to_decode[one]
            return soon, work.blocks[one], sessions[one]

        return min(newcomers or instances, key=rank, default=None)

    def _choose_decode(self, session: int, instances: Sequence[Instance], work: _Work) -> Instance | None:
        """One of these, which are up: the session's own, unless somebody has come since who has much less to do."""
        sessions = Counter(one.instance for one in self._decode_homes.values())
        home = self._home(session, self._decode_homes, instances)
        if home is not None:
            instances = self._newcomers(home, instances, sessions) or [home.instance]
        return min(instances, key=lambda one: (work.blocks[one], sessions[one]), default=None)

    def _home(self, session: int, homes: dict[int, _Home], instances: Sequence[Instance]) -> _Home | None:
        """Where the session was before, if that is one of these."""
        home = homes.get(session)
        return home if home is not None and home.instance in instances else None

    def _newcomers(self, home: _Home, instances: Sequence[Instance], sessions: Counter[Instance]) -> list[Instance]:
        """Those that have come since the home was chosen, and have at least two sessions less."""
        return [
            one for one in instances if self._came[one][1] > home.at and sessions[one] + 2 <= sessions[home.instance]
        ]

    def _note_home(self, session: int, homes: dict[int, _Home], instance: Instance) -> None:
        home = homes.get(session)
        if home is None or home.instance is not instance or home.at < self._came[instance][1]:
            self._clock += 1
            homes[session] = _Home(instance, self._clock)

    def _blocks_of(self, request: Request) -> int:
        """All that it will have at its end."""
        return -(-(len(request.prompt) + request.new_tokens) // self._block_tokens)
