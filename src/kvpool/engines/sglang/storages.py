"""The stores of a HiCache: one for each of SGLang's host pools, all with as many pages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpool.engines.sglang.options import Options
from kvpool.engines.sglang.pages import host_pieces
from kvpool.engines.sglang.store import AdoptedStore, FlatStore, Store, flat_page_bytes
from kvpool.errors import Unsupported

__all__ = ["KV", "Storages"]

KV = "kv"

_log = logging.getLogger("kvpool.engines.sglang")


class Storages:
    """Made once all host pools are known, since they share the memory.

    Several threads may use stores at once, but none while `clear` runs: what a save stored after it would have been
    computed before it, and a page that a load holds would stay.

    Args:
        options: How much memory.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
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
                self._stores[name] = FlatStore(self._hosts[name], pages) if own is None else AdoptedStore(own, pages)
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
        """Drops all pages, after the copies that are under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._clearing)
            self._clearing = True
            self._changed.wait_for(lambda: not self._users)
        try:
            for store in self._stores.values():
                store.cache.evict(len(store.cache))
        finally:
            with self._changed:
                self._clearing = False
                self._changed.notify_all()

    def close(self) -> None:
        """Gives all memory back. Idempotent."""
        stores, self._stores = self._stores, {}
        for store in stores.values():
            store.cache.close()
            store.pool.close()
