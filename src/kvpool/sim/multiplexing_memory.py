"""The KV cache of the models on one mesh, in units: a `Tier`, and quotas that adapt, as a `Space` has them.

Nothing is cached for later prompts here: all units in use are active. So a growth that `admit` allows is served from
what is free.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvpool.errors import OutOfMemory, OutOfQuota
from kvpool.policy import multiplexing as mux

__all__ = ["BLOCK_TOKENS", "UNIT_BYTES", "MeshMemory", "Sharing", "block_units"]

BLOCK_TOKENS: Final = 16
UNIT_BYTES: Final = 1 << 16

Sharing = Literal["unified", "partitioned"]


def block_units(kv_bytes_per_token: int) -> int:
    """Units of a block of a model: of all its layers, on all GPUs of the mesh."""
    return -(-BLOCK_TOKENS * kv_bytes_per_token // UNIT_BYTES)


@dataclass(frozen=True)
class _Kind:
    """What a model's tokens take."""

    units: int  # of a block

    def of(self, tokens: int) -> int:
        """Units of the blocks of so many tokens."""
        return -(-tokens // BLOCK_TOKENS) * self.units


class MeshMemory:
    """Units by model and request.

    Invariants, after each call:
      M1. What the tier says a model uses is the sum of what its requests hold.
      M2. T1 to T3 of `Tier`: nothing beyond the capacity, and nobody in another's reserve.
      M3. Q1 and Q2 of `Quotas`: they sum up to the capacity, each within its rule.

    Args:
        capacity: Units.
        models: On the mesh.
        sharing: "unified": one cache, in which quotas adapt. "partitioned": each model has an equal part, and no other.
        growth: Whether prompts leave room for the next block of each request that decodes.
    """

    def __init__(
        self,
        capacity: int,
        models: Sequence[mux.ServedModel],
        sharing: Sharing = "unified",
        growth: bool = True,
    ) -> None:
        if capacity < 1:
            raise OutOfMemory("weights leave no memory for KV", needed_bytes=UNIT_BYTES, available_bytes=0)
        part = capacity // len(models)
        rule = mux.QuotaRule() if sharing == "unified" else mux.QuotaRule(reserve=part, limit=part)
        self.tier = mux.Tier(capacity, {model.name: rule for model in models})
        self._kinds = {model.name: _Kind(block_units(model.kv_bytes_per_token)) for model in models}
        demands = {
            model.name: mux.demand(
                model.rate, model.prompt_tokens + model.output_tokens, self._kinds[model.name].units / BLOCK_TOKENS
            )
            for model in models
        }
        self._demands = demands if any(demands.values()) else None
        together = sum(demands.values())
        wanted = {name: capacity * each / together if together else 1.0 for name, each in demands.items()}
        self.quotas = mux.first_quotas(capacity, self.tier.rules, wanted)  # in proportion, whatever requests take
        self._held: dict[str, dict[Hashable, int]] = {model.name: {} for model in models}
        self._most = {name: self.tier.most(name) for name in self._held}
        self._adapted_s = 0.0
        self._growth = growth

    def units(self, model: str, tokens: int) -> int:
        """Units of the blocks of so many tokens of a model."""
        return self._kinds[model].of(tokens)

    def fits(self, model: str, tokens: int) -> bool:
        """Whether a request could have so many tokens, with all of the memory that its model can have."""
        return self.units(model, tokens) <= self._most[model]

    def used(self, model: str) -> int:
        """Units of all requests of a model."""
        return self.tier.uses[model].active

    def holds(self, model: str, request: Hashable) -> int:
        """Units of one request."""
        return self._held[model].get(request, 0)

    def view(self, model: str) -> Mapping[str, int]:
        """Fields of `ModelQueues` that say what the model may use."""
        active, reserve = self.tier.uses[model].active, self.tier.rules[model].reserve
        return {
            "quota": self.quotas.units[model],
            "used": active,
            "reserved": max(0, reserve - active),
            "limit": self._most[model],
            "block": self._kinds[model].units if self._growth else 0,
        }

    @property
    def available(self) -> int:
        """Units that any model can have."""
        return self.tier.capacity - self.tier.committed

    def take(self, model: str, needs: Mapping[Hashable, int]) -> None:
        """Gives units to requests of a model. Raises OutOfQuota where a scheduler asks for more than is admitted."""
        units = sum(needs.values())
        if units:
            mux.admit(self.tier, model, units)
            if units > self.tier.free:
                raise OutOfQuota(f"{units} units are admitted, and {self.tier.free} free", model=model)
            self.tier = self.tier.with_use(model, mux.Use(self.used(model) + units))
            held = self._held[model]
            for request, more in needs.items():
                held[request] = held.get(request, 0) + more

    def give_back(self, model: str, request: Hashable) -> None:
        """Frees what a request holds."""
        units = self._held[model].pop(request)
        self.tier = self.tier.with_use(model, mux.Use(self.used(model) - units))

    def adapt(self, now_s: float, backlogs: Mapping[str, int]) -> None:
        """Lets quotas follow what models use and what their waiting requests ask for."""
        seen = {name: mux.Seen(self.used(name), backlog) for name, backlog in backlogs.items()}
        tier = self.tier
        self.quotas = mux.adapt(
            self.quotas, tier.capacity, tier.rules, seen, now_s - self._adapted_s, None, self._demands
        )
        self._adapted_s = now_s

    def check(self) -> None:
        """Raises AssertionError if M1, M2 or M3 is broken."""
        tier, quotas = self.tier, self.quotas
        for name, held in self._held.items():
            assert tier.uses[name].active == sum(held.values()), f"M1: {name}"
        assert tier.free >= 0, "M2"
        assert tier.committed <= tier.capacity, "M2"
        limits = [rule.limit_of(tier.capacity) for rule in tier.rules.values()]
        assert sum(quotas.units.values()) == min(tier.capacity, sum(limits)), "M3"
        for name, rule in tier.rules.items():
            assert rule.reserve <= quotas.units[name] <= rule.limit_of(tier.capacity), f"M3: {name}"
