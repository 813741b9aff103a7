"""Several models in one memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

from kvpool import _core
from kvpool.arguments import flag_from, int_from, seconds_from, shown
from kvpool.config import Settings, check_names, load
from kvpool.errors import ArgumentError, ArgumentTypeError, ClosedError, ForkError, Unsupported
from kvpool.policy.quotas import Adaptation
from kvpool.space.leaving import drained, keep_in_dram
from kvpool.space.model import ModelPool, check_name
from kvpool.space.models import Models
from kvpool.space.records import ModelQuota, SpaceStats, SpaceTier
from kvpool.space.rules import SAME, Sizes, rules_of
from kvpool.space.units import UNITS_MAX, Pieces, bytes_from, padding, pieces_of, unit_from, units_of
from kvpool.types import DRAM, HBM, KVLayout, RawLayout

__all__ = ["Space"]

Keep = Literal["dram", "none"]

_MODELS_MAX: Final = 16
_WASTE_MAX: Final = 0.05


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
        unit: Bytes of a unit, a power of two from 4 to 64 KiB; a tier has at most 2^24 of them. "auto": the largest
            that leaves at most 1 % of a block empty for each of `layouts`, or 4 KiB; larger where a tier has too many.
        layouts: Of the models that will be loaded, for ``unit="auto"``.
        pieces: How they will be loaded, for ``unit="auto"``: with "layer", the layers of all `layouts` that have layers
            are multiples of the unit, where 4 KiB divide them and a tier has not too many.
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
        pieces: Pieces = "whole",
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
        in_hbm, in_dram = bytes_from(hbm, "hbm"), bytes_from(dram, "dram")
        self.unit_bytes: int = unit_from(unit, layouts, max(in_hbm, in_dram), pieces)
        self.activations: int = bytes_from(activations, "activations")
        if self.activations > in_hbm:
            raise ArgumentError(f"activations are {self.activations} bytes, and hbm has {in_hbm}")
        units = [(in_hbm - self.activations) // self.unit_bytes, in_dram // self.unit_bytes]
        if max(units) > UNITS_MAX or sum(units) == 0:
            raise ArgumentError(f"a space has from 1 to {UNITS_MAX} units in a tier, and this has {units}")
        self._settings = dict(settings)
        own: Settings = load(**settings)
        self._core = _core.Space(
            unit_bytes=self.unit_bytes, hbm_units=units[0], dram_units=units[1], models_max=models_max,
            copy_threads=own.copy_threads, huge_pages=own.huge_pages, numa_node=own.numa_node,
            check_memory=own.check_memory,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._models = Models(self._core, self.unit_bytes)
        self._closed = False
        self._process = os.getpid()

    # --- models ---

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models that are loaded."""
        with self._opened():
            return self._models.loaded

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
        pieces: Pieces = "whole",
        **settings: Any,
    ) -> ModelPool:
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
            pieces: "whole": a block lies in one run of units. "layer": a block that finds no run takes one for each of
                its layers, so that nearly all of the memory can be used. Its kernels read by `block_table` and `pages`;
                such a pool has no `tensor`, attention or keyed caches, and exchanges blocks with peers by the routes
                "loopback" and "sock" alone. A layer must be whole units.
            **settings: Fields of kvpool.Settings for this pool, above those of the space. Those of a kept pool stay.

        Returns:
            A Pool with all verbs, and `block_table`, for this model alone: a separate instance in a cluster. Addresses
            of another model of the space raise NotOwner. Its `close()` ends the model, and leaves the units of blocks
            that are still active unused; `unload` refuses that instead.

        Raises:
            ArgumentError: The name is taken, a size or weight is wrong, the reserve is above the limit, or the
                reserves together exceed the capacity; the layout is discrete, wastes too much, does not fit, or has no
                layers of whole units; a setting or `pieces` differs from that of the pool that is kept.
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
        pieces_of(layout, self.unit_bytes, pieces)  # refuses what cannot be cut
        sizes: Sizes = {"hbm": (reserve, limit), "dram": (dram_reserve, dram_limit)}
        rules = rules_of(sizes, weight, units_of(layout, self.unit_bytes), self.unit_bytes)
        with self._opened():
            return self._models.load(name, layout, rules, own, settings, pieces)

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
        with self._opened():
            model, before = self._models.begin_unload(name)
        try:
            drained(name, model, time.monotonic() + seconds)
            stays = keep == "dram" and keep_in_dram(model)
            if not stays:
                model.pool.close()  # drops its cache
        except BaseException:
            with self._lock:
                self._models.cancel_unload(model, before)
            raise
        with self._lock:
            self._models.end_unload(name, model, stays)
            if not self._closed:
                self._models.follow()

    # --- quotas ---

    def set_quota(
        self,
        name: str,
        *,
        reserve: int | str = SAME,
        limit: int | str | None = SAME,
        weight: float = SAME,
        dram_reserve: int | str = SAME,
        dram_limit: int | str | None = SAME,
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
        sizes: Sizes = {"hbm": (reserve, limit), "dram": (dram_reserve, dram_limit)}
        with self._opened():
            self._models.set_quota(name, sizes, weight)

    def adapt(
        self,
        backlog: Mapping[str, int] | None = None,
        *,
        demands: Mapping[str, float] | None = None,
        elapsed_s: float | None = None,
        settings: Adaptation | None = None,
    ) -> None:
        """Lets the quotas follow what the models need: moving averages of their active blocks and their backlogs.

        Call it every second or so; there is no thread that does. Quotas change all together, and only when one would
        change by more than the hysteresis (policy.quotas.adapt). They decide whose cache goes first, so a call
        that comes late breaks no guarantee.

        Args:
            backlog: By name of model, how many HBM blocks its waiting requests ask for. More than the capacity counts
                as the capacity.
            demands: By name of model, what its requests need by their rate, in blocks: policy.quotas.demand with 1 /
                block_tokens units a token. Models that all need more than there is then share it in proportion to
                weight * demand, in both tiers (MuxServe §3.3); one that is not named shares as if it needed nothing.
                None: in proportion to what they need.
            elapsed_s: Seconds since the last call; None: by the clock.
            settings: Half-life and hysteresis.

        Raises:
            ArgumentError: A name is unknown or unloaded, or a number negative or not finite.
            ArgumentTypeError, ClosedError: As everywhere.
        """
        if elapsed_s is not None:
            elapsed_s = seconds_from(elapsed_s, "elapsed_s")
        if settings is not None and not isinstance(settings, Adaptation):
            raise ArgumentTypeError(f"settings must be an Adaptation, not {type(settings).__name__}")
        if backlog is not None and not isinstance(backlog, Mapping):
            raise ArgumentTypeError(f"backlog must be a mapping, not {type(backlog).__name__}")
        if demands is not None and not isinstance(demands, Mapping):
            raise ArgumentTypeError(f"demands must be a mapping, not {type(demands).__name__}")
        with self._opened():
            self._models.adapt(backlog or {}, demands, elapsed_s, settings)

    def quotas(self) -> dict[str, ModelQuota]:
        """What each model may have and has, at one moment, those whose cache is kept among them."""
        with self._opened():
            return self._models.quotas()

    # --- state ---

    def stats(self) -> SpaceStats:
        """The memory, and every model's pool."""
        with self._opened():
            models = {name: pool.stats() for name, pool in self._models.pools()}
            return SpaceStats(
                self.unit_bytes,
                self.activations,
                self._tier(HBM),
                self._tier(DRAM),
                self._core._metadata_bytes() + sum(each.metadata_bytes for each in models.values()),
                models,
            )

    def _tier(self, medium: int) -> SpaceTier:
        return SpaceTier(**{what: units * self.unit_bytes for what, units in self._core._counts(int(medium)).items()})

    def audit(self) -> SpaceStats:
        """Checks every invariant of the space, its quotas and its pools, and returns the stats.

        Visits every unit, block and node. Raises AuditError when an invariant is broken: a bug in kvpool, or
        overwritten memory.
        """
        with self._opened():
            self._core._audit()
            for _, pool in self._models.pools():
                pool.audit()
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
            models = self._models.clear()
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

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Under the lock. In a forked child it raises before: another thread may have had the lock."""
        self._check_open()
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ForkError("the space belongs to the process that made it, which has forked this one")
        if self._closed:
            raise ClosedError("the space is closed")
