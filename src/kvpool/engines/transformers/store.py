"""A pool as the prompt cache of a transformers model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from kvpool.cluster import Cluster
from kvpool.engines.transformers.blocks import Blocks
from kvpool.engines.transformers.cache import KvpoolCache
from kvpool.engines.transformers.generating import generate
from kvpool.engines.transformers.layouts import check_pool, decoder_of, layout_of
from kvpool.engines.transformers.pools import pool_beside, pool_in_dram
from kvpool.engines.transformers.prompts import Prompts
from kvpool.engines.transformers.sources import Sources, send
from kvpool.errors import ArgumentError, Error, LayoutMismatch, OutOfBlocks, Unsupported
from kvpool.pool import Pool

__all__ = ["PromptStore", "StoreCounts"]

_log = logging.getLogger("kvpool.transformers")

_DRAM_GIB = 4.0


@dataclass(frozen=True)
class StoreCounts:
    """What a store has done so far.

    Attributes:
        prompts: Prompts that were looked for.
        prompt_tokens: Their tokens.
        loaded_tokens: Of these, the ones that came from the pool.
        saved_tokens: Tokens that were copied to the pool.
        fetched_tokens: Tokens that came from sources into the pool, before they were loaded.
        failed_fetches: Prompts that a source was asked for, and failed to give. One that rests is not asked.
        unsaved: Prompts that could not be saved, most because the pool had no room.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    saved_tokens: int = 0
    fetched_tokens: int = 0
    failed_fetches: int = 0
    unsaved: int = 0


