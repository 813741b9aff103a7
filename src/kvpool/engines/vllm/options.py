"""What a user may set: ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["GIB", "Options"]

GIB = 1 << 30

# vLLM itself notices workers that hang. One that gets no CPU for a while is to keep its part of the cache.
_LEASE_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """The options of a connector.

    Attributes:
        dram_gib: Host memory for the cache, in GiB, of all workers together.
        dram_blocks: The same in blocks of vLLM; takes the place of `dram_gib`.
        async_load: Load while other requests compute, instead of before the step. The request waits for it outside the
            batch. Pays off where a load takes longer than a step.
        name: The pool's name, in logs and errors.
    """

    dram_gib: float = 4.0
    dram_blocks: int | None = None
    async_load: bool = False
    name: str | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Reads ``kv_connector_extra_config``.

        Raises:
            ArgumentError: An option is unknown or out of range; or the memory is given twice.
            ArgumentTypeError: An option has the wrong type.
        """
        known = list(cls.__dataclass_fields__)
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ArgumentError(
                f"kv_connector_extra_config has {', '.join(unknown)}, which KvpoolConnector does not know; it knows "
                f"{', '.join(known)}",
                unknown=unknown,
            )
        if "dram_gib" in extra and extra.get("dram_blocks") is not None:
            raise ArgumentError("kv_connector_extra_config: give dram_gib or dram_blocks, not both")
        options = cls(**extra)
        _check("dram_gib", options.dram_gib, (int, float), options.dram_gib)
        if options.dram_blocks is not None:
            _check("dram_blocks", options.dram_blocks, (int,), options.dram_blocks)
        if not isinstance(options.async_load, bool):
            raise ArgumentTypeError("kv_connector_extra_config: async_load must be true or false")
        if options.name is not None and not isinstance(options.name, str):
            raise ArgumentTypeError("kv_connector_extra_config: name must be a text")
        return options

    @property
    def settings(self) -> dict[str, Any]:
        """Of the pools. The connection of a worker that has ended is closed at once; the lease is for silent ones."""
        return {"lease_s": _LEASE_SECONDS} | ({} if self.name is None else {"name": self.name})

    def blocks(self, block_bytes: int, workers: int = 1) -> int:
        """How many blocks of DRAM a worker's pool gets.

        Args:
            block_bytes: Of the worker's part of a block.
            workers: That share the memory.

        Raises:
            ArgumentError: Not even one fits.
        """
        if self.dram_blocks is not None:
            return self.dram_blocks
        blocks = int(self.dram_gib * GIB) // (block_bytes * workers)
        if not blocks:
            raise ArgumentError(
                f"kv_connector_extra_config: dram_gib is {self.dram_gib}, and a block of this model has {block_bytes} "
                "bytes",
                block_bytes=block_bytes,
            )
        return blocks


def _check(name: str, value: object, types: tuple[type, ...], number: float) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise ArgumentTypeError(f"kv_connector_extra_config: {name} must be a number, not {type(value).__name__}")
    if not 0 < number < 1 << 40:  # not NaN either
        raise ArgumentError(f"kv_connector_extra_config: {name} is {number}; it must be above 0", value=number)
