"""How an engine's pools are made from vLLM's configuration and tensors, and how they become members of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.engines.packing import ROWS
from kvpool.engines.vllm.layouts import Pages, adoptable, adoption_of, divided
from kvpool.engines.vllm.members import ROLES, Membership, secret_of
from kvpool.engines.vllm.options import Options
from kvpool.engines.vllm.packings import packing_of
from kvpool.engines.vllm.published import published_by
from kvpool.pool import Pool
from kvpool.types import KVLayout

__all__ = ["join", "packing_here", "pool_of_workers", "pool_over"]


def pool_over(pages: Pages, options: Options, caches: dict[str, Any], workers: int, apart: bool) -> Pool:
    """The pool of a worker.

    Args:
        pages: What vLLM says.
        options: Of the connector.
        caches: vLLM's tensors, of each layer by its name.
        workers: How many share the memory that the options name.
        apart: Whether the scheduler is another process.
    """
    tensors = [adoptable(pages, caches[name]) for name in pages.layers]
    found = adoption_of(pages, tensors[0].shape, tensors[0].stride())
    settings = options.settings
    if options.cluster and apart and (secret := secret_of(options.cluster)):
        settings["secret"] = secret
    return Pool(
        found.layout,
        hbm=[tensor.permute(found.order) for tensor in tensors],
        block_dim=found.block_dim,
        dram_blocks=options.blocks(found.layout.block_bytes, workers),
        engine_allocates=True,
        **settings,
    )


def pool_of_workers(
    pages: Pages, options: Options, parts: Sequence[KVLayout], dram_blocks: int, tp: int, heads: int
) -> Pool:
    """The pool of a scheduler whose workers are other processes.

    Args:
        pages: What vLLM says.
        options: Of the connector.
        parts: What each worker has of a block, by stage, then by tensor-parallel rank.
        dram_blocks: How many each worker has room for.
        tp: Tensor-parallel ranks of a stage.
        heads: KV heads of the model.
    """
    if pages.page_bytes:
        heads = tp  # each worker has its part of what the pages hold, as if that were a head
    layout, parallel = divided(parts, tp, heads)
    return Pool(
        layout,
        hbm_blocks=pages.blocks,
        dram_blocks=dram_blocks,
        parallel=parallel,
        engine_allocates=True,
        **options.settings,
    )


def join(pool: Pool, options: Options, vllm_config: Any, engine_id: str) -> Membership:
    """Makes a pool a member of the cluster. It is closed if that fails. REQUIRES: the options name a cluster."""
    assert options.cluster
    try:
        role = ROLES[vllm_config.kv_transfer_config.kv_role]
        published = published_by(vllm_config, options.url, engine_id)
        return Membership(pool, options.cluster, role, options.listen, options.cluster_options, options.url, published)
    except BaseException:
        pool.close()
        raise


def packing_here(pages: Pages, vllm_config: Any) -> str:
    """How the pages of this process's layers are packed inside."""
    if pages.page_bytes:  # no peer sees them
        return ROWS
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in pages.groups or (pages.layers,) for name in group]
    return packing_of((layers[name] for name in names), vllm_config.cache_config.cache_dtype)
