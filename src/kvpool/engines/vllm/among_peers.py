"""What an engine says and hears of the other engines of its cluster. The scheduler's side."""

from __future__ import annotations

from collections.abc import Callable

from kvpool.engines.vllm.arrivals import Arrivals
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.members import Membership
from kvpool.engines.vllm.sends import Sends

__all__ = ["AmongPeers"]


class AmongPeers:
    """A part of the pool of an engine that is a member: a `Source` of prompts, a `Target` of them, and a `Peer`."""

    _membership: Membership
    _arrivals: Arrivals
    _sends: Sends

    @property
    def name(self) -> str:
        """The engine's in the cluster."""
        return self._membership.name

    def is_member(self, name: str) -> bool:
        """Whether an engine of this name is in the cluster."""
        return self._membership.has(name)

    def others(self) -> list[str]:
        """The names of the other engines in the cluster."""
        return self._membership.others()

    def arrived(self, number: str) -> bool:
        """Whether another engine has sent the prompt of this id."""
        return self._arrivals.came(number)

    def failed(self, number: str) -> bool:
        """Whether another engine has said that the prompt of this id does not come."""
        return self._arrivals.failed(number)

    def let_go(self, number: str) -> None:
        """The request of this prompt needs it no more."""
        self._arrivals.let_go(number)

    def expect_sends_to(self, peer: str) -> None:
        """There will be sends to this member."""
        self._sends.connect(peer)

    def send_failed(self, number: str) -> bool:
        """Whether the send of this id has failed already."""
        return self._sends.failed(number)

    def forget_send(self, number: str) -> None:
        """Nobody will ask about what was sent under this id until now."""
        self._sends.forget(number)

    def _with_sends(self, figures: Figures) -> Figures:
        """The figures of the cache, and those of the sends since the last call."""
        figures.merge(self._sends.take_figures())
        return figures

    def _leave(self, close_cache: Callable[[], None]) -> None:
        """Leaves the cluster, and closes the cache between what uses it and what proves that nobody does."""
        self._sends.close()
        self._arrivals.close()
        close_cache()
        self._sends.join()
        self._membership.close()
