"""The stores of a HiCache: one for each of SGLang's host pools, all with as many pages."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.engines.keyed_members import KeyedMembers
from kvpool.engines.membership import Membership
from kvpool.engines.packing import marked
from kvpool.engines.sglang.options import HiCacheOptions
from kvpool.engines.sglang.pages import host_pieces
from kvpool.engines.sglang.store import AdoptedStore, FlatStore, Store, drop_all, flat_page_bytes
from kvpool.errors import Unsupported

__all__ = ["KV", "Storages"]

KV = "kv"

_log = logging.getLogger("kvpool.engines.sglang")


class Storages:
    """Made once all host pools are known, since they share the memory.

    Several threads may use stores at once, but none while `clear` runs: what a save stored after it would have been
    computed before it, and a page that a load holds would stay.

    Args:
        options: How much memory, and which cluster.
        rank: Which part of each page this rank has, of how many: members with the same part ask each other.
        replica: Which of the engine's data-parallel replicas it is in: they have the same `rank`, and other names.
    """

    def __init__(self, options: HiCacheOptions, rank: str, replica: int = 0) -> None:
        self._options = options
        self._rank = rank
        self._engine = options.name or f"hicache-{secrets.token_hex(8)}"
        if replica:
            self._engine += f"-dp{replica}"
        self._hosts: dict[str, Any] = {}
        self._stores: dict[str, Store] = {}
        self._changed = threading.Condition()
        self._users = 0
        self._clearing = False

    def add(self, name: str, host_pool: Any) -> None:
        """A host pool of SGLang's. One that comes after `build` is not stored: what names it misses."""
        if self._stores:
            _log.warning("SGLang has added the host pool %s to a cache that runs; kvpool does not keep its pages", name)
            return
        self._hosts[name] = host_pool

    def build(self) -> None:
        """Makes the stores.

        Raises:
            ArgumentError: Not even one page fits into the memory.
            OutOfMemory: The machine has not so much memory.
            Whatever `Cluster.join` and `Pool.attach` raise.
            Unsupported, LayoutMismatch: A host pool's pages are of no kind that kvpool knows, or SGLang does not give
                them out one by one, or they have no bytes.
        """
        pieces = {name: host_pieces(host) for name, host in self._hosts.items()}
        sizes = {
            name: flat_page_bytes(self._hosts[name]) if own is None else sum(piece.shape[1] for piece in own)
            for name, own in pieces.items()
        }
        for name, size in sizes.items():
            if not size:
                raise Unsupported(f"the pages of SGLang's host pool {name} have no bytes", name=name)
        pages = self._options.pages(sum(sizes.values()))
        try:
            for name, own in pieces.items():
                part, settings = self._part(name), self._settings(name)
                store = self._stores[name] = (
                    FlatStore(self._hosts[name], pages, part, **settings)
                    if own is None
                    else AdoptedStore(own, pages, part, **settings)
                )
                self._join(name, store)
        except BaseException:
            self.close()
            raise
        _log.info("kvpool keeps %d pages of %s bytes in DRAM", pages, sizes)

    @contextmanager
    def use(self, name: str) -> Iterator[Store | None]:
        """The store of a pool of this name; None for a pool that is not kept. Waits for `clear`; do not nest it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._clearing)
            self._users += 1
        try:
            yield self._stores.get(name)
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def clear(self) -> None:
        """Drops all pages, after the copies that are under way.

        From now on those of other members are not found here, nor these by them, until they were cleared as often.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._clearing)
            self._clearing = True
            self._changed.wait_for(lambda: not self._users)
        try:
            for store in self._stores.values():
                drop_all(store)
        finally:
            with self._changed:
                self._clearing = False
                self._changed.notify_all()

    def close(self) -> None:
        """Gives all memory back. Idempotent."""
        stores, self._stores = self._stores, {}
        for store in stores.values():
            if store.members is not None:
                store.members.close()
            store.cache.close()
            store.pool.close()

    def _settings(self, name: str) -> dict[str, Any]:
        """Of the pool of a store. Its model says how pages are packed, too: see `kvpool.engines.packing`."""
        options = self._options
        if not options.cluster:
            return {}
        model = marked(options.model, _packing(self._hosts[name]))
        return {"model": model, "name": f"{self._engine}-{self._part(name)}"}

    def _join(self, name: str, store: Store) -> None:
        """Makes a store a member of the cluster, if there is one."""
        options = self._options
        if options.cluster:
            membership = Membership(store.pool, options.cluster, "both", options.listen, options.cluster_options)
            ending = f"-{self._part(name)}"
            store.members = KeyedMembers(store.pool, store.cache, membership, ending, options.fetch_timeout_s)

    def _part(self, name: str) -> str:
        """What the pages of a store are, in the same words at each member. Nobody fetches those of another rank."""
        return f"{name}-{self._rank}"


def _packing(host: Any) -> str:
    """What the bytes of a page depend on beside the tokens and the model, as text."""
    facts = (type(host).__name__, getattr(host, "layout", ""), host.dtype, f"{host.page_size} tokens")
    return " ".join(map(str, facts))
