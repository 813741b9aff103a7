"""The pools of stores: one for a model alone, or one beside another engine.

Blocks travel as they are. So a pool beside another engine has that engine's layout, whatever the order of heads,
tokens, K and V in it, and is refused where the content differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvpool.cluster import Cluster, Member
from kvpool.engines.given import how_many
from kvpool.engines.packing import declare, unmarked
from kvpool.engines.transformers.layouts import check_content, check_pool
from kvpool.errors import ArgumentError, ArgumentTypeError, LayoutMismatch, PeerLost
from kvpool.pool import Pool
from kvpool.types import KVLayout

__all__ = ["pool_beside", "pool_in_dram"]

_FETCH_S = 5.0


def pool_in_dram(layout: KVLayout, gib: float, blocks: int | None, settings: Mapping[str, Any]) -> Pool:
    """A pool with blocks of DRAM.

    Args:
        layout: Of a block.
        gib: Memory for it, in GiB.
        blocks: Or in blocks.
        settings: Fields of kvpool.Settings.

    Raises:
        ArgumentError: Not even one block fits in the memory.
        OutOfMemory: The machine has too little.
    """
    if blocks is None:
        blocks = how_many("the prompt store", gib, layout.block_bytes, f"a block of {layout.block_tokens} tokens")
    if blocks < 1:
        raise ArgumentError(f"dram_blocks is {blocks}; it must be at least 1")
    return Pool(layout, dram_blocks=blocks, **settings)


def pool_beside(
    wanted: KVLayout, cluster: Cluster, name: str, gib: float, blocks: int | None, settings: Mapping[str, Any]
) -> Pool:
    """A pool of a cluster that shares prompts with one of its members.

    Args:
        wanted: What the model caches; its order and its tokens in a block count for nothing.
        cluster: That it joins.
        name: Of the other member.
        gib: As in `pool_in_dram`.
        blocks: Likewise.
        settings: Likewise.

    Raises:
        ArgumentTypeError: It is no Cluster.
        PeerLost: The cluster has no such member.
        LayoutMismatch: The member's blocks hold something else, or those of other weights; the text says what differs.
        Everything that `pool_in_dram` and `Pool.attach` raise.
    """
    if not isinstance(cluster, Cluster):
        raise ArgumentTypeError(f"cluster must be a kvpool.Cluster, not {type(cluster).__name__}")
    member = _member_of(cluster, name)
    pool = pool_in_dram(_layout_beside(member, wanted), gib, blocks, {"timeout_s": _FETCH_S, **settings})
    try:
        model, packing = unmarked(member.model)
        if model != pool.settings.model:
            raise LayoutMismatch(
                f"the models differ: {name} has {model!r}, and this side {pool.settings.model!r}: give all "
                "engines of the same weights the same setting model"
            )
        declare(pool, packing, groups="")
        check_pool(pool, dataclasses.replace(wanted, block_tokens=pool.kv_layout.block_tokens))
        pool.attach(cluster)
    except BaseException:
        pool.close()
        raise
    return pool


def _member_of(cluster: Cluster, name: str) -> Member:
    members = cluster.members()
    for member in members:
        if member.name == name:
            return member
    there = ", ".join(member.name for member in members) or "no members"
    raise PeerLost(f"there is no member {name}: the cluster has {there}")


def _layout_beside(member: Member, wanted: KVLayout) -> KVLayout:
    given = dict(member.layout)
    known = {field.name for field in dataclasses.fields(KVLayout)}
    if given.pop("kind", None) != "KVLayout" or set(given) != known:
        raise LayoutMismatch(f"{member.name} has blocks of raw bytes, or of a kind that this release does not know")
    layout = KVLayout(**given)
    check_content(layout, wanted, member.name)
    return dataclasses.replace(layout, order="aggregated")
