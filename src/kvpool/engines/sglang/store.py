"""Pages of one kind under SGLang's keys: a pool whose DRAM a keyed cache has, and how pages come and go.

SGLang's keys are hex digits of SHA-256. A key of another form, which a custom scheme may make, is hashed to one.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines import guarding
from kvpool.engines.keyed_members import KeyedMembers, cache_name
from kvpool.engines.sglang.pages import layout_of
from kvpool.engines.sleep import resume_adopted, suspend_adopted
from kvpool.errors import Unsupported
from kvpool.pool import Pool
from kvpool.types import RawLayout

__all__ = [
    "AdoptedStore",
    "FlatStore",
    "Store",
    "bytes_of",
    "drop_all",
    "exists",
    "fetched",
    "flat_page_bytes",
    "guarded",
    "hex_keys_of",
]

_log = logging.getLogger("kvpool.engines.sglang")
_T = TypeVar("_T")

KEY_BYTES = 32


class Store(Protocol):
    """Pages under keys. Thread-safe. Errors of kvpool go through.

    Attributes:
        members: None: the store has no cluster.
        part: Which part of which pages it has, as other members name it. None: no member can find it.
        epoch: How often all was dropped.
    """

    pool: Pool
    cache: _core.KeyedCache
    members: KeyedMembers | None
    part: str | None
    epoch: int

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """Stores the pages with these numbers, each under its key. Returns how many were not stored already."""

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """Fills the pages with these numbers with what is stored, from the first key on. Returns how many."""


def hex_keys_of(keys: Sequence[str]) -> list[str]:
    """The keys as the index takes them: hex digits of one length."""
    return [key if len(key) == 2 * KEY_BYTES else hashlib.sha256(key.encode()).hexdigest() for key in keys]


def guarded(what: str, call: Callable[[], _T], otherwise: _T) -> _T:
    """The result; or the other value where it raises: see `kvpool.engines.guarding`. `what`: "store"."""
    return guarding.guarded(_log, f"{what} pages of SGLang's", call, otherwise)


class AdoptedStore:
    """Of memory that kvpool adopts: pages are copied by its own threads, or by the GPU."""

    members: KeyedMembers | None = None
    epoch = 0

    def __init__(self, pieces: Sequence[Any], pages: int, part: str | None = None, **settings: Any) -> None:
        """Adopts all pages.

        Args:
            pieces: As in `kvpool.engines.sglang.pages`.
            pages: How many the cache holds.
            part: As in Store.
            settings: Of the pool.

        Raises:
            Unsupported, LayoutMismatch: The pieces do not fit.
            OutOfMemory: The machine has not so much memory.
        """
        self.pool = Pool(
            layout_of(pieces), hbm=list(pieces), block_dim=0, engine_allocates=True, dram_blocks=pages, **settings
        )
        self._addrs = self.pool.adopt(np.arange(len(pieces[0])))
        self.part = part
        self.cache = _core.KeyedCache(self.pool, pages, KEY_BYTES, part)

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """As in Store."""
        return self.cache.save(hex_keys_of(keys), self._addrs[pages])

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """As in Store."""
        return self.cache.load(hex_keys_of(keys), self._addrs[pages])

    def suspend(self) -> bool:
        """The pages' memory goes for a while. REQUIRES: no save or load is under way. Idempotent.

        Waits ``settings.timeout_s`` for peers that read pages, and again for those that write to some.

        Returns:
            Whether the pool is suspended by this call: False if it was before, or is closed.

        Raises:
            Busy, StateError, Unsupported: As `Pool.suspend`. Then nothing is changed.
        """
        return suspend_adopted(self.pool, self._addrs, self.pool.settings.timeout_s)

    def resume(self) -> None:
        """The memory is there again, with any content. Idempotent."""
        resume_adopted(self.pool, self._addrs)


class FlatStore:
    """Of a host pool that gives out its pages one by one (SGLang's ``get_data_page``)."""

    members: KeyedMembers | None = None
    epoch = 0

    def __init__(self, host_pool: Any, pages: int, part: str | None = None, **settings: Any) -> None:
        """Asks the pool how large a page is. As AdoptedStore; raises as `flat_page_bytes`, too."""
        self._host = host_pool
        self._page_bytes = flat_page_bytes(host_pool)
        self.pool = Pool(RawLayout(self._page_bytes), dram_blocks=pages, **settings)
        self.part = part
        self.cache = _core.KeyedCache(self.pool, pages, KEY_BYTES, part)

    def save(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """As in Store."""
        own = hex_keys_of(keys)
        new = np.flatnonzero(~self.cache.exists(own))
        rows = np.empty((len(new), self._page_bytes), np.uint8)
        for row, at in zip(rows, new, strict=True):
            row[:] = bytes_of(self._host.get_data_page(int(pages[at]) * self._host.page_size, flat=True))
        return self.cache.put(tuple(own[at] for at in new), rows)

    def load(self, keys: Sequence[str], pages: npt.NDArray[np.int64]) -> int:
        """As in Store."""
        import torch

        rows = np.empty((len(keys), self._page_bytes), np.uint8)
        loaded = self.cache.get(hex_keys_of(keys), rows)
        for row, page in zip(rows[:loaded], pages, strict=False):
            content = torch.from_numpy(row).view(self._host.dtype)
            self._host.set_from_flat_data_page(int(page) * self._host.page_size, content)
        return loaded


def exists(store: Store, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which keys are stored here or, as far as is known in a moment, at another member."""
    own = hex_keys_of(keys)
    found = store.cache.exists(own)
    missing = np.flatnonzero(~found)
    members = store.members
    if members is not None and len(missing):
        nowhere = np.zeros(len(missing), bool)
        found[missing] = guarded("ask for", lambda: members.find([own[at] for at in missing]), nowhere)
    return found


def drop_all(store: Store) -> None:
    """Drops all pages. REQUIRES: nobody here uses the store.

    Other members may hold some. They may still fetch those, but neither they nor this one find anything at the other
    from now on, until they have dropped their pages as often: see `cache_name`.
    """
    cache = store.cache
    blocks = cache.stats()["blocks_max"]
    cache.close()
    store.epoch += 1
    name = None if store.part is None else cache_name(store.part, store.epoch)
    store.cache = _core.KeyedCache(store.pool, blocks, cache.key_bytes, name)
    if store.members is not None:
        store.members.use(store.cache)


@contextmanager
def fetched(store: Store, keys: Sequence[str]) -> Iterator[None]:
    """What other members have of the keys is here meanwhile, as far as there is room and it comes in time."""
    own = hex_keys_of(keys)
    members = store.members
    if members is None:
        yield
        return
    pins = guarded("fetch", lambda: None if store.cache.count(own) == len(own) else members.bring(own), None)
    try:
        yield
    finally:
        if pins is not None:
            pins.close()


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


def bytes_of(tensor: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in host memory; of a contiguous one the memory itself."""
    import torch

    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat
