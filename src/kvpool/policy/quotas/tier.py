"""Who may have how much of one medium: rules that people set, quotas that adapt, and what is used now.

All amounts are units of the space, the runs of bytes that blocks of every model are made of. HBM and DRAM are two tiers
with rules, quotas and uses that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvpool.errors import ArgumentError, OutOfQuota
from kvpool.policy.quotas.arguments import known, number_above_0, whole

__all__ = ["QuotaRule", "Tier", "Use"]


@dataclass(frozen=True)
class QuotaRule:
    """What the operator of a space grants a model in one tier.

    Attributes:
        reserve: Units that the model can always have, whatever its neighbours do.
        limit: Units that it never exceeds, historical ones included; None: the capacity.
        weight: Its part of what is scarce, relative to others with the same demand.
    """

    reserve: int = 0
    limit: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        whole(self.reserve, "reserve")
        number_above_0(self.weight, "weight")
        if self.limit is not None and whole(self.limit, "limit", 1) < self.reserve:
            raise ArgumentError(f"reserve {self.reserve} is above limit {self.limit}")

    def limit_of(self, capacity: int) -> int:
        """The limit in a tier of this capacity."""
        return capacity if self.limit is None else min(self.limit, capacity)


class Use(NamedTuple):
    """Units that a model occupies.

    Attributes:
        active: Of requests that run, or pinned: they cannot be evicted.
        historical: Of its prompt cache: they can.
    """

    active: int = 0
    historical: int = 0


@dataclass(frozen=True)
class Tier:
    """One medium of a space, at one moment. Immutable; `with_rule`, `without` and `with_use` make another one.

    Invariants, for `committed` = sum over models of max(active, reserve):
      T1. committed <= capacity. `admission.admit` and `with_rule` see to it.
      T2. The sum of active and historical units of all models is at most the capacity.
      T3. `rules` and `uses` name the same models.

    Attributes:
        capacity: Units.
        rules: By name of model.
        uses: By name of model; a model that is not named uses nothing.
        quotas: Targets by name of model, from `adapting`; what a model has beyond its quota is reclaimed first. Empty
            means that reserves are the quotas.

    Raises:
        ArgumentError: The reserves together exceed the capacity, or a use or quota is negative or of an unknown model.
        ArgumentTypeError: A value has the wrong type.
        OutOfQuota: The uses break T1 or T2.
    """

    capacity: int
    rules: Mapping[str, QuotaRule]
    uses: Mapping[str, Use] = field(default_factory=dict)
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole(self.capacity, "capacity", 1)
        reserved = sum(rule.reserve for rule in self.rules.values())
        if reserved > self.capacity:
            raise ArgumentError(f"the reserves are {reserved} units, and the capacity is {self.capacity}")
        for model, use in self.uses.items():
            known(model, self.rules)
            whole(use.active, f"the active units of {model!r}")
            whole(use.historical, f"the historical units of {model!r}")
        for model, quota in self.quotas.items():
            whole(quota, f"the quota of {known(model, self.rules)!r}")
        uses = {model: self.uses.get(model, Use()) for model in self.rules}
        object.__setattr__(self, "uses", uses)
        object.__setattr__(self, "rules", dict(self.rules))
        object.__setattr__(self, "quotas", dict(self.quotas))
        if self.committed > self.capacity or self.free < 0:
            raise _full(f"{self.committed} of {self.capacity} units are active or reserved, {self.free} free", self)

    @property
    def committed(self) -> int:
        """The sum over models of max(active, reserve): what can never be given to anybody else."""
        uses = self.uses
        return sum(max(uses[model].active, rule.reserve) for model, rule in self.rules.items())

    @property
    def free(self) -> int:
        """Units that nobody occupies."""
        return self.capacity - sum(use.active + use.historical for use in self.uses.values())

    def quota(self, model: str) -> int:
        """The target of a model."""
        return self.quotas.get(model, self.rules[model].reserve)

    def most(self, model: str) -> int:
        """Active units that a model can have at most: its limit, and what the others' reserves leave.

        Raises:
            ArgumentError: The model is unknown.
        """
        rule = self.rules[known(model, self.rules)]
        others = sum(each.reserve for name, each in self.rules.items() if name != model)
        return min(rule.limit_of(self.capacity), self.capacity - others)

    def with_rule(self, model: str, rule: QuotaRule) -> Tier:
        """With a new model, or another rule for one.

        The quotas stay until `adapting.adapt` fills them anew, which it does at once after a change of rules.

        Raises:
            ArgumentError: The reserves together would exceed the capacity: wrong whatever is used now.
            OutOfQuota: The reserve does not fit beside what the others have active now. It will once they have less.
        """
        rules = {**self.rules, model: rule}
        if sum(each.reserve for each in rules.values()) > self.capacity:
            raise ArgumentError(f"a reserve of {rule.reserve} for {model!r} exceeds the capacity of {self.capacity}")
        return replace(self, rules=rules)

    def without(self, model: str) -> Tier:
        """Without a model, whose units are free then. Raises ArgumentError for an unknown one."""
        known(model, self.rules)
        kept = [name for name in self.rules if name != model]
        return Tier(
            self.capacity,
            {name: self.rules[name] for name in kept},
            {name: self.uses[name] for name in kept},
            {name: self.quotas[name] for name in kept if name in self.quotas},
        )

    def with_use(self, model: str, use: Use) -> Tier:
        """With another use of one model. Raises ArgumentError for an unknown one, OutOfQuota if it breaks T1 or T2."""
        return replace(self, uses={**self.uses, known(model, self.rules): use})


def _full(text: str, tier: Tier) -> OutOfQuota:
    active = sum(use.active for use in tier.uses.values())
    return OutOfQuota(text, free=max(0, tier.free), active=active, capacity=tier.capacity)
