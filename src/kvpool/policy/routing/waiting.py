"""How long a request may wait for a busy instance while another one is idle."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.policy.routing.instance_slots import Bools, Floats
from kvpool.policy.routing.policies import TOLERANCE

__all__ = ["Wait"]


class Wait(NamedTuple):
    """A bound on backlogs.

    Attributes:
        patience: As in Balance; finite.
        least: The time of the prompt on the idle instance that computes it soonest.
    """

    patience: float
    least: float

    def pays(self, backlog: float, execution: float) -> bool:
        """Whether an instance may get the request, given its backlog and the time of the prompt there."""
        return backlog <= 0.0 or backlog + self.patience * execution <= self._most

    def pays_of(self, backlog: Floats, execution: Floats) -> Bools:
        """As `pays`, of many."""
        may: Bools = (backlog <= 0.0) | (backlog + self.patience * execution <= self._most)
        return may

    @property
    def _most(self) -> float:
        return self.patience * self.least * (1 + TOLERANCE)
