"""A publisher of KV events as vLLM's, without an endpoint for replays: what the router's tests let it say."""

from __future__ import annotations

import numpy as np
import zmq
from kit import BLOCK
from router.router_kit import PATIENCE_S

from kvpool.observe.events import BlockStored, EventBatch, encode


class Publishing:
    """Binds an endpoint, or a free port. Belongs to one thread."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.XPUB)
        self._out.bind(endpoint)
        self.endpoint = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._number = self._name = 0
        self.rank: int | None = None

    def wait_until_heard(self) -> None:
        """Waits for a subscriber."""
        assert self._out.poll(int(PATIENCE_S * 1000))
        assert self._out.recv() == b"\x01"

    def store(self, tokens: list[int], **fields) -> int:
        """Tells that a prompt is cached; returns how many tokens of it."""
        blocks = len(tokens) // BLOCK
        names = list(range(self._name, self._name + blocks))
        self._name += blocks
        rows = fields.pop("extra_keys", None)
        rows = rows if rows is None else [rows] * blocks
        held = np.array(tokens[: blocks * BLOCK], np.int32)
        event = BlockStored(names, None, held, BLOCK, "GPU", extra_keys=rows, **fields)
        self._out.send_multipart([b"", self._number.to_bytes(8, "big"), encode(EventBatch(0.0, [event], self.rank))])
        self._number += 1
        return len(held)

    def __enter__(self) -> Publishing:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
