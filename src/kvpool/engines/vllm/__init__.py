"""vLLM on kvpool: ``--kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_both"}'``.

What a request has computed is copied to a pool in DRAM, block by block, and comes back when a prompt begins with it.

    register      vLLM's entry point: makes the name KvpoolConnector known
    connector     vLLM's interface
    metrics       kvpool's figures in vLLM's log and in Prometheus; these two, and tier, alone import vLLM
    planner       the scheduler's side: what each step loads and saves
    requests      what is remembered of a request: tokens, namespace
    groups, hits  groups of layers, with windows or without: what each has of a prompt, and which blocks it needs
    plans         what the scheduler's side tells the worker's, and what workers report
    engine_pool   the pool of an engine in one process: loads, saves, and which blocks must not be written yet
    pool_making   how the pools are made from vLLM's configuration and tensors
    pools_here    which engine of this process has which pool
    member_pool   the same among the members of a cluster: it also sends prompts, and gets those of other engines
    members, links    how it is a member; connections that are made beside the engine's thread
    params        what requests and answers say about other engines
    outgoing, sends     prompts that go to others: which blocks after which step; the transfers
    expected, arrivals  prompts that come from others: which requests wait for them; what has come
    pulls, pulled       prompts that are fetched from others
    scheduler_index, worker_pool   the same where workers are other processes: an index, and a pool for each worker
    tier, tier_store    below vLLM's own offloading instead: a secondary tier of it, and its memory
    tier_members  what other members have of the keys that vLLM looks up in it
    layouts       what a page of vLLM's tensors holds
    options       kv_connector_extra_config

How to use it: docs/how-to/vllm.md.
"""

from __future__ import annotations

import contextlib

__all__ = ["CONNECTOR", "TESTED", "TIER", "register"]

TESTED = "0.32"
"""Releases 0.32.x; the Makefile and docs/how-to/vllm.md name the same."""

CONNECTOR = "KvpoolConnector"

TIER = "kvpool"
"""The ``type`` in ``secondary_tiers``."""


def register() -> None:
    """Makes the connector and the tier known to vLLM by name. vLLM calls it in each of its processes, at their start.

    They themselves are imported when a configuration names them.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
    with contextlib.suppress(ValueError, ImportError):  # likewise, or a vLLM without secondary tiers
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier(TIER, f"{__name__}.tier", "KvpoolTier")
