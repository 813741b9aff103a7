"""Several models in one memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, cast

from kvpool import _core
from kvpool.arguments import flag_from, int_from, seconds_from, shown
from kvpool.config import Settings, check_names, load
from kvpool.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    ForkError,
    LayoutMismatch,
    StateError,
    Unsupported,
)
from kvpool.policy.multiplexing import Adaptation, QuotaRule
from kvpool.pool import Pool
from kvpool.space.leaving import drained, keep_in_dram
from kvpool.space.model import TIERS, Model, ModelPool, Rules, check_name, rule_of
from kvpool.space.quotas import Targets
from kvpool.space.records import ModelQuota, SpaceStats, SpaceTier, tier_quota
from kvpool.space.units import bytes_from, padding, unit_from
from kvpool.types import DRAM, HBM, KVLayout, RawLayout

__all__ = ["Space"]

Keep = Literal["dram", "none"]

_MODELS_MAX: Final = 16
_UNITS_MAX: Final = (1 << 32) - 1
_WASTE_MAX: Final = 0.05
_SAME: Final[Any] = object()  # an argument that was not given


class Space:
    """Memory that several models share, each through a separate pool.

    The memory is counted in units. A block of a model is a run of units, so models whose blocks have different sizes
    use the same bytes, and no model has memory that others cannot use. What a model may have is set by its quotas
    (docs/how-to/many-models.md), which C++ enforces at every allocation:

    - The sum over models of max(active, reserve) never exceeds the capacity. So evicting prompt caches always frees
      enough units for a model's reserve, and nothing active is ever taken. Its blocks also need places: where others
      have smaller active blocks in every place, a model with larger blocks cannot reach its reserve until they end.
    - An allocation takes what is free; then what neighbours have cached beyond their quotas, the one furthest beyond
      first; then the model's own cache; then neighbours' caches down to their reserves. From HBM, blocks go to DRAM as
      far as their owner's quota there allows, and are dropped otherwise. If the quotas do not admit it, it raises
      OutOfQuota.

    Thread-safe. A method that raises has changed nothing, except that an allocation which fails for want of places
    may have dropped caches of any model, down to reserves. A space belongs to the process that made it: in a child of
    `fork` every method raises ForkError, and close() does nothing. Use it in a ``with``, or call ``close()``.

    Args:
        hbm: Bytes of the device tier, or a str such as "8GiB". Rounded down to whole units.
        dram: Bytes of the host tier.
        unit: Bytes of a unit, a power of two from 4 to 64 KiB. "auto": the largest that leaves at most 1 % of a block
            empty for each of `layouts`, or 4 KiB.
        layouts: Of the models that will be loaded, for ``unit="auto"``.
        device: "cpu". GPUs are not supported yet.
        activations: Bytes of `hbm` that are left to the engines, for activations. The space does not allocate them.
        models_max: How many models, at most 16, the space has at a time. Unloaded ones count until their Pool objects
            are gone. They share the 2^23 generations that a block's address can have.
        **settings: Fields of kvpool.Settings for all pools.

    Raises:
        ArgumentError, ArgumentTypeError: A size, unit, name or number is wrong.
        OutOfMemory: The machine or its cgroup has too little memory.
        Unsupported: The device is a GPU.
    """

    def __init__(
        self,
        hbm: int | str = 0,
        dram: int | str = 0,
        *,
        unit: int | str = "auto",
        layouts: Sequence[KVLayout | RawLayout] = (),
        device: str = "cpu",
        activations: int | str = 0,
        models_max: int = _MODELS_MAX,
        **settings: Any,
    ) -> None:
        """See the class."""
        check_names(settings, Space.__init__)
        if not isinstance(device, str):
            raise ArgumentTypeError(f"device must be a str, not {type(device).__name__}")
        if device != "cpu":
            raise Unsupported(f"a space is on the CPU, and device is {shown(device)}: GPUs are not supported yet")
        if not 2 <= int_from(models_max, "models_max") <= _MODELS_MAX:
            raise ArgumentError(f"models_max is {shown(models_max)}; it must be from 2 to {_MODELS_MAX}")
        self.unit_bytes: int = unit_from(unit, layouts)
        self.activations: int = bytes_from(activations, "activations")
        in_hbm, in_dram = bytes_from(hbm, "hbm"), bytes_from(dram, "dram")
        if self.activations > in_hbm:
            raise ArgumentError(f"activations are {self.activations} bytes, and hbm has {in_hbm}")
        units = [(in_hbm - self.activations) // self.unit_bytes, in_dram // self.unit_bytes]
        if max(units) > _UNITS_MAX or sum(units) == 0:
            raise ArgumentError(f"a space has from 1 to {_UNITS_MAX} units in a tier, and this has {units}")
        self._settings = dict(settings)
        own: Settings = load(**settings)
        self._core = _core.Space(
            unit_bytes=self.unit_bytes, hbm_units=units[0], dram_units=units[1], models_max=models_max,
            copy_threads=own.copy_threads, huge_pages=own.huge_pages, numa_node=own.numa_node,
            check_memory=own.check_memory,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._models: dict[str, Model] = {}
        self._targets = Targets(self._core)
        self._closed = False
        self._process = os.getpid()

    # --- models ---

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that are loaded."""
        self._check_open()
        with self._lock:
            return tuple(name for name, model in self._models.items() if model.state != "kept")

    def load(
        self,
        name: str,
        layout: KVLayout | RawLayout,
        *,
        reserve: int | str = 0,
        limit: int | str | None = None,
        weight: float = 1.0,
        dram_reserve: int | str = 0,
        dram_limit: int | str | None = None,
        allow_waste: bool = False,
        **settings: Any,
    ) -> Pool:
        """Makes a model's pool.

        A model whose cache `unload` has kept gets its pool back, with that cache, if the layout is the same. If that
        pool was closed meanwhile, the model gets a new one.

        Args:
            name: Of the model, for this space, its errors and its statistics.
            layout: Of its blocks, aggregated.
            reserve: Bytes of HBM that it can always have, rounded up to whole blocks.
            limit: Bytes of HBM that it never exceeds, rounded down to whole blocks; None: all.
            weight: Its part of what is scarce, relative to other models with the same demand.
            dram_reserve: As `reserve`, of DRAM.
            dram_limit: As `limit`, of DRAM.
            allow_waste: Accept a layout whose blocks leave more than 5 % of their units empty.
            **settings: Fields of kvpool.Settings for this pool, above those of the space. Those of a kept pool stay.

        Returns:
            A Pool with all verbs, for this model alone: a separate instance in a cluster. Addresses of another
            model of the space raise NotOwner. Its `close()` ends the model, and leaves the units of blocks that are
            still active unused; `unload` refuses that instead.

        Raises:
            ArgumentError: The name is taken, a size or weight is wrong, the reserve is above the limit, or the
                reserves together exceed the capacity; the layout is discrete, wastes too much, or does not fit; a
                setting differs from that of the pool that is kept.
            OutOfQuota: The reserve does not fit beside what other models have active now.
            LayoutMismatch: The model's cache is kept with another layout.
            StateError: The space has `models_max` models.
            ArgumentTypeError, ClosedError: As everywhere.
        """
        if not isinstance(layout, KVLayout | RawLayout):
            raise ArgumentTypeError(f"layout must be a KVLayout or a RawLayout, not {type(layout).__name__}")
        check_name(name)
        check_names(settings, Space.load)
        own: Settings = load(**{**self._settings, **settings})
        wasted = padding(layout, self.unit_bytes)
        if not flag_from(allow_waste, "allow_waste") and wasted > _WASTE_MAX:
            raise ArgumentError(
                f"blocks of {layout.block_bytes} bytes leave {wasted:.1%} of their units of {self.unit_bytes} bytes "
                "empty: make the unit smaller or the blocks larger, or pass allow_waste=True",
                waste=wasted,
            )
        block_units = -(-layout.block_bytes // self.unit_bytes)
        block_bytes = block_units * self.unit_bytes
        rules: Rules = {
            "hbm": rule_of(reserve, limit, weight, block_bytes, block_units, "HBM"),
            "dram": rule_of(dram_reserve, dram_limit, weight, block_bytes, block_units, "DRAM"),
        }
        self._check_open()
        with self._lock:
            self._check_open()
            kept = self._models.get(name)
            if kept is not None and kept.state != "kept":
                raise ArgumentError(f"the space has a model {name!r} already")
            if kept is not None and not kept.pool.closed:
                return self._revive(name, kept, layout, rules, {field: getattr(own, field) for field in settings})
            self._check_reserves(name, rules)
            pool = ModelPool(self._core, layout, own, self.unit_bytes)
            model = Model(pool, pool._space_number, layout, self.unit_bytes, rules)
            try:
                self._set_rules(name, model, rules)
                self._models[name] = model  # instead of one that was kept, and whose pool was closed
                self._follow()
            except BaseException:
                self._models.pop(name, None)
                pool.close()
                raise
            return pool

    def _revive(
        self, name: str, model: Model, layout: KVLayout | RawLayout, rules: Rules, settings: Mapping[str, object]
    ) -> Pool:
        first = f"unload {name!r} with keep='none' first"
        if model.layout != layout:
            raise LayoutMismatch(f"the cache of {name!r} is kept with another layout: {first}")
        for field, value in settings.items():
            if getattr(model.pool.settings, field) != value:
                was = shown(getattr(model.pool.settings, field))
                raise ArgumentError(f"the pool of {name!r} is kept with {field}={was}, not {shown(value)}: {first}")
        self._set_rules(name, model, rules)
        model.rules = rules
        model.state = "loaded"
        self._core._hold(model.number, held=False)
        self._follow()
        return model.pool

    def unload(self, name: str, keep: Keep = "none", drain: float = 30.0) -> None:
        """Ends a model. Its memory is free for the others.

        Waits until nothing of the model is in use. Meanwhile it may have no more blocks: alloc raises OutOfQuota, and
        match finds only what is pinned already. Then, unless its cache is kept, its pool leaves its cluster and is
        closed. A model whose pool is closed meanwhile, alone or with the space, is unloaded without its cache.

        Args:
            name: Of the model.
            keep: "none": its prompt cache is dropped. "dram": what was used last, as much as has room in DRAM, stays
                there, without a reserve, until `load` or until others need the room. The pool is not closed, and stays
                in its cluster: load returns it again.
            drain: Seconds to wait.

        Raises:
            DeadlineExceeded: It still has active blocks, pins, or blocks that peers use. It goes on as before.
            ArgumentError: No model has the name, or `keep` is another word.
            StateError: Another thread unloads it.
            ArgumentTypeError, ClosedError: As everywhere.
        """
        if keep not in ("dram", "none"):
            raise ArgumentError(f"keep is {shown(keep)}; it must be 'dram' or 'none'")
        seconds = seconds_from(drain, "drain")
        self._check_open()
        with self._lock:
            model = self._model(name)
            if model.state == "leaving":
                raise StateError(f"another thread unloads {name!r}")
            before = model.state
            model.state = "leaving"
            self._core._hold(model.number, held=True)
        try:
            drained(name, model, time.monotonic() + seconds)
            stays = keep == "dram" and keep_in_dram(model)
            if not stays:
                model.pool.close()  # drops its cache
        except BaseException:
            with self._lock:
                model.state = before
                self._core._hold(model.number, held=before == "kept")
            raise
        with self._lock:
            if stays:
                nothing, limit = QuotaRule(0, None, 1.0), QuotaRule(0, model.rules["dram"].limit, 1.0)
                try:
                    self._set_rules(name, model, {"hbm": nothing, "dram": limit})
                except StateError:  # it was closed just now
                    stays = False
            if stays:
                model.state = "kept"
            else:
                self._models.pop(name, None)
            if not self._closed:
                self._follow()

    # --- quotas ---

    def set_quota(
        self,
        name: str,
        *,
        reserve: int | str = _SAME,
        limit: int | str | None = _SAME,
        weight: float = _SAME,
        dram_reserve: int | str = _SAME,
        dram_limit: int | str | None = _SAME,
    ) -> None:
        """Changes what a model may have, at once. What is not given stays.

        Nothing active is taken, and nothing is evicted: what a model has above a lower limit goes when it next needs
        memory, or when others do.

        Args:
            name: Of the model.
            reserve: As in `load`.
            limit: As in `load`.
            weight: As in `load`.
            dram_reserve: As in `load`.
            dram_limit: As in `load`.

        Raises:
            ArgumentError, OutOfQuota, ArgumentTypeError, ClosedError: As `load`; or no model has the name.
            StateError: The model is unloaded, or its pool was closed.
        """
        self._check_open()
        with self._lock:
            model = self._model(name)
            units, old = model.block_units, model.rules
            if model.state == "kept":
                raise StateError(f"{name!r} is unloaded: load it with its quotas")
            if model.pool.closed:
                raise StateError(f"the pool of {name!r} is closed: unload it, and load it again")
            share = old["hbm"].weight if weight is _SAME else weight
            rules: Rules = {
                "hbm": self._changed(old["hbm"], reserve, limit, share, units, "HBM"),
                "dram": self._changed(old["dram"], dram_reserve, dram_limit, share, units, "DRAM"),
            }
            self._set_rules(name, model, rules)
            model.rules = rules
            self._follow()

    def _changed(
        self, old: QuotaRule, reserve: object, limit: object, weight: float, units: int, where: str
    ) -> QuotaRule:
        if reserve is _SAME:
            reserve = old.reserve * self.unit_bytes
        if limit is _SAME:
            limit = None if old.limit is None else old.limit * self.unit_bytes
        return rule_of(reserve, limit, weight, units * self.unit_bytes, units, where)

    def adapt(
        self,
        backlog: Mapping[str, int] | None = None,
        *,
        elapsed_s: float | None = None,
        settings: Adaptation | None = None,
    ) -> None:
        """Lets the quotas follow what the models need: moving averages of their active blocks and their backlogs.

        Call it every second or so; there is no thread that does. Quotas change all together, and only when one would
        change by more than the hysteresis (policy.multiplexing.adapt). They decide whose cache goes first, so a call
        that comes late breaks no guarantee.

        Args:
            backlog: By name of model, how many HBM blocks its waiting requests ask for. More than the capacity counts
                as the capacity.
            elapsed_s: Seconds since the last call; None: by the clock.
            settings: Half-life and hysteresis.

        Raises:
            ArgumentError: A name is unknown or unloaded, or a number negative.
            ArgumentTypeError, ClosedError: As everywhere.
        """
        waiting = {}
        if elapsed_s is not None:
            elapsed_s = seconds_from(elapsed_s, "elapsed_s")
        if settings is not None and not isinstance(settings, Adaptation):
            raise ArgumentTypeError(f"settings must be an Adaptation, not {type(settings).__name__}")
        if backlog is not None and not isinstance(backlog, Mapping):
            raise ArgumentTypeError(f"backlog must be a mapping, not {type(backlog).__name__}")
        self._check_open()
        with self._lock:
            self._check_open()
            (in_hbm, _), _ = self._core._tiers()
            for name, blocks in (backlog or {}).items():
                model = self._model(name)
                number = int_from(blocks, f"the backlog of {name!r}")
                if not model.has_quotas or number < 0:
                    raise ArgumentError(f"the backlog of {name!r} is {shown(blocks)} blocks, or it is unloaded")
                waiting[name] = min(number * model.block_units, in_hbm)
            self._targets.follow(self._models, waiting, elapsed_s, settings)

    def quotas(self) -> dict[str, ModelQuota]:
        """What each model may have and has, at one moment, those whose cache is kept among them."""
        self._check_open()
        with self._lock:
            self._check_open()
            (in_hbm, hbm), (in_dram, dram) = self._core._tiers()
            return {
                name: ModelQuota(
                    tier_quota(hbm[model.number], in_hbm, self.unit_bytes),
                    tier_quota(dram[model.number], in_dram, self.unit_bytes),
                    model.rules["hbm"].weight,
                    model.block_units * self.unit_bytes,
                    model.waste,
                    model.state == "kept",
                )
                for name, model in self._models.items()
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
        (in_hbm, _), (in_dram, _) = self._core._tiers()
        numbers = []
        for tier, capacity in (("hbm", in_hbm), ("dram", in_dram)):
            rule = rules[cast(Literal["hbm", "dram"], tier)]
            whole = capacity // model.block_units * model.block_units
            most = whole if rule.limit is None else min(rule.limit, whole)
            numbers.append((rule.reserve, max(most, rule.reserve), 0))
        self._core._set_rules(model.number, name, numbers[0], numbers[1])

    def _follow(self) -> None:
        self._targets.follow(self._models, {}, 0.0, None)

    # --- state ---

    def stats(self) -> SpaceStats:
        """The memory, and every model's pool."""
        self._check_open()
        with self._lock:
            self._check_open()
            return SpaceStats(
                self.unit_bytes,
                self.activations,
                self._tier(HBM),
                self._tier(DRAM),
                {name: model.pool.stats() for name, model in self._models.items() if not model.pool.closed},
            )

    def _tier(self, medium: int) -> SpaceTier:
        return SpaceTier(**{what: units * self.unit_bytes for what, units in self._core._counts(int(medium)).items()})

    def audit(self) -> SpaceStats:
        """Checks every invariant of the space, its quotas and its pools, and returns the stats.

        Visits every unit, block and node. Raises AuditError when an invariant is broken: a bug in kvpool, or
        overwritten memory.
        """
        self._check_open()
        with self._lock:
            self._check_open()
            self._core._audit()
            for model in self._models.values():
                if not model.pool.closed:
                    model.pool.audit()
            return self.stats()

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def close(self) -> None:
        """Ends the space: closes the pools of all models. Views of the memory stay valid. Idempotent."""
        if self._process != os.getpid():
            return
        with self._lock:
            self._closed = True
            models = list(self._models.values())
            self._models.clear()
        for model in models:
            model.pool.close()

    def __enter__(self) -> Space:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """The models, and how much is free."""
        if self._closed or self._process != os.getpid():
            return "<Space closed>" if self._closed else "<Space of another process>"
        hbm, dram = self._tier(HBM), self._tier(DRAM)
        return (
            f"<Space of {', '.join(self.models) or 'no models'}: {hbm.free} of {hbm.capacity} bytes of HBM free, "
            f"{dram.free} of {dram.capacity} of DRAM>"
        )

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ForkError("the space belongs to the process that made it, which has forked this one")
        if self._closed:
            raise ClosedError("the space is closed")

    def _model(self, name: str) -> Model:
        self._check_open()
        found = self._models.get(check_name(name))
        if found is None:
            raise ArgumentError(
                f"no model is called {name!r}; there are {', '.join(sorted(self._models)) or 'no models'}"
            )
        return found
