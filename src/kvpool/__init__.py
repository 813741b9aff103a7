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

import logging as _logging

from kvpool._core import __version__
from kvpool.alloc import BlockCopy, KVTensor, SwapIn, SwapOut, SwappedIn, block_ids
from kvpool.attention import Attend, AttendPlan, KVSequence, PartialAttention, SequencePlan
from kvpool.cluster import Cluster, Load, Member, MemberCallback, MemberEvent, Registration
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
    DeviceLost,
    Error,
    Fenced,
    ForkError,
    LayoutMismatch,
    NotOwner,
    OutOfBlocks,
    OutOfMemory,
    OutOfQuota,
    PeerLost,
    ProtocolError,
    RouteFailed,
    StaleAddress,
    StateError,
    StoreFailed,
    Suspended,
    Unsupported,
)
from kvpool.index import (
    EventStream,
    IndexBatch,
    Inserted,
    InstanceIndex,
    KeyedCache,
    KeyedIndex,
    KeyedMatch,
    Match,
    MatchReport,
    MovedEvent,
    PromptIndex,
    RemovedEvent,
    StoredEvent,
)
from kvpool.peers import (
    Attachment,
    Inbox,
    PeerCallback,
    PeerEvent,
    PeerInfo,
    Peers,
    RankInfo,
    Ranks,
    RecallResult,
    RouteCost,
    RouteReport,
)
from kvpool.pool import DiskStats, DiskWarning, MediumStats, Pool, PoolStats
from kvpool.ranks import RankArena
from kvpool.space import ModelQuota, Space, SpaceStats, SpaceTier, TierQuota
from kvpool.transfer import (
    Batch,
    ParallelConfig,
    PeerKeyMatch,
    PeerMatch,
    Received,
    ReceivedCallback,
    Transfer,
    TransferSpec,
    TransferStats,
    TransferStream,
    TransferTotals,
)
from kvpool.types import DISK, DRAM, HBM, MIXED, Address, KVLayout, Medium, RawLayout, decode_address, media

_logging.getLogger("kvpool").addHandler(_logging.NullHandler())  # silent, until the application says where to log

__all__ = [
    "DISK",
    "DRAM",
    "HBM",
    "MIXED",
    "Address",
    "ArgumentError",
    "ArgumentTypeError",
    "Attachment",
    "Attend",
    "AttendPlan",
    "AuditError",
    "AuthError",
    "Batch",
    "BlockCopy",
    "Busy",
    "Cancelled",
    "ClosedError",
    "Cluster",
    "DeadlineExceeded",
    "DeviceLost",
    "DiskStats",
    "DiskWarning",
    "Error",
    "EventStream",
    "Fenced",
    "ForkError",
    "Inbox",
    "IndexBatch",
    "Inserted",
    "InstanceIndex",
    "KVLayout",
    "KVSequence",
    "KVTensor",
    "KeyedCache",
    "KeyedIndex",
    "KeyedMatch",
    "LayoutMismatch",
    "Load",
    "Match",
    "MatchReport",
    "Medium",
    "MediumStats",
    "Member",
    "MemberCallback",
    "MemberEvent",
    "ModelQuota",
    "MovedEvent",
    "NotOwner",
    "OutOfBlocks",
    "OutOfMemory",
    "OutOfQuota",
    "ParallelConfig",
    "PartialAttention",
    "PeerCallback",
    "PeerEvent",
    "PeerInfo",
    "PeerKeyMatch",
    "PeerLost",
    "PeerMatch",
    "Peers",
    "Pool",
    "PoolStats",
    "PromptIndex",
    "ProtocolError",
    "RankArena",
    "RankInfo",
    "Ranks",
    "RawLayout",
    "RecallResult",
    "Received",
    "ReceivedCallback",
    "Registration",
    "RemovedEvent",
    "RouteCost",
    "RouteFailed",
    "RouteReport",
    "SequencePlan",
    "Settings",
    "Space",
    "SpaceStats",
    "SpaceTier",
    "StaleAddress",
    "StateError",
    "StoreFailed",
    "StoredEvent",
    "Suspended",
    "SwapIn",
    "SwapOut",
    "SwappedIn",
    "TierQuota",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
    "TransferTotals",
    "Unsupported",
    "__version__",
    "block_ids",
    "decode_address",
    "media",
]
