"""kvpool: the memory layer under LLM serving.

A pool owns (or adopts) the KV-cache memory of an inference engine, GPU HBM and host DRAM, gives out its blocks, finds
cached prompts by their tokens, and moves blocks between the two.

    import kvpool

    layout = kvpool.KVLayout(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
    with kvpool.Pool(layout, hbm_blocks=64, dram_blocks=256, device="cpu") as pool:
        addrs = pool.alloc(4)
        kv = pool.tensor(kvpool.HBM)
        ...                                      # compute K and V of 64 tokens into kv[kvpool.block_ids(addrs)]
        pool.insert(tokens, addrs).close()
        with pool.match(tokens) as hit:
            hit.tokens, hit.addrs                # how many tokens are cached, and where
"""

from __future__ import annotations

from kvpool._core import __version__
from kvpool.alloc import KVTensor, SwappedIn
from kvpool.config import Settings
from kvpool.errors import (
    ArgumentError,
    ArgumentTypeError,
    AuditError,
    AuthError,
    Busy,
    Cancelled,
    ClosedError,
    DeadlineExceeded,
    Error,
    ForkError,
    LayoutMismatch,
    NotOwner,
    OutOfBlocks,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    StaleAddress,
    StateError,
    Unsupported,
)
from kvpool.index import (
    EventStream,
    Inserted,
    InstanceIndex,
    Match,
    MatchReport,
    MovedEvent,
    PromptIndex,
    RemovedEvent,
    StoredEvent,
)
from kvpool.pool import MediumStats, Pool, PoolStats
from kvpool.transfer import (
    PeerInfo,
    Received,
    ReceivedCallback,
    Transfer,
    TransferSpec,
    TransferStats,
    TransferStream,
)
from kvpool.types import DRAM, HBM, MIXED, Address, KVLayout, Medium, RawLayout, block_ids, decode_address, media

__all__ = [
    "DRAM",
    "HBM",
    "MIXED",
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "AuthError",
    "Busy",
    "Cancelled",
    "ClosedError",
    "DeadlineExceeded",
    "Error",
    "EventStream",
    "ForkError",
    "Inserted",
    "InstanceIndex",
    "KVLayout",
    "KVTensor",
    "LayoutMismatch",
    "Match",
    "MatchReport",
    "Medium",
    "MediumStats",
    "MovedEvent",
    "NotOwner",
    "OutOfBlocks",
    "OutOfMemory",
    "PeerInfo",
    "PeerLost",
    "Pool",
    "PoolStats",
    "PromptIndex",
    "ProtocolError",
    "RawLayout",
    "Received",
    "ReceivedCallback",
    "RemovedEvent",
    "Settings",
    "StaleAddress",
    "StateError",
    "StoredEvent",
    "SwappedIn",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
    "Unsupported",
    "__version__",
    "block_ids",
    "decode_address",
    "media",
]
