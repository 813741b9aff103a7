"""vLLM on kvpool: ``--kv-transfer-config '{"kv_connector": "KvpoolConnector", "kv_role": "kv_both"}'``.

What a request has computed is copied to a pool in DRAM, block by block, and comes back when a prompt begins with it.

    register      vLLM's entry point: makes the name KvpoolConnector known
    connector     vLLM's interface; the only module that imports vLLM
    metrics       kvpool's figures in vLLM's log and in Prometheus; likewise
    planner       the scheduler's side: what each step loads and saves
    requests      what is remembered of a request: tokens, namespace
    engine_pool   the pool of one engine: loads, saves, and which blocks must not be written yet
    layouts       what a page of vLLM's tensors holds
    options       kv_connector_extra_config
    versions      which releases of vLLM were tested

How to use it: docs/how-to/vllm.md.
"""

from __future__ import annotations

import contextlib

__all__ = ["CONNECTOR", "register"]

CONNECTOR = "KvpoolConnector"


def register() -> None:
    """Makes the connector known to vLLM by name. vLLM calls it in each of its processes, at their start.

    The connector itself is imported when a configuration names it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector(CONNECTOR, f"{__name__}.connector", CONNECTOR)
