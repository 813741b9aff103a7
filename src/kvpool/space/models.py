"""The models of a space: how they come and go, and what they may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from kvpool import _core
from kvpool.arguments import int_from, shown
from kvpool.config import Settings
from kvpool.errors import ArgumentError, LayoutMismatch, StateError
from kvpool.policy.quotas import Adaptation, QuotaRule, demand
from kvpool.space.model import Model, ModelPool, check_name
from kvpool.space.quotas import Targets
from kvpool.space.records import ModelQuota, tier_quota
from kvpool.space.rules import TIERS, Rules, Sizes, changed_rules
from kvpool.space.units import Pieces
from kvpool.types import KVLayout, RawLayout

__all__ = ["Models"]


class Models:
    """The models of a space by name, those whose cache is kept among them.

    Not thread-safe: the space calls it under its lock. A method that raises has changed nothing.
    """

    def __init__(self, core: _core.Space, unit: int) -> None:
        """Without models. `unit`: its bytes."""
        self._core = core
        self._unit = unit
        self._by_name: dict[str, Model] = {}
        self._targets = Targets(core)

    @property
    def loaded(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return tuple(name for name, model in self._by_name.items() if model.state != "kept")

    def pools(self) -> Iterator[tuple[str, ModelPool]]:
        """The pools that are not closed, by name."""
        return ((name, model.pool) for name, model in self._by_name.items() if not model.pool.closed)

    def find(self, name: str) -> Model:
        """Raises ArgumentError, ArgumentTypeError."""
        found = self._by_name.get(check_name(name))
        if found is None:
            raise ArgumentError(
                f"no model is called {name!r}; there are {', '.join(sorted(self._by_name)) or 'no models'}"
            )
        return found

    # --- coming and going: documented in Space ---

    def load(
        self,
        name: str,
        layout: KVLayout | RawLayout,
        rules: Rules,
        own: Settings,
        given: Mapping[str, object],
        pieces: Pieces,
    ) -> ModelPool:
        """`given`: those of its settings that were named, which a pool that was kept must have."""
        kept = self._by_name.get(name)
        if kept is not None and kept.state != "kept":
            raise ArgumentError(f"the space has a model {name!r} already")
        if kept is not None and not kept.pool.closed:
            return self._revive(name, kept, layout, rules, {field: getattr(own, field) for field in given}, pieces)
        self._check_reserves(name, rules)
        pool = ModelPool(self._core, layout, own, self._unit, pieces)
        model = Model(pool, pool._space_number, layout, self._unit, rules)
        try:
            self._set_rules(name, model, rules)
            self._by_name[name] = model  # instead of one that was kept, and whose pool was closed
            self.follow()
        except BaseException:
            if kept is None:
                self._by_name.pop(name, None)
            else:
                self._by_name[name] = kept
            pool.close()
            raise
        return pool

    def _revive(
        self,
        name: str,
        model: Model,
        layout: KVLayout | RawLayout,
        rules: Rules,
        settings: Mapping[str, object],
        pieces: Pieces,
    ) -> ModelPool:
        first = f"unload {name!r} with keep='none' first"
        if model.layout != layout:
            raise LayoutMismatch(f"the cache of {name!r} is kept with another layout: {first}")
        if model.pool._layered != (pieces == "layer"):
            raise ArgumentError(f"the pool of {name!r} is kept with another value of pieces: {first}")
        for field, value in settings.items():
            if getattr(model.pool.settings, field) != value:
                was = shown(getattr(model.pool.settings, field))
                raise ArgumentError(f"the pool of {name!r} is kept with {field}={was}, not {shown(value)}: {first}")
        self._set_rules(name, model, rules)
        model.rules = rules
        model.state = "loaded"
        self._core._hold(model.number, held=False)
        self.follow()
        return model.pool

    def begin_unload(self, name: str) -> tuple[Model, Literal["loaded", "kept"]]:
        """The model, which gets no more blocks and pins from now on, and its state before."""
        model = self.find(name)
        if model.state == "leaving":
            raise StateError(f"another thread unloads {name!r}")
        before, model.state = model.state, "leaving"
        self._core._hold(model.number, held=True)
        return model, before

    def cancel_unload(self, model: Model, before: Literal["loaded", "kept"]) -> None:
        """The model goes on as before."""
        model.state = before
        self._core._hold(model.number, held=before == "kept")

    def end_unload(self, name: str, model: Model, keep: bool) -> None:
        """Nothing of the model is in use any more. `keep`: its pool and its cache stay, if nobody has closed it."""
        if keep:
            nothing, limit = QuotaRule(0, None, 1.0), QuotaRule(0, model.rules["dram"].limit, 1.0)
            try:
                self._set_rules(name, model, {"hbm": nothing, "dram": limit})
            except StateError:  # it was closed just now
                keep = False
        if keep:
            model.state = "kept"
        else:
            self._by_name.pop(name, None)

    def clear(self) -> list[Model]:
        """Forgets all models, and returns them."""
        models = list(self._by_name.values())
        self._by_name.clear()
        return models

    # --- quotas ---

    def set_quota(self, name: str, sizes: Sizes, weight: float) -> None:
        """Documented in Space; what is SAME stays."""
        model = self.find(name)
        if model.state == "kept":
            raise StateError(f"{name!r} is unloaded: load it with its quotas")
        if model.pool.closed:
            raise StateError(f"the pool of {name!r} is closed: unload it, and load it again")
        rules = changed_rules(model.rules, sizes, weight, model.block_units, self._unit)
        self._set_rules(name, model, rules)
        model.rules = rules
        self.follow()

    def adapt(
        self,
        backlog: Mapping[str, int],
        demands: Mapping[str, float] | None,
        elapsed_s: float | None,
        settings: Adaptation | None,
    ) -> None:
        """Documented in Space. `backlog`, `demands`: in blocks."""
        waiting = {}
        (in_hbm, _), _ = self._core._tiers()
        for name, blocks in backlog.items():
            model = self.find(name)
            number = int_from(blocks, f"the backlog of {name!r}")
            if not model.has_quotas or number < 0:
                raise ArgumentError(f"the backlog of {name!r} is {shown(blocks)} blocks, or it is unloaded")
            waiting[name] = min(number * model.block_units, in_hbm)
        needed: dict[str, float] | None = None if demands is None else {}
        for name, rate in (demands or {}).items():
            model = self.find(name)
            if needed is None or not model.has_quotas:
                raise ArgumentError(f"{name!r} is unloaded, and has no demand")
            needed[name] = demand(rate, 1, model.block_units)
        self._targets.follow(self._by_name, waiting, elapsed_s, settings, needed)

    def follow(self) -> None:
        """Lets the quotas follow models that have come or gone, and changed rules."""
        self._targets.follow(self._by_name, {}, 0.0, None)

    def quotas(self) -> dict[str, ModelQuota]:
        """What each model may have and has, at one moment."""
        (in_hbm, hbm), (in_dram, dram) = self._core._tiers()
        return {
            name: ModelQuota(
                tier_quota(hbm[model.number], in_hbm, self._unit),
                tier_quota(dram[model.number], in_dram, self._unit),
                model.rules["hbm"].weight,
                model.block_units * self._unit,
                model.waste,
                model.state == "kept",
            )
            for name, model in self._by_name.items()
        }

    def _check_reserves(self, name: str, rules: Rules, number: int | None = None) -> None:
        """Raises ArgumentError if the reserves would exceed a capacity. `number`: of a model that has rules."""
        for tier, (capacity, uses) in zip(TIERS, self._core._tiers(), strict=True):
            others = sum(use[0] for at, use in enumerate(uses) if at != number)
            reserve = rules[tier].reserve
            if reserve + others > capacity:
                raise ArgumentError(
                    f"{name!r}: a reserve of {reserve} units of {tier.upper()} does not fit beside the {others} that "
                    f"others have reserved, of {capacity}",
                    reserve=reserve,
                    capacity=capacity,
                )

    def _set_rules(self, name: str, model: Model, rules: Rules) -> None:
        self._check_reserves(name, rules, model.number)
        numbers = []
        for tier, (capacity, _) in zip(TIERS, self._core._tiers(), strict=True):
            rule = rules[tier]
            whole = capacity // model.block_units * model.block_units
            most = whole if rule.limit is None else min(rule.limit, whole)
            numbers.append((rule.reserve, max(most, rule.reserve), 0))
        self._core._set_rules(model.number, name, *numbers)
