"""The schedulers that can plan for instances, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, Protocol, TypeAlias

from kvpool.policy.mell import BestFit, LoadBalance, Mell, Plan, RequestId, WorstFit

__all__ = ["SCHEDULERS", "PolicyName", "Scheduler"]

PolicyName: TypeAlias = Literal["mell", "bf", "wf", "lb"]


class Scheduler(Protocol):
    """A scheduler of `kvpool.policy.mell`: Mell, BestFit, WorstFit or LoadBalance."""

    @property
    def gpus(self) -> Mapping[int, int]:
        """Active GPUs, and the tokens that are taken on each."""

    def adopt(self, running: Mapping[int, Mapping[RequestId, int]]) -> None:
        """Takes over requests that run already."""

    def batch(
        self,
        departures: Iterable[RequestId] = (),
        growths: Iterable[tuple[RequestId, int]] = (),
        arrivals: Iterable[tuple[RequestId, int]] = (),
    ) -> Plan:
        """Departures, growth and arrivals."""

    def tidy(self) -> object:
        """Empties GPUs into the room beside others."""

    def where(self, request: RequestId) -> int:
        """The GPU of a request."""


# By the tokens that an instance has room for.
SCHEDULERS: Final[Mapping[PolicyName, Callable[[int], Scheduler]]] = {
    "mell": Mell,
    "bf": BestFit,
    "wf": WorstFit,
    "lb": LoadBalance,
}
