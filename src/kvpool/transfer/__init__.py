"""Blocks between pools: what the verbs of a pool take and return."""

from kvpool.transfer.handle import Transfer
from kvpool.transfer.peers import PeerInfo
from kvpool.transfer.received import Received, ReceivedCallback
from kvpool.transfer.stream import TransferStream
from kvpool.transfer.verbs import PeerVerbs
from kvpool.types import TransferSpec, TransferStats

__all__ = [
    "PeerInfo",
    "PeerVerbs",
    "Received",
    "ReceivedCallback",
    "Transfer",
    "TransferSpec",
    "TransferStats",
    "TransferStream",
]
