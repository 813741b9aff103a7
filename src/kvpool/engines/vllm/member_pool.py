"""The pool of an engine that is a member of a cluster: it sends prompts to other engines, and gets theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool.engines.vllm.among_peers import AmongPeers
from kvpool.engines.vllm.arrivals import Arrivals
from kvpool.engines.vllm.engine_pool import EnginePool
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.members import Membership
from kvpool.engines.vllm.plans import SendPlan
from kvpool.engines.vllm.sends import Sends
from kvpool.pool import Pool

__all__ = ["MemberPool"]


class MemberPool(EnginePool, AmongPeers):
    """An EnginePool among its peers. Not thread-safe, either.

    A send reads vLLM's blocks as a save does: `await_saves_of` waits for both.
    """

    def __init__(
        self,
        pool: Pool,
        blocks: int,
        membership: Membership,
        timeout_s: float,
        stream: Callable[[], Any] | None = None,
        groups: int = 1,
    ) -> None:
        """Adopts all blocks.

        Args:
            pool: As for EnginePool; it is a member already.
            blocks: How many vLLM has.
            membership: The pool's; it is closed by `close`.
            timeout_s: Seconds that a send may take, and for which what has arrived is remembered.
            stream: As for EnginePool.
            groups: Of layers.
        """
        super().__init__(pool, blocks, stream)
        self._membership = membership
        self._arrivals = Arrivals(pool, 2 * timeout_s, groups)
        self._sends = Sends(pool, self._addrs, membership.has, timeout_s, self._current_stream)

    # ---- the scheduler's side

    @property
    def saving(self) -> bool:
        """Whether a save or a send is under way."""
        return super().saving or self.sending

    @property
    def sending(self) -> bool:
        """Whether a send is under way, or waits for a connection."""
        return self._sends.busy

    def clear(self) -> bool:
        """As EnginePool.clear. Waits for sends, too."""
        self._sends.await_writes(None)
        self._arrivals.clear()
        return super().clear()

    # ---- the worker's side

    def begin_step(self) -> None:
        """The previous step has ended."""
        self._arrivals.end_pins()
        self._sends.begin_step()

    def await_saves_of(self, written: set[int] | None) -> None:
        """Waits for the saves and the sends that read one of the blocks. REQUIRES: before anything writes to them."""
        super().await_saves_of(written)
        self._sends.await_writes(written)

    def layer_computed(self, layer: int, plans: Sequence[SendPlan]) -> None:
        """Sends this layer of what the step computes."""
        self._sends.layer([plan for plan in plans if self._sound(plan)], layer)

    def send(self, plan: SendPlan) -> None:
        """Sends what the step has computed, without what was sent layer by layer."""
        if self._sound(plan):
            self._sends.send(plan)
        else:
            self._sends.refuse(plan)

    def suspend(self) -> bool:
        """As EnginePool.suspend. Waits for sends, too."""
        self._sends.await_writes(None)
        return super().suspend()

    def take_figures(self) -> Figures:
        """What happened since the last call."""
        return self._with_sends(super().take_figures())

    def close(self) -> None:
        """Leaves the cluster, and closes the pool."""
        if not self.pool.closed:
            self._leave(super().close)

    # ----

    def _sound(self, plan: SendPlan) -> bool:
        return not self.suspects or self.suspects.isdisjoint(plan.blocks.tolist())
