"""The memory of vLLM's secondary tier: a pool whose DRAM a keyed cache has, for one engine or several of a process."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpool import _core
from kvpool.engines.given import check_known, check_memory
from kvpool.engines.vllm.options import GIB
from kvpool.errors import ArgumentError, ArgumentTypeError, LayoutMismatch
from kvpool.pool import Pool
from kvpool.types import RawLayout

__all__ = ["Keys", "TierOptions", "TierStore", "close_store", "open_store"]

_DIGEST_BYTES = 36  # vLLM's keys with its default hash: SHA-256, and four bytes for the group of layers
_NAMESPACE_BYTES = 16


_WHERE: Final = "the tier kvpool"


@dataclass(frozen=True)
class TierOptions:
    """The options of a tier, which stand beside its ``type`` in ``secondary_tiers``.

    Attributes:
        dram_gib: Host memory for the tier, in GiB.
        dram_blocks: The same in blocks of the primary tier; takes the place of `dram_gib`.
        store: A name: all tiers of the process that give it share one memory, which stays until `close_store`.
        model: A fingerprint of the model and its attention. A store needs it: a tier finds the blocks of those tiers
            that have the same.
    """

    dram_gib: float = 4.0
    dram_blocks: int | None = None
    store: str | None = None
    model: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierOptions:
        """Reads the configuration of the tier.

        Raises:
            ArgumentError: An option is unknown or out of range; the memory is given twice; or a store has no model.
            ArgumentTypeError: An option has the wrong type.
        """
        check_known(_WHERE, given, list(cls.__dataclass_fields__))
        check_memory(_WHERE, given, "dram_blocks")
        options = cls(**given)
        if given.get("store", "none") == "" or not isinstance(options.store, str | None):
            raise ArgumentTypeError("the tier kvpool: store must be a name")
        if not isinstance(options.model, str):
            raise ArgumentTypeError("the tier kvpool: model must be a text")
        if options.store is not None and not options.model:
            raise ArgumentError(
                f"the tier kvpool: the store {options.store} needs the option model. vLLM does not tell its tiers all "
                "that blocks depend on: give another text for each revision, quantization and setting of the model, "
                "and for each attention backend"
            )
        return options

    def blocks(self, block_bytes: int) -> int:
        """How many blocks the tier holds. Raises ArgumentError if not even one fits."""
        if self.dram_blocks is not None:
            return self.dram_blocks
        blocks = int(self.dram_gib * GIB) // block_bytes
        if not blocks:
            raise ArgumentError(
                f"the tier kvpool: dram_gib is {self.dram_gib}, and a block of vLLM's primary tier has {block_bytes} "
                "bytes",
                block_bytes=block_bytes,
            )
        return blocks


class Keys:
    """VLLM's keys as the store takes them. They say nothing of the model, so that a namespace precedes each.

    Args:
        identity: All that content depends on beside the tokens, as JSON has it.
    """

    BYTES = _NAMESPACE_BYTES + _DIGEST_BYTES

    def __init__(self, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True)
        self._namespace = hashlib.blake2b(text.encode(), digest_size=_NAMESPACE_BYTES).digest()

    def of(self, keys: Iterable[bytes]) -> list[bytes]:
        """The keys, all of one length: those of another hash are hashed to it."""
        namespace = self._namespace
        return [
            namespace + (key if len(key) == _DIGEST_BYTES else hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest())
            for key in keys
        ]


class TierStore:
    """Blocks of bytes under keys. Thread-safe. Errors of kvpool go through.

    Args:
        block_bytes: Of each.
        blocks: How many it holds.
        name: Of the pool, in errors; and of the store.

    Raises:
        OutOfMemory: The machine has not so much memory.
    """

    def __init__(self, block_bytes: int, blocks: int, name: str | None = None) -> None:
        settings: dict[str, Any] = {} if name is None else {"name": name}
        self.name = name
        self.pool = Pool(RawLayout(block_bytes), dram_blocks=blocks, **settings)
        self.cache = _core.KeyedCache(self.pool, blocks, Keys.BYTES)

    def pin(self, key: bytes) -> _core.KeyedMatch | None:
        """Pins a block until the match is closed; None if it is not stored."""
        hit = self.cache.match([key])
        if hit.first:
            return hit
        hit.close()
        return None

    def touch(self, keys: list[bytes]) -> None:
        """Counts as a use of those that are stored: of these the first is dropped last."""
        self.cache.match(keys, every=True).close()

    def save(self, keys: list[bytes], rows: Sequence[Any]) -> int:
        """Stores what is not stored yet, each block from its row, the last first: without room the first are kept.

        Returns:
            How many were not stored yet.

        Raises:
            OutOfBlocks: All that is stored is pinned. What was stored until then stays.
        """
        with self.cache.match(keys, every=True) as held:
            missing = [at for at, found in enumerate(held.found) if not found]
            for at in reversed(missing):
                self.cache.put([keys[at]], rows[at])
        self.touch(keys)
        return len(missing)

    def load(self, keys: list[bytes], rows: Sequence[Any], tried: list[bool]) -> None:
        """Fills the rows of those that are stored; adds to `tried`, for one after the other, whether it has."""
        for key, row in zip(keys, rows, strict=True):
            tried.append(bool(self.cache.get([key], row)))

    def close(self) -> None:
        """Gives the memory back. Idempotent. Nothing is stored from now on, and nothing found."""
        self.cache.close()
        self.pool.close()


_named: dict[tuple[int, str], TierStore] = {}  # by process, since a fork has no use for its parent's
_lock = threading.Lock()


def open_store(options: TierOptions, block_bytes: int) -> TierStore:
    """A store with a name, which several may open; or one without, which its opener closes.

    Raises:
        ArgumentError: Not even one block fits; or a store of this name has another size.
        LayoutMismatch: A store of this name has blocks of another size.
        OutOfMemory: The machine has not so much memory.
    """
    blocks = options.blocks(block_bytes)
    if options.store is None:
        return TierStore(block_bytes, blocks)
    with _lock:
        there = _named.get((os.getpid(), options.store))
        if there is None:
            there = _named[os.getpid(), options.store] = TierStore(block_bytes, blocks, options.store)
        if there.cache.block_bytes != block_bytes:
            raise LayoutMismatch(
                f"the store {options.store} has blocks of {there.cache.block_bytes} bytes, and this engine's primary "
                f"tier of {block_bytes}: give engines whose blocks differ stores of different names",
                block_bytes=block_bytes,
            )
        held = there.pool.stats().dram.capacity
        if held != blocks:
            raise ArgumentError(
                f"the store {options.store} has {held} blocks, and {blocks} are asked for: give the same size in all "
                "engines that share it",
                blocks=blocks,
            )
        return there


def close_store(name: str) -> bool:
    """Drops a store with a name, and gives its memory back. Engines that use it find nothing from now on.

    Call it when the weights were changed, too: vLLM does not tell its tiers.

    Returns:
        Whether there was one.
    """
    with _lock:
        there = _named.pop((os.getpid(), name), None)
    if there is None:
        return False
    there.close()
    return True
