"""What a router is told of an engine beside its URL: where vLLM publishes KV events, and the data-parallel rank."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from kvpool.engines.membership import NOTHING, Published
from kvpool.engines.vllm.options import replica_of

__all__ = ["published_by"]


def published_by(vllm_config: Any, url: str, engine_id: str) -> Published:
    """What vLLM's configuration says; nothing without a URL, because routers then do not route there.

    Args:
        vllm_config: vLLM's.
        url: Of the engine's server; its host is where others reach what vLLM binds to all interfaces.
        engine_id: vLLM's. Only this tells that there are other ranks: those of a dense model have each a configuration
            of one rank.
    """
    host = urlsplit(url).hostname
    if not host:
        return NOTHING
    parallel, config = vllm_config.parallel_config, vllm_config.kv_events_config
    # Servers of one rank each (an external or hybrid load balancer in front of them) count their ranks from 0.
    rank = None if parallel.local_engines_only else replica_of(engine_id)
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return Published(rank=rank)
    events = _reachable(config.endpoint, host, parallel.data_parallel_index)
    return Published(events, _reachable(config.replay_endpoint, host, parallel.data_parallel_index), rank)


def _reachable(endpoint: str | None, host: str, rank: int) -> str:
    """Where to connect to what vLLM binds; "" for what it does not bind, or of which the port is not known."""
    if endpoint is None or (rank and not endpoint.startswith("tcp://")):
        return ""
    if endpoint.startswith("ipc://"):
        return endpoint
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if address not in ("*", "[::]") or not port.isdigit() or port == "0":
        return ""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{int(port) + rank}"
