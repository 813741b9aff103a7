"""Whether a ZMQ socket is connected: of a socket that only receives, nothing else tells that its peer is gone."""

from __future__ import annotations

import time
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["ConnectionWatch"]

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_PING_MS: Final = 5_000
_PONG_MS: Final = 15_000  # without one the connection is given up: the peer's machine may be gone without a word


class ConnectionWatch:
    """Watches the connection of a socket that connects to one endpoint. Belongs to the socket's thread.

    Args:
        socket: Not connected yet.

    Attributes:
        socket: Readable when there is something to `take`. It closes with the context.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        self.socket = socket.get_monitor_socket(_EVENTS)
        self._stands = False
        self._lost_at: float | None = None

    @property
    def lost_s(self) -> float:
        """Seconds since the connection broke; 0 while it stands, and before the first one."""
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def take(self) -> bool:
        """Takes what has happened. Returns whether the connection broke meanwhile; it may stand again.

        Something else may accept connections in the publisher's place and close them (a proxy, say). Each such attempt
        ends with a "disconnected", too, though nothing stood since the connection broke.
        """
        broke = False
        while self.socket.poll(0):
            if recv_monitor_message(self.socket)["event"] != zmq.EVENT_DISCONNECTED:
                self._stands, self._lost_at = True, None
            elif self._stands:
                broke = True
                self._stands, self._lost_at = False, time.monotonic()
        return broke

    def forgotten(self) -> None:
        """The loss has been dealt with: `lost_s` is 0 until the next one."""
        self._lost_at = None
