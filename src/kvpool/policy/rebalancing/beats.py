"""Who plans among the live instances: one whose heartbeat goes on while its plans do not is left out.

Who takes itself for the planner counts its epochs, and publishes the count: its beat. The others wait for the next one
by their own clocks. A planner whose beat stands still for too long is left out, and the next one plans; when its beat
goes on it is the planner again.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvpool.policy.rebalancing.turns import planner_of

__all__ = ["Beats"]


class Beats:
    """What one instance has seen of the beats of others. Not thread-safe.

    Args:
        instance: Its id.
        epoch_s: Seconds of an epoch. A reader that was stopped itself does not hold that against others: the time
            between two looks counts as one epoch at most.
        quiet_max_s: A planner whose beat stands still for longer is left out.
    """

    def __init__(self, instance: int, epoch_s: float, quiet_max_s: float) -> None:
        """One that has seen nobody."""
        self._instance = instance
        self._epoch_s = epoch_s
        self._quiet_max_s = quiet_max_s
        self._looked_at: float | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # the beat of each, and for how long it has stood still

    def planner(self, others: Mapping[int, int | None], now: float) -> int:
        """Whom this instance takes for the planner.

        Args:
            others: The beat of each live instance but this one; None: it does not say any.
            now: Seconds, of any origin.
        """
        since = 0.0 if self._looked_at is None else min(now - self._looked_at, self._epoch_s)
        self._looked_at = now
        left = {self._instance, *others}
        seen = {}
        while (found := planner_of(left)) is not None and found != self._instance:
            beat = others[found]
            if beat is None:
                break
            before, quiet = self._seen.get(found, (beat, -since))  # who becomes the planner has all its time
            seen[found] = beat, quiet + since if beat == before else 0.0
            if seen[found][1] <= self._quiet_max_s:
                break
            left.discard(found)
        self._seen = seen
        assert found is not None, "this instance is among them"
        return found
