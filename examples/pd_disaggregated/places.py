"""Where a request is served: which instance prefills it, and which one decodes it.

Sessions stay where they are: what a turn has left in the caches of two instances is of use to the next one there only.
A new session goes to where the least is under way. (For routing by what is cached, see `kvpool.policy.routing`.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pd_disaggregated.fleet import Instance
from pd_disaggregated.requests import Request


class Places:
    """Chooses instances, and lets no more requests decode at one than its pool has blocks for."""

    def __init__(self, instances: Collection[Instance], block_tokens: int, hbm_blocks: int) -> None:
        """Takes all instances, and the size of the pool that each of them has."""
        self._instances = instances
        self._block_tokens = block_tokens
        self._hbm_blocks = hbm_blocks
        self._homes: dict[int, tuple[Instance, Instance]] = {}  # of sessions

    def begin(self, requests: Collection[Request]) -> None:
        """Begins all that wait and have a place. An older one that does not fit is not overtaken by a younger one."""
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
        prefill, decode = self._homes.get(request.session, (None, None))
        if prefill is None or not prefill.joined:
            prefill = _least_loaded([one for one in self._instances if one.prefills and one.joined], load)
        if prefill is not None and prefill.decodes:
            decode = prefill
        elif decode is None or not decode.joined:
            decode = _least_loaded([one for one in self._instances if not one.prefills and one.joined], load)
        if prefill is None or decode is None:
            return
        blocks = self._blocks_of(request)
        if decode in full or load[decode] + blocks > self._hbm_blocks:
            full.add(decode)
            return
        for instance in {prefill, decode}:
            load[instance] += blocks
        self._homes[request.session] = (prefill, decode)
        prefill.tell(request.begin(prefill, decode))

    def _blocks_of(self, request: Request) -> int:
        """All that it will have at its end."""
        return -(-(len(request.prompt) + request.new_tokens) // self._block_tokens)


def _least_loaded(instances: Sequence[Instance], load: dict[Instance, int]) -> Instance | None:
    return min(instances, key=load.__getitem__, default=None)
