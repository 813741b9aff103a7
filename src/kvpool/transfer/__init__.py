"""Blocks between pools: what the verbs of a pool take and return."""

from kvpool.transfer.handle import Transfer
from kvpool.transfer.peers import PeerCallback, PeerEvent, PeerInfo, RankInfo, RecallResult, RouteCost, RouteReport
from kvpool.transfer.received import Received, ReceivedCallback
from kvpool.transfer.reshard import ParallelConfig
from kvpool.transfer.stream import TransferStream
from kvpool.transfer.verbs import PeerVerbs
from kvpool.types import TransferSpec, TransferStats, TransferTotals

__all__ = [
    "ParallelConfig",
    "PeerCallback",
    "PeerEvent",
    "PeerInfo",
    "PeerVerbs",
    "RankInfo",
    "RecallResult",
    "Received",
    "ReceivedCallback",
    "RouteCost",
    "RouteReport",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
    "TransferTotals",
]
