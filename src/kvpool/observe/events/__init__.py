"""KV events over ZMQ, in the format of vLLM: to routers that read it, and from engines that publish it.

Raises:
    ImportError: pyzmq or msgpack is missing: ``pip install 'kvpool[events]'``.
"""

from kvpool.index.adapters import adapter_namespace
from kvpool.observe.events.block_hash import BlockHasher
from kvpool.observe.events.publisher import EventPublisher
from kvpool.observe.events.subscriber import EventSubscriber, FollowsEvents
from kvpool.observe.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, decode, encode

__all__ = [
    "AllBlocksCleared",
    "BlockHasher",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "EventSubscriber",
    "FollowsEvents",
    "adapter_namespace",
    "decode",
    "encode",
]