class PromptStore:
    """Caches prompts of a model in a pool, and loads them. Thread-safe. A context manager.

    The content depends on the model's weights: use a pool, or a namespace, for each model and adapter.

    Args:
        pool: Whose blocks hold this model's keys and values, in memory of this process; in any order of heads, tokens,
            K and V. New prompts go to HBM if it has HBM blocks, else to DRAM.
        config: The model's configuration.
        dtype: That the model computes in; None: the pool's, which must be one of torch's.
        device: Where caches are made.
        sources: Names of the pool's peers. They are asked, in this order, for what the pool lacks of a prompt.

    Raises:
        Unsupported: The model has an encoder, or a layer that does not keep keys and values of all tokens; or no such
            dtype.
        LayoutMismatch: The pool's blocks hold something else.
        StateError: The pool's memory is an engine's, or in ranks.
        ArgumentTypeError: `sources` is no list of names.
    """

    def __init__(
        self,
        pool: Pool,
        config: Any,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        sources: Sequence[str] = (),
    ) -> None:
        wanted_type = _type_of(pool) if dtype is None else dtype
        layout = check_pool(pool, layout_of(config, wanted_type, pool.kv_layout.block_tokens))
        self.pool = pool
        self._config = decoder_of(config)
        self._dtype = wanted_type
        self._device = torch.device(device)
        self._layout = layout
        self._blocks = Blocks(pool, layout)
        self._sources = Sources(pool, sources, self._blocks.medium)
        self._owns = False
        self._lock = threading.Lock()  # of the counts
        self._counts = StoreCounts()

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        dram_gib: float = _DRAM_GIB,
        dram_blocks: int | None = None,
        block_tokens: int = 32,
        **settings: Any,
    ) -> PromptStore:
        """A store with a pool made for a model, in DRAM. `close` closes the pool.

        Args:
            model: On one device.
            dram_gib: Memory for it, in GiB.
            dram_blocks: Or in blocks.
            block_tokens: Tokens in a block: whole blocks are cached.
            **settings: Fields of kvpool.Settings.

        Raises:
            ArgumentError: Not even one block fits in the memory.
            Unsupported: As the constructor; or the model is on several devices.
            OutOfMemory: The machine has too little.
        """
        _check_one_device(model)
        layout = layout_of(model.config, model.dtype, block_tokens)
        pool = pool_in_dram(layout, dram_gib, dram_blocks, settings)
        try:
            store = cls(pool, model.config, dtype=model.dtype, device=model.device)
        except BaseException:
            pool.close()
            raise
        store._owns = True
        return store

    @classmethod
    def beside(
        cls,
        model: Any,
        cluster: Cluster,
        member: str,
        /,  # since a setting is called model, too
        *,
        dram_gib: float = _DRAM_GIB,
        dram_blocks: int | None = None,
        **settings: Any,
    ) -> PromptStore:
        """A store that shares prompts with another engine of the same model, such as a vLLM with the option `cluster`.

        Its pool is a member of the cluster, and has the other's layout. What the other has of a prompt is fetched when
        the prompt is loaded; see also `send`. `close` closes the pool.

        Args:
            model: On one device.
            cluster: Joined for this store, and the caller's to close.
            member: The name of the other engine, which is up.
            dram_gib: Memory for it, in GiB.
            dram_blocks: Or in blocks.
            **settings: Fields of kvpool.Settings: ``name``, the store's in the cluster; ``model``, the same in all
                engines with these weights; ``timeout_s``, for which a prompt waits for the other: 5, if not given.

        Raises:
            PeerLost: The cluster has no such member.
            LayoutMismatch: The member's blocks hold something else than this model caches, of another type, or of other
                weights according to the setting ``model``; the text says what differs.
            Everything that `of` and `Pool.attach` raise.
        """
        _check_one_device(model)
        wanted = layout_of(model.config, model.dtype, block_tokens=1)
        pool = pool_beside(wanted, cluster, member, dram_gib, dram_blocks, settings)
        try:
            store = cls(pool, model.config, dtype=model.dtype, device=model.device, sources=[member])
        except BaseException:
            pool.close()
            raise
        store._owns = True
        return store

    def load(self, tokens: npt.ArrayLike, namespace: str = "") -> KvpoolCache:
        """A cache with what the pool has of a prompt, but for its last token, whose logits the caller needs.

        Args:
            tokens: Token ids, [token].
            namespace: As in `Pool.match`.

        Returns:
            A cache of one row, in which ``loaded_tokens`` tokens need not be computed.
        """
        return self.load_rows(Prompts([_ids(tokens)], [0]), namespace)

    def load_rows(self, prompts: Prompts, namespace: str = "", *, repeat: int = 1) -> KvpoolCache:
        """As `load`, for a batch: each row begins with its padding, whose keys and values are zeros.

        Args:
            prompts: One for each row.
            namespace: Of all of them.
            repeat: Rows of the cache for each prompt: beams, or sequences to return.
        """
        cache = KvpoolCache(self, self._config, namespace)
        fetched = self._sources.fetch([row[:-1] for row in prompts.rows], namespace)
        hits = self.pool.batch.match([row[:-1] for row in prompts.rows], namespace)
        try:
            loaded = prompts.common([hit.tokens for hit in hits])
            if loaded:
                self._fill(cache, prompts, [hit.addrs for hit in hits], loaded, repeat)
        finally:
            for hit in hits:
                hit.close()
        cache.loaded_tokens = loaded
        used = [max(0, loaded - padding) for padding in prompts.padding]
        self._count(
            prompts=len(used), prompt_tokens=sum(len(row) for row in prompts.rows), loaded_tokens=sum(used),
            fetched_tokens=fetched.tokens, failed_fetches=fetched.failures,
        )  # fmt: skip
        return cache

    def save(self, tokens: npt.ArrayLike, cache: Cache, *, namespace: str = "", row: int = 0, padding: int = 0) -> int:
        """Caches the whole blocks of a prompt that a cache has, if the pool does not have them yet.

        Args:
            tokens: Token ids, [token]: the prompt, and what was generated. The cache may have fewer.
            cache: Any Cache of this model with [row, head, token, dim] for each layer.
            namespace: As in `Pool.insert`.
            row: The row of the cache.
            padding: Where the tokens begin in that row.

        Returns:
            How many tokens were copied.

        Raises:
            OutOfBlocks: The pool has no room for it: nothing was cached.
            LayoutMismatch: The cache holds something else than this model's keys and values.
            ArgumentError: There is no such row.
        """
        ids = _ids(tokens)
        size = self._layout.block_tokens
        whole = min(len(ids), self._check_rows(cache, row) - padding) // size
        if whole <= 0:
            return 0
        ids = ids[: whole * size]
        with self.pool.match(ids, namespace) as hit:
            have = hit.tokens // size
            if have == whole:
                return 0
            fresh = self.pool.alloc(whole - have, medium=self._blocks.medium)
            try:
                self._write(fresh, cache, row, padding + have * size, padding + whole * size)
                addrs = np.concatenate([hit.addrs, fresh])
                self.pool.insert(ids, addrs, namespace, free_duplicates=True).close()
            except BaseException:
                self.pool.free(fresh)
                raise
        self._count(saved_tokens=(whole - have) * size)
        return (whole - have) * size

    def save_if_possible(self, tokens: npt.ArrayLike, cache: Cache, *, namespace: str, row: int, padding: int) -> None:
        """As `save`; what cannot be saved is counted and logged, and no error: its tokens were generated."""
        try:
            self.save(tokens, cache, namespace=namespace, row=row, padding=padding)
        except Error as error:
            self._count(unsaved=1)
            level = logging.INFO if isinstance(error, OutOfBlocks) else logging.WARNING
            _log.log(level, "a prompt of %d tokens is not cached: %s", len(_ids(tokens)), error)

    def generate(self, model: Any, input_ids: torch.Tensor, *, namespace: str = "", **options: Any) -> Any:
        """``model.generate(input_ids, **options)``, without computing what the pool has, and caching what it computes.

        What was generated is cached, too, so that the next turn of a conversation finds it; of a beam search, only the
        prompts. With an assistant, or with `prefill_chunk_size`, nothing is loaded. A batch is loaded as far as the
        pool has all of its rows: put prompts of different lengths into calls of their own, or pad them on the left.

        Args:
            model: Whose configuration the store was made for, on the store's device.
            input_ids: int, [row, token].
            namespace: Of the prompts: of an adapter, a tenant, or whatever else the content depends on.
            **options: As for ``model.generate``: but no other ``past_key_values``, and no inputs beside the tokens.

        Returns:
            What ``model.generate`` returns.

        Raises:
            ArgumentError: The content depends on more than the tokens: other inputs, an adapter without a namespace;
                rows are padded on the right; or a way of generating that may do anything with the cache.
        """
        return generate(self, model, input_ids, namespace, options)

    def send(self, tokens: npt.ArrayLike, peer: str, *, namespace: str = "") -> int:
        """Sends what the pool has of a prompt to a peer, which caches it in its DRAM.

        Args:
            tokens: Token ids, [token].
            peer: Its name, such as that of the engine which the store stands beside.
            namespace: As in `Pool.match`.

        Returns:
            How many tokens were sent; what the peer has is not.

        Raises:
            PeerLost, DeadlineExceeded, OutOfBlocks, ...: As `Pool.transfer_with_insert`.
        """
        return send(self.pool, peer, _ids(tokens), namespace)

    def counts(self) -> StoreCounts:
        """What it has done so far."""
        return self._counts

    def close(self) -> None:
        """Closes the pool, if `of` or `beside` made it. Caches stay valid. Idempotent."""
        if self._owns:
            self.pool.close()

    def __enter__(self) -> PromptStore:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    # ---- the rest

    def _fill(
        self, cache: Cache, prompts: Prompts, addrs: Sequence[npt.NDArray[np.uint64]], tokens: int, repeat: int
    ) -> None:
        """Fills [0, tokens) of each row; the pool's blocks are pinned."""
        layout = self._layout
        shape = (len(prompts.rows), layout.kv_heads, tokens, layout.head_dim)
        made = torch.zeros if any(prompts.padding) else torch.empty
        parts: list[torch.Tensor] = []
        for number, layer in enumerate(cache.layers):
            parts = []
            for part in (0, 1):
                content = made(shape, dtype=self._dtype, device=self._device)
                for row, padding in enumerate(prompts.padding):
                    if padding < tokens:
                        self._blocks.read(addrs[row], number, part, content[row, :, padding:])
                parts.append(content if repeat == 1 else content.repeat_interleave(repeat, dim=0))
            layer.lazy_initialization(*parts)
            layer.keys, layer.values = parts
        self._blocks.wait(*parts[:1])

    def _write(self, addrs: npt.NDArray[np.uint64], cache: Cache, row: int, begin: int, end: int) -> None:
        """Fills new blocks with the tokens [begin, end) of a row."""
        for number, layer in enumerate(cache.layers):
            for part, content in enumerate((layer.keys, layer.values)):
                self._blocks.write(addrs, number, part, content[row, :, begin:end])
        self._blocks.wait(cache.layers[0].keys)

    def _check_rows(self, cache: Cache, row: int) -> int:
        """How many tokens a cache has, if it is one of this model."""
        layout = self._layout
        tokens = int(cache.get_seq_length()) if len(cache.layers) else 0
        if tokens == 0:
            return 0
        if len(cache.layers) != layout.layers:
            raise LayoutMismatch(f"the cache has {len(cache.layers)} layers, and the pool's blocks {layout.layers}")
        for number, layer in enumerate(cache.layers):
            for part, content in (("K", layer.keys), ("V", layer.values)):
                shape = tuple(content.shape)
                if shape[1:] != (layout.kv_heads, tokens, layout.head_dim) or content.dtype != self._dtype:
                    raise LayoutMismatch(
                        f"{part} of layer {number} is {content.dtype} {list(shape)}, [row, head, token, dim], and the "
                        f"pool's blocks have {self._dtype}, {layout.kv_heads} heads x {layout.head_dim}, for "
                        f"{tokens} tokens"
                    )
        rows = cache.layers[0].keys.shape[0]
        if not 0 <= row < rows:
            raise ArgumentError(f"row {row} of a cache with {rows} rows")
        return tokens

    def _count(self, **more: int) -> None:
        with self._lock:
            counts = self._counts
            self._counts = replace(counts, **{name: getattr(counts, name) + n for name, n in more.items()})


def _ids(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    values = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ArgumentError(f"tokens are {values.dtype} {list(values.shape)}: give integers, [token]")
    return np.ascontiguousarray(values, np.int32)


def _type_of(pool: Pool) -> torch.dtype:
    name = getattr(pool.kv_layout, "dtype", "bytes")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LayoutMismatch(f"the pool's blocks hold {name}, which is no type that a model computes in")
    return found


def _check_one_device(model: Any) -> None:
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(places) > 1:
        raise Unsupported(f"the model is on several devices ({', '.join(map(str, sorted(places, key=str)))})")
