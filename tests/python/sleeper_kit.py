"""A pool, as far as an engine's sleep concerns it."""

from __future__ import annotations

import kvpool


class Sleeper:
    def __init__(self) -> None:
        self.asleep, self.fails, self.resumed = False, False, 0

    def suspend(self) -> bool:
        if self.fails:
            raise kvpool.Busy("in use")
        was, self.asleep = self.asleep, True
        return not was

    def resume(self) -> None:
        self.asleep = False
        self.resumed += 1
