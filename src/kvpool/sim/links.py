"""Links that transfers share: each instance has an outgoing and an incoming one, for one transfer at a time."""

from __future__ import annotations

__all__ = ["Links"]


class Links:
    """When transfers end that wait for each other.

    A transfer begins when the sender's way out and the receiver's way in are free of those that were asked for before
    it; those do not overtake each other.

    Args:
        instances: How many there are.

    Attributes:
        busy_s: Seconds that all transfers took together, without waiting.
        waited_s: Seconds that they waited.
    """

    def __init__(self, instances: int) -> None:
        self._out = [0.0] * instances
        self._in = [0.0] * instances
        self.busy_s = 0.0
        self.waited_s = 0.0

    def send(self, now: float, source: int, target: int, seconds: float) -> float:
        """A transfer is asked for that takes so long alone. Returns when it ends."""
        start = max(now, self._out[source], self._in[target])
        end = start + seconds
        self._out[source] = self._in[target] = end
        self.busy_s += seconds
        self.waited_s += start - now
        return end
