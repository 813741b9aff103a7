"""What other members of the cluster have of the keys that vLLM looks up in a tier.

vLLM asks key by key, in its scheduler's thread. So a key that is not here is put off (`RETRY` to vLLM), all keys of a
step are asked for in one message to each member when the step ends, and the answers are there in one of the next steps:
within `ASK_SECONDS`, or the key is missing. A member holds what it has found until vLLM has loaded all of it, for a
few seconds at most.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvpool import _core
from kvpool.engines.keyed_members import KEYS_MAX, KeyedMembers

__all__ = ["Elsewhere", "TierMembers"]

_HOLD_SECONDS: Final = 5.0  # at the other members, until vLLM loads
_MISSING_SECONDS: Final = 1.0  # for which a key that nobody has is not asked for again
_FAILED_SECONDS: Final = 10.0  # and one whose load has failed: vLLM would look it up and load it for ever


class Elsewhere(enum.Enum):
    """What is known of a key."""

    FOUND = enum.auto()
    MISSING = enum.auto()
    ASKED = enum.auto()


@dataclass
class _Question:
    keys: list[bytes]
    matches: list[_core.PeerKeyMatch]
    until: float  # the end of the hold
    found: dict[bytes, None] = field(default_factory=dict)  # and not loaded yet

    def close(self) -> None:
        for match in self.matches:
            match.close()


class TierMembers:
    """Answers look-ups. vLLM's scheduler calls it; a thread that loads calls `failed`, `ended`, `KeyedMembers.bring`.

    Args:
        members: Whom to ask.
    """

    def __init__(self, members: KeyedMembers) -> None:
        self._members = members
        self._next: dict[bytes, None] = {}  # looked up in this step; in their order
        self._asked: list[_Question] = []
        self._asked_for: dict[bytes, _Question] = {}  # the keys of _asked
        self._answered: list[_Question] = []
        self._found: dict[bytes, _Question] = {}
        self._loads: dict[bytes, _Question] = {}  # found, and being loaded
        self._heard = False  # in this step
        self._missing: dict[bytes, float] = {}  # until when
        self._loaded: list[bytes] = []  # well or not, since the step's beginning
        self._lock = threading.Lock()  # of _missing and _loaded

    def look_up(self, key: bytes) -> Elsewhere:
        """What is known of a key that is not here. Asks, when the step ends, if nothing is."""
        now = time.monotonic()
        if not self._heard:
            self._hear(now)
        if key in self._found:
            return Elsewhere.FOUND
        with self._lock:
            if self._missing.get(key, 0.0) > now:
                return Elsewhere.MISSING
        if key in self._next or key in self._asked_for:
            return Elsewhere.ASKED
        if not self._next and not self._members.asked():
            return Elsewhere.MISSING
        self._next[key] = None
        return Elsewhere.ASKED

    def step_ended(self) -> None:
        """Asks for what was looked up in the step; lets go of what nobody has loaded in time."""
        now = time.monotonic()
        self._hear(now)
        self._heard = False  # in the next one
        with self._lock:
            loaded, self._loaded = self._loaded, []
        for key in loaded:
            if key in self._loads:
                self._loads.pop(key).found.pop(key, None)
        for question in [one for one in self._answered if one.until <= now or not one.found]:
            self._drop(question)
        with self._lock:
            self._missing = {key: until for key, until in self._missing.items() if until > now}
        looked_up, self._next = list(self._next), {}
        for first in range(0, len(looked_up), KEYS_MAX):
            self._ask(looked_up[first : first + KEYS_MAX], now)

    def loading(self, keys: Iterable[bytes]) -> None:
        """VLLM loads these: they need not be found again. The members hold them for the fetch, until `ended`."""
        for key in keys:
            if key in self._found:
                self._loads[key] = self._found.pop(key)

    def ended(self, keys: Sequence[bytes]) -> None:
        """The load of these has ended, well or not. Any thread may call."""
        with self._lock:
            self._loaded += keys

    def failed(self, keys: Sequence[bytes]) -> None:
        """These did not come. Any thread may call."""
        until = time.monotonic() + _FAILED_SECONDS
        with self._lock:
            self._missing |= dict.fromkeys(keys, until)

    def close(self) -> None:
        """Lets go of everything."""
        for question in self._asked + self._answered:
            question.close()
        self._asked, self._answered = [], []
        self._asked_for, self._found, self._loads, self._next = {}, {}, {}, {}

    # ----

    def _ask(self, keys: list[bytes], now: float) -> None:
        try:
            matches = self._members.ask(keys, _HOLD_SECONDS)
        except BaseException:
            self.failed(keys)  # vLLM would look them up for ever
            raise
        question = _Question(keys, matches, now + _HOLD_SECONDS)
        self._asked.append(question)
        self._asked_for |= dict.fromkeys(keys, question)

    def _hear(self, now: float) -> None:
        """Takes the answers that are complete. Each question has a short deadline, so that all are soon."""
        self._heard = True
        asked, self._asked = self._asked, []
        for question in asked:
            if all(match.done() for match in question.matches):
                self._take(question, now)
            else:
                self._asked.append(question)

    def _take(self, question: _Question, now: float) -> None:
        for key in question.keys:
            self._asked_for.pop(key, None)
        found = np.zeros(len(question.keys), bool)
        for match in question.matches:
            there = self._members.answer(match)
            if there is not None:
                found |= there
        question.found = {key: None for key, good in zip(question.keys, found, strict=True) if good}
        self._found |= dict.fromkeys(question.found, question)
        with self._lock:
            for key, good in zip(question.keys, found, strict=True):
                if not good:
                    self._missing[key] = now + _MISSING_SECONDS
        self._answered.append(question)

    def _drop(self, question: _Question) -> None:
        self._answered.remove(question)
        question.close()
        for key in question.found:
            for held in (self._found, self._loads):
                if held.get(key) is question:
                    del held[key]
