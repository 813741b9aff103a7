"""The scheduler's side of an engine that is a member of a cluster, and whose workers are other processes."""

from __future__ import annotations

from kvpool.engines.vllm.among_peers import AmongPeers
from kvpool.engines.vllm.arrivals import Arrivals
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.members import Membership
from kvpool.engines.vllm.plans import StepPlan
from kvpool.engines.vllm.saved_sends import SavedSends
from kvpool.engines.vllm.scheduler_index import SchedulerIndex
from kvpool.pool import Pool

__all__ = ["MemberIndex"]


class MemberIndex(SchedulerIndex, AmongPeers):
    """A SchedulerIndex among its peers. Not thread-safe, either.

    A prompt is sent when all workers have saved their parts of it, from DRAM to DRAM: each worker sends its part to the
    workers of the other engine that have the same heads.
    """

    def __init__(self, pool: Pool, membership: Membership, timeout_s: float, groups: int = 1) -> None:
        """Of an engine.

        Args:
            pool: As for SchedulerIndex; it is a member already.
            membership: The pool's; it is closed by `close`.
            timeout_s: As for MemberPool.
            groups: As for MemberPool.
        """
        super().__init__(pool)
        self._membership = membership
        self._arrivals = Arrivals(pool, 2 * timeout_s, groups)
        self._sends = self._saved_sends = SavedSends(pool, membership.has, timeout_s)

    @property
    def has_work(self) -> bool:
        """Whether vLLM should go on with steps, though it has no requests.

        Without its steps workers neither join nor report what they have saved, and prompts are not sent.
        """
        self._begin_sends()
        return self._joining > 0 or bool(self._saves) or self._sends.busy

    def addressed(self, step: StepPlan) -> StepPlan:
        """As SchedulerIndex.addressed. Keeps the sends, which are not the workers'."""
        self._arrivals.end_pins()
        addressed = super().addressed(step)
        for send in step.sends:
            self._saved_sends.plan(send, self._last)
        self._begin_sends()
        return addressed

    def clear(self) -> bool:
        """As SchedulerIndex.clear. False while a send, a peer or a load still has some of it."""
        self._saved_sends.drop()
        self._arrivals.clear()
        super().clear()
        return self.pool.stats().dram.historical == 0

    def take_figures(self) -> Figures:
        """What happened since the last call."""
        return self._with_sends(super().take_figures())

    def close(self) -> None:
        """Leaves the cluster, and closes the pool."""
        if not self.pool.closed:
            self._leave(super().close)

    # ----

    def _begin_sends(self) -> None:
        self._saved_sends.begin(min(self._saves, default=self._last + 1))
