"""The memory of vLLM's secondary tier: a pool whose DRAM a keyed cache has, for one engine or several of a process."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpool import _core
from kvpool.engines.given import check_amount, check_cluster, check_known, check_memory, how_many
from kvpool.engines.keyed_members import KeyedMembers, cache_name
from kvpool.engines.membership import Membership
from kvpool.engines.vllm.options import replica_ending
from kvpool.errors import ArgumentError, ArgumentTypeError, LayoutMismatch
from kvpool.pool import Pool
from kvpool.types import RawLayout

__all__ = ["Keys", "TierOptions", "TierStore", "close_store", "open_store"]

_DIGEST_BYTES = 36  # vLLM's keys with its default hash: SHA-256, and four bytes for the group of layers
_NAMESPACE_BYTES = 16


_WHERE: Final = "the tier kvpool"
_OF_MEMBERS: Final = ("name", "cluster_options", "listen", "fetch_timeout_s")
_CACHE: Final = "vllm-tier"  # of all members; keys say which model and layout they are of
_ENDING: Final = "-tier"  # of the names of all members that are tiers
_LIKE: Final = ("cluster", "model", "name", "cluster_options", "listen", "fetch_timeout_s")  # of a shared member


@dataclass(frozen=True)
class TierOptions:
    """The options of a tier, which stand beside its ``type`` in ``secondary_tiers``.

    Attributes:
        dram_gib: Host memory for the tier, in GiB.
        dram_blocks: The same in blocks of the primary tier; takes the place of `dram_gib`.
        store: A name: all tiers of the process that give it share one memory, which stays until `close_store`.
        model: A fingerprint of the model and its attention. A store and a cluster need it: a tier finds the blocks of
            those tiers that have the same.
        name: Of this engine among the members of the cluster, where "-tier" is added; and "-dp0" and so on by
            data-parallel replicas.
        cluster: The URL of a cluster: what is missing here is looked for at the other members, and fetched.
        cluster_options: More for `Cluster.join`, such as ``tls_ca``, or ``lease``, which is 15 seconds by default.
        listen: The addresses for other members, as for `Pool.attach`.
        fetch_timeout_s: Seconds that a fetch may take.
    """

    dram_gib: float = 4.0
    dram_blocks: int | None = None
    store: str | None = None
    model: str = ""
    name: str | None = None
    cluster: str | None = None
    cluster_options: Mapping[str, Any] = field(default_factory=dict)
    listen: str | list[str] | None = None
    fetch_timeout_s: float = 5.0

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierOptions:
        """Reads the configuration of the tier.

        Raises:
            ArgumentError: An option is unknown or out of range; the memory is given twice; or a store or cluster has no
                model.
            ArgumentTypeError: An option has the wrong type.
        """
        check_known(_WHERE, given, list(cls.__dataclass_fields__))
        check_memory(_WHERE, given, "dram_blocks")
        options = cls(**given)
        if given.get("store", "none") == "" or not isinstance(options.store, str | None):
            raise ArgumentTypeError("the tier kvpool: store must be a name")
        if not isinstance(options.model, str):
            raise ArgumentTypeError("the tier kvpool: model must be a text")
        check_amount(_WHERE, "fetch_timeout_s", options.fetch_timeout_s, (int, float))
        check_cluster(_WHERE, given, _OF_MEMBERS)
        if (options.store is not None or options.cluster) and not options.model:
            shared = f"the cluster {options.cluster}" if options.store is None else f"the store {options.store}"
            raise ArgumentError(
                f"the tier kvpool: {shared} needs the option model. vLLM does not tell its tiers all "
                "that blocks depend on: give another text for each revision, quantization and setting of the model, "
                "and for each attention backend"
            )
        return options

    def of_engine(self, engine_id: str) -> TierOptions:
        """Those of one of vLLM's engines. Data-parallel replicas have the same: then the name says which one it is."""
        return self if self.name is None else replace(self, name=self.name + replica_ending(engine_id))

    def blocks(self, block_bytes: int) -> int:
        """How many blocks the tier holds. Raises ArgumentError if not even one fits."""
        if self.dram_blocks is not None:
            return self.dram_blocks
        return how_many(_WHERE, self.dram_gib, block_bytes, "a block of vLLM's primary tier")


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

    Attributes:
        members: Of the cluster; None without one.

    Args:
        block_bytes: Of each.
        options: How many it holds; its name, in errors; and its cluster.
        epoch: How often a store of this name was dropped: see `cache_name`.

    Raises:
        ArgumentError: Not even one block fits.
        OutOfMemory: The machine has not so much memory.
        Whatever `Cluster.join` and `Pool.attach` raise.
    """

    def __init__(self, block_bytes: int, options: TierOptions, epoch: int = 0) -> None:
        blocks = options.blocks(block_bytes)
        self.name = options.store
        self.options = options
        self.members: KeyedMembers | None = None
        name = options.name or options.store
        settings: dict[str, Any] = {} if name is None else {"name": name}
        if options.cluster:
            settings["model"] = options.model
            settings["name"] = (options.name or f"vllm-{secrets.token_hex(8)}") + _ENDING
        self.pool = Pool(RawLayout(block_bytes), dram_blocks=blocks, **settings)
        self.cache = _core.KeyedCache(
            self.pool, blocks, Keys.BYTES, cache_name(_CACHE, epoch) if options.cluster else None
        )
        if options.cluster:
            try:
                member = Membership(self.pool, options.cluster, "both", options.listen, options.cluster_options)
            except BaseException:
                self.close()
                raise
            self.members = KeyedMembers(self.pool, self.cache, member, _ENDING, options.fetch_timeout_s)

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
        """Leaves the cluster, and gives the memory back. Idempotent. Nothing is stored or found from now on."""
        if self.members is not None:
            self.members.close()
        self.cache.close()
        self.pool.close()


_named: dict[tuple[int, str], TierStore] = {}  # by process, since a fork has no use for its parent's
_dropped: dict[tuple[int, str], int] = {}  # how often; likewise
_lock = threading.Lock()


def open_store(options: TierOptions, block_bytes: int) -> TierStore:
    """A store with a name, which several may open; or one without, which its opener closes.

    Raises:
        ArgumentError: Not even one block fits; or a store of this name has another size, is in another cluster, or is a
            member of it with other options.
        LayoutMismatch: A store of this name has blocks of another size.
        OutOfMemory: The machine has not so much memory.
    """
    blocks = options.blocks(block_bytes)
    if options.store is None:
        return TierStore(block_bytes, options)
    with _lock:
        own = os.getpid(), options.store
        there = _named.get(own)
        if there is None:
            there = _named[own] = TierStore(block_bytes, options, _dropped.get(own, 0))
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
        for option in _LIKE if there.options.cluster or options.cluster else ():
            first, second = getattr(there.options, option), getattr(options, option)
            if first != second:
                raise ArgumentError(
                    f"the store {options.store} is a member of a cluster, with {option} {first}, and {second} is asked "
                    "for: give the same in all engines that share it"
                )
        return there


def close_store(name: str) -> bool:
    """Drops a store with a name, and gives its memory back. Engines that use it find nothing from now on.

    Call it when the weights were changed, too: vLLM does not tell its tiers. In a cluster stores find each other's
    blocks only if stores of their names were dropped equally often in their processes.

    Returns:
        Whether there was one.
    """
    own = os.getpid(), name
    with _lock:
        there = _named.pop(own, None)
        if there is None:
            return False
        _dropped[own] = _dropped.get(own, 0) + 1
    there.close()
    return True
