"""Pages of one kind under SGLang's keys: a pool whose DRAM a keyed cache has, and how pages come and go.

SGLang's keys are hex digits of SHA-256. A key of another form, which a custom scheme may make, is hashed to one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.sglang.pages import layout_of
from kvpool.errors import ArgumentError, Unsupported
from kvpool.pool import Pool
from kvpool.types import RawLayout

__all__ = ["AdoptedStore", "FlatStore", "Store", "flat_page_bytes", "key_bytes_of"]

KEY_BYTES = 32


class Store(Protocol):
    """Pages under keys. Thread-safe. Errors of kvpool go through."""

    pool: Pool
    cache: _core.KeyedCache

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> None:
        """Stores the pages with these numbers, each under its key. A page that is stored already is not copied."""

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> int:
        """Fills the pages with these numbers with what is stored, from the first key on. Returns how many."""


def key_bytes_of(keys: Sequence[str]) -> list[str] | list[bytes]:
    """The keys as the index takes them."""
    if all(len(key) == 2 * KEY_BYTES for key in keys):
        return list(keys)
    return [hashlib.sha256(key.encode()).digest() if len(key) != 2 * KEY_BYTES else _decoded(key) for key in keys]


class AdoptedStore:
    """Of memory that kvpool adopts: pages are copied by its own threads, or by the GPU."""

    def __init__(self, pieces: Sequence[Any], pages: int, name: str) -> None:
        """Adopts all pages.

        Args:
            pieces: As in `kvpool.engines.sglang.pages`.
            pages: How many the cache holds.
            name: For errors.

        Raises:
            Unsupported, LayoutMismatch: The pieces do not fit.
            OutOfMemory: The machine has not so much memory.
        """
        self.pool = Pool(layout_of(pieces), hbm=list(pieces), block_dim=0, engine_allocates=True, dram_blocks=pages)
        self._addrs = self.pool.adopt(np.arange(len(pieces[0])))
        self.cache = _core.KeyedCache(self.pool, pages, KEY_BYTES)
        self.name = name

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> None:
        """As in Store. `stream`: the copy begins after the work in it."""
        self.cache.save(key_bytes_of(keys), self._addrs[pages], stream)

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> int:
        """As in Store. `stream`: the copy begins after the work in it."""
        return self.cache.load(key_bytes_of(keys), self._addrs[pages], stream)


class FlatStore:
    """Of a host pool that gives out its pages one by one (SGLang's ``get_data_page``)."""

    def __init__(self, host_pool: Any, pages: int, name: str) -> None:
        """Asks the pool how large a page is. Raises OutOfMemory, and as `flat_page_bytes`."""
        self._host = host_pool
        self._page_bytes = flat_page_bytes(host_pool)
        self.pool = Pool(RawLayout(self._page_bytes), dram_blocks=pages)
        self.cache = _core.KeyedCache(self.pool, pages, KEY_BYTES)
        self.name = name

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> None:
        """As in Store."""
        own = key_bytes_of(keys)
        new = np.flatnonzero(~self.cache.exists(own))
        rows = np.empty((len(new), self._page_bytes), np.uint8)
        for row, at in zip(rows, new, strict=True):
            row[:] = _bytes_of(self._host.get_data_page(int(pages[at]) * self._host.page_size, flat=True))
        self.cache.put(tuple(own[at] for at in new), rows)

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64], stream: Any = None) -> int:
        """As in Store."""
        import torch

        rows = np.empty((len(keys), self._page_bytes), np.uint8)
        loaded = self.cache.get(key_bytes_of(keys), rows)
        for row, page in zip(rows[:loaded], pages, strict=False):
            content = torch.from_numpy(row).view(self._host.dtype)
            self._host.set_from_flat_data_page(int(page) * self._host.page_size, content)
        return loaded


def flat_page_bytes(host_pool: Any) -> int:
    """Bytes of a page of a host pool.

    Raises:
        Unsupported: SGLang does not give out the pages of this pool one by one.
    """
    try:
        page = host_pool.get_dummy_flat_data_page()
    except NotImplementedError as error:
        name = type(host_pool).__name__
        raise Unsupported(f"SGLang does not give out the pages of a {name} one by one: {error}", kind=name) from error
    return int(page.numel() * page.element_size())


def _bytes_of(page: Any) -> npt.NDArray[np.uint8]:
    import torch

    flat: npt.NDArray[np.uint8] = page.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat


def _decoded(key: str) -> bytes:
    try:
        return bytes.fromhex(key)
    except ValueError as error:
        raise ArgumentError(f"the key {key!r} is no hex number") from error
