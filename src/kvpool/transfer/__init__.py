"""Blocks between pools: arguments and results of a pool's verbs."""

from kvpool._core import TransferStream
from kvpool.transfer.batch import Batch
from kvpool.transfer.handle import Transfer
from kvpool.transfer.peer_match import PeerKeyMatch, PeerMatch
from kvpool.transfer.received import Received, ReceivedCallback
from kvpool.transfer.reshard import ParallelConfig
from kvpool.types import TransferSpec, TransferStats, TransferTotals

__all__ = [
    "Batch",
    "ParallelConfig",
    "PeerKeyMatch",
    "PeerMatch",
    "Received",
    "ReceivedCallback",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
    "TransferTotals",
]
