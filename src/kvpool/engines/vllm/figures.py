"""What the connector counts."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FIGURES", "Figures"]

FIGURES: dict[str, str] = {
    "loads": "Prompts of which a part was loaded",
    "loaded_tokens": "Tokens loaded from DRAM",
    "load_seconds": "Seconds from the begin to the end of loads",
    "failed_loads": "Loads that failed; their tokens were computed",
    "saves": "Saves that ended well",
    "saved_tokens": "Tokens copied to DRAM",
    "save_wait_seconds": "Seconds that steps waited for saves, because they write to their blocks",
    "failed_saves": "Saves that failed, most for lack of room",
    "sends": "Transfers to other engines that ended well",
    "sent_tokens": "Tokens sent to other engines; what the receiver had is not sent",
    "failed_sends": "Transfers to other engines that failed",
    "send_wait_seconds": "Seconds that steps waited for sends, because they write to their blocks",
    "prompt_waits": "Requests whose prompt was announced by another engine",
    "prompt_wait_seconds": "Seconds that these waited for it",
    "expired_waits": "Of these, requests that did not get it in time, and computed it",
    "pulls": "Prompts of which a part was fetched from another engine",
    "pulled_tokens": "Tokens fetched from other engines",
    "pull_wait_seconds": "Seconds that requests waited for answers of other engines, and for fetches",
    "failed_pulls": "Prompts that could not be fetched; they were computed",
}


class Figures(dict[str, float]):
    """Counts of one interval, by a name of FIGURES; a missing one is 0."""

    def add(self, **more: float) -> None:
        """Adds to counts."""
        for name, value in more.items():
            self[name] = self.get(name, 0) + value

    def merge(self, other: Mapping[str, float]) -> None:
        """Adds those of another interval."""
        for name, value in other.items():
            self[name] = self.get(name, 0) + value
