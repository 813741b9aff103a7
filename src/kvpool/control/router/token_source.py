"""What is known of an instance as one that tells tokens, so that its faults are not taken for those of prompts.

A client can bring an instance to refuse a prompt, to answer with a fault, or to take long for it. So only what no
prompt can bring about ends the questions for all clients at once: no connection; or, of an instance that has never
told tokens, no answer to a short question, or no such path. Other faults do so when several questions in a row, which
differ, have failed. After the pause one question at a time is a trial; while trials fail, pauses grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PAUSE_S", "TokenSource"]

PAUSE_S: Final = 5.0  # the first one
_PAUSE_MAX_S: Final = 60.0
_FAULTS: Final = 3  # in a row


@dataclass
class TokenSource:
    """One instance, from when it came up until it is ejected. Times are seconds of any clock.

    Attributes:
        under_way: Questions.
        proven: It has told tokens.
    """

    under_way: int = 0
    proven: bool = False
    _not_before_s: float = 0.0
    _pauses: int = 0  # since it has told tokens last
    _faults: int = 0  # in a row
    _last: int | None = None  # the question of the last of them, as a hash

    def may_be_asked(self, now: float) -> bool:
        """Whether a question may go to it."""
        return now >= self._not_before_s and not (self._pauses and self.under_way)

    def told(self) -> None:
        """It has told tokens."""
        self.proven = True
        self._pauses = self._faults = 0
        self._not_before_s = 0.0
        self._last = None

    def failed(self, question: bytes, now: float, sure: bool = False, for_long: bool = False) -> float:
        """A question has failed. Returns for how many seconds the instance is not to be asked; 0 for no pause.

        Args:
            question: Which.
            now: The time.
            sure: No question can have brought it about.
            for_long: It will hardly pass.
        """
        if now < self._not_before_s:
            return 0.0  # it was asked before the pause
        if (asked := hash(question)) != self._last:
            self._last = asked
            self._faults += 1
        if not (sure or self._pauses or self._faults >= _FAULTS):
            return 0.0
        pause_s = _PAUSE_MAX_S if for_long else min(PAUSE_S * 2.0**self._pauses, _PAUSE_MAX_S)
        self._pauses = min(self._pauses + 1, 16)
        self._faults, self._last = 0, None
        self._not_before_s = now + pause_s
        return pause_s
