"""The targets of a space's models: policy.quotas decides them, and the core keeps them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from kvpool import _core
from kvpool.policy.quotas import Adaptation, QuotaRule, Quotas, Seen, adapt
from kvpool.space.model import Model
from kvpool.space.rules import TIERS, Tier

__all__ = ["Targets"]

_EMPTY: Final = 1  # the policy knows no tier without units


class Targets:
    """The quotas of all models in both tiers, as they follow what models need.

    Not thread-safe: the space calls it under its lock.
    """

    def __init__(self, core: _core.Space) -> None:
        """Without models. The core tells the capacities."""
        self._core = core
        self._quotas: dict[Tier, Quotas] = {
            tier: Quotas({}, max(capacity, _EMPTY), {})
            for tier, (capacity, _) in zip(TIERS, core._tiers(), strict=True)
        }
        self._seen_at = time.monotonic()

    def of(self, name: str, tier: Tier) -> int:
        """The quota of a model, in units; 0 for one that is not loaded."""
        return self._quotas[tier].units.get(name, 0)

    def follow(
        self,
        models: Mapping[str, Model],
        backlog: Mapping[str, int],
        elapsed_s: float | None,
        settings: Adaptation | None,
        demands: Mapping[str, float] | None = None,
    ) -> None:
        """Adapts to what the models use now, and to their backlogs and demands, in units. Sets all quotas at once."""
        now = time.monotonic()
        elapsed = now - self._seen_at if elapsed_s is None else elapsed_s
        loaded = {name: model for name, model in models.items() if model.has_quotas}
        found: dict[Tier, Quotas] = {}
        for tier, (capacity, uses) in zip(TIERS, self._core._tiers(), strict=True):
            rules: dict[str, QuotaRule] = {name: model.rules[tier] for name, model in loaded.items()}
            seen = {
                name: Seen(uses[model.number][3], backlog.get(name, 0) if tier == "hbm" else 0)
                for name, model in loaded.items()
            }
            last = self._quotas[tier]
            if not loaded or capacity < 1:
                found[tier] = Quotas({}, max(capacity, _EMPTY), rules)
            else:
                found[tier] = adapt(last, capacity, rules, seen, elapsed, settings, demands)
        self._quotas = found
        self._seen_at = now
        self._core._set_quotas(
            [(model.number, self.of(name, "hbm"), self.of(name, "dram")) for name, model in models.items()]
        )
