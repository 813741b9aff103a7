"""A pool among its peers: meeting them, attaching to a cluster, the ranks of an instance, and what peers have sent."""

from kvpool.peers.attachment import Attachment
from kvpool.peers.callback import PeerCallback, PeerEvent, RecallResult
from kvpool.peers.inbox import Inbox
from kvpool.peers.info import PeerInfo, RouteCost, RouteReport
from kvpool.peers.peers import Peers
from kvpool.peers.ranks import RankInfo, Ranks
from kvpool.peers.service import NetworkedPool

__all__ = [
    "Attachment",
    "Inbox",
    "NetworkedPool",
    "PeerCallback",
    "PeerEvent",
    "PeerInfo",
    "Peers",
    "RankInfo",
    "Ranks",
    "RecallResult",
    "RouteCost",
    "RouteReport",
]
